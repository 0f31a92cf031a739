// The one header that a rung includes. A rung is one file, N_name.cu, and becomes one program: it defines ladder::rung
// at its end, and the harness (harness/) does the rest: flags, inputs, the float64 reference, the check, the timing.
//
// What a rung defines:
//   1. Its kernels, in namespace ladder and an unnamed namespace inside it.
//   2. For each choice of --kernel a Kernel: its name, the shared memory of one block, the workspace that it needs, and
//      launch(problem, arguments, stream), which only puts work on the stream. It does not allocate or synchronise.
//      The first Kernel is the one that runs without --kernel.
//   3. const Rung rung = {...}: the name of the file, the idea in one line, the element type of q, k, v and o.
// What holds before launch is called: the element type is the rung's, dim is one of rung.dims, seq, batch and heads are
// at least 1 (seq need not be a multiple of anything), the GPU has the shared memory, and the workspace is allocated
// and aligned to 256 bytes. Its contents are arbitrary.
//
// Where q and k are to be rotated (RoPE), the harness does it before launch, unless the rung says that it rotates.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif
using cudaStream_t = struct CUstream_st*;  // the same as CUDA's, for files that are compiled without it

namespace ladder {

enum class Element { f32, f16, bf16 };

// Attention over q, k, v and o of shape [batch, heads, seq, dim], contiguous. Causal: query i sees keys 0 to i.
struct Problem {
  int batch = 1, heads = 16, seq = 4096, dim = 64;
  bool causal = false;

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(dim)); }
  int64_t rows() const { return static_cast<int64_t>(batch) * heads * seq; }
  int64_t elements() const { return rows() * dim; }
};

// RoPE turns pairs of channels by an angle that grows with the position: channels c and c + dim / 2 (halves), or
// 2c and 2c + 1 (interleaved).
enum class Pairing { none, halves, interleaved };

// Turns (x, y) into (x cosine - y sine, x sine + y cosine).
struct Rotation {
  float cosine, sine;
};

// Device pointers.
struct Arguments {
  const void *q, *k, *v;      // [batch, heads, seq, dim] of the rung's element type, aligned to 256 bytes
  void* o;                    // the same
  void* workspace;            // what workspace_bytes asked for, or null
  const Rotation* rotations;  // [seq, dim / 2] for rungs that rotate q and k themselves; null: no rotation
  Pairing pairing;            // none where rotations is null
};

struct Kernel {
  const char* name;                           // the value of --kernel
  size_t (*shared_bytes)(const Problem&);     // of one block, static and dynamic; null: none
  size_t (*workspace_bytes)(const Problem&);  // device memory beside q, k, v and o; null: none
  void (*launch)(const Problem&, const Arguments&, cudaStream_t);
  bool part = false;  // a step of the first kernel: it is timed alone, on what the first kernel left in the workspace
  // Replaces q, k and v (float, after rotation and rounding to the element type) by the values that the kernel really
  // multiplies, for rungs that quantize. The check compares with float64 attention over these values, and reports
  // the error against the original ones beside it. Null: the kernel multiplies what it is given.
  void (*as_seen)(const Problem&, std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) = nullptr;
};

struct Rung {
  const char* name;  // as the file, such as "1_unfused"
  const char* idea;  // one line
  Element element;
  bool rotates;                 // launch applies RoPE: the harness does not
  std::vector<int> dims;        // the head dims that it has kernels for
  std::vector<Kernel> kernels;  // the first is the default
  int capability = 0;           // runs on this compute capability alone (90: Hopper); 0: on any
};

// Each rung defines this.
extern const Rung rung;

constexpr float kLog2E = 1.44269504088896f;  // log2(e): exp(x) = 2^(x log2(e))

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#ifdef __CUDACC__
// Every CUDA call goes through here.
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const bool other = status == cudaErrorNoKernelImageForDevice;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status) +
                           (other ? "; ladder/build KERNEL ARCH builds the program for this GPU" : ""));
}

// A block for each `queries` queries of every head: x counts blocks and y heads, or, under the causal mask, x heads and
// y blocks. Blocks start in the order of x, then y; see what rungs 4 and 5 do with it.
inline dim3 grid_of(const Problem& p, int queries) {
  const unsigned heads = p.batch * p.heads, blocks = static_cast<unsigned>(ceil_div(p.seq, queries));
  const dim3 grid = p.causal ? dim3(heads, blocks) : dim3(blocks, heads);
  if (grid.y > 65535) {  // the largest y of a GPU
    throw std::runtime_error(
        (p.causal ? "seq: found " + std::to_string(p.seq) : "batch * heads: found " + std::to_string(heads)) +
        ", allowed: at most " + std::to_string(65535ll * (p.causal ? queries : 1)));
  }
  return grid;
}

// 2^x in one instruction; 0 at minus infinity.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Launches kernel<<<grid, block, shared, stream>>>(arguments...). More than 48 KiB of shared memory have to be asked
// for; errors of the launch itself (a grid that is too large, no machine code for this GPU) are thrown here.
template <typename... Parameters, typename... Given>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
            Given... arguments) {
  if (shared > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), name);
  }
  kernel<<<grid, block, shared, stream>>>(arguments...);
  check(cudaGetLastError(), name);
}
#endif

}  // namespace ladder
