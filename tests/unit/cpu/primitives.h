// These calls reach what the CPU's kernels stand on, the gemm, the packing and the softmax of one instruction set, with
// plain arrays. primitives.cc is compiled once per instruction set, as the kernels are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dropout.h"
#include "core/problem.h"
#include "cpu/attention/job.h"

namespace octet::cpu::test {

enum class Engine { f32, bf16, int8, uint8, split };  // int8: A signed; uint8: A unsigned; split: float32 in bf16 tiles

// c [rows][columns] (+)= a [rows][depth] b [depth][columns].
struct Product {
  Engine engine;
  int64_t rows, columns, depth;
  const float *a = nullptr, *b = nullptr;
  double* c = nullptr;
  bool accumulate = false;
  bool transposed_a = false;  // A lies by columns; engines of one number a word
  bool skip_zeros = false;    // matmul_skipping_zeros; engines of floats, accumulating
  void* memory = nullptr;     // aligned to 64 bytes; two megabytes are enough
  bool outside = false;       // set if something beside c was written
};

// k and v of a problem as the forward pass packs them, back as the numbers that the kernels multiply: [kv head][token]
// [dim], elements times scales; k in the rotated frame and without its mean. Also the scales and the mean themselves.
struct PackedKeys {
  double *k, *v;
  float *k_scale, *v_scale;  // [kv head][token]
  float *k_mean, *v_mean;    // [kv head][kMaxDim]
};

// One row of a forward pass, [keys], from logits to P in scales of 256 keys. `stale_max`: with the maximum
// of earlier scales where that does. p: the probabilities that the kernel multiplies v by; l, m as it keeps them.
struct SoftmaxRow {
  PFormat format;
  const float* logits;
  int64_t keys;
  int64_t first, last;  // the keys that the row sees
  bool stale_max;
  double* p;
  double lse = 0;
};

struct Primitives {
  const char* name;
  int64_t column_step;    // columns of a product are a multiple of it
  int64_t panel_columns;  // columns that the inner loop takes at a time
  bool has_split;
  void (*product)(Product&);
  void (*exp2)(int degree, const float* x, float* y, int64_t n);  // n: a multiple of 16
  std::size_t (*pack_bytes)(const Problem&);
  void (*pack_keys)(const Problem&, void* memory, const PackedKeys& out);
  // Queries [token, token + rows) of head 0: [rows][dim], elements times scales; the scales, [rows].
  void (*pack_queries)(const Problem&, int64_t token, int64_t rows, void* memory, double* q, float* scale);
  void (*softmax_row)(SoftmaxRow&);
  void (*find_kept)(const DropoutStream&, uint32_t dropped, int64_t token, int64_t rows, int64_t key, uint64_t* kept);
};

// Returns those of the instruction set that OCTET_CPU names, or of the best one that this machine runs.
const Primitives& primitives();

}  // namespace octet::cpu::test
