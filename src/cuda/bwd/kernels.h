// The preprocessing kernels share these: the tokens that count, how these are read, and the launches by types.
#pragma once
#include <type_traits>

#include "cuda/bwd/exponents.h"
#include "cuda/bwd/preprocess.h"
#include "cuda/bwd/wide_tiles.h"
#include "cuda/host/launch.h"
#include "cuda/operands/vec8.h"

namespace octet::cuda {

constexpr int kPreprocessThreads = 256;
// The threads that write tiles of a dim: eight rows at a time, and each thread eight columns of a row.
template <int Dim>
constexpr int kTileThreads = Dim > kPreprocessThreads ? Dim : kPreprocessThreads;

// Returns the tokens of a sequence that count: the keys that some query sees, or the queries that see some key. All
// other tokens may hold anything.
__device__ inline Interval counted(const PreprocessParams& p, bool queries, int sequence) {
  const int n = p.q_blocks.tokens_of(sequence), m = p.k_blocks.tokens_of(sequence);
  return queries ? p.mask.seeing(n, m) : p.mask.seen(n, m);
}
// Returns true if a token of packed sequences counts.
__device__ inline bool counts(const PreprocessParams& p, bool queries, int token) {
  const Blocks& blocks = queries ? p.q_blocks : p.k_blocks;
  const int sequence = blocks.sequence_at(token), i = token - blocks.cu_seqlens[sequence];
  const Interval range = counted(p, queries, sequence);
  return range.first <= i && i < range.last;
}

// The threads of a warp that have the same row of `Vecs` vectors.
template <int Vecs>
constexpr int kLanesOfRow = Vecs < 32 ? Vecs : 32;

// Combines the sizes of the two warps that share a row of more than 32 threads, and adds sums of theirs. All threads of
// a block of `Threads` call it. Kernel is a type that no other kernel has, as a variable in shared memory belongs to
// one.
template <int Threads, class Kernel, class... Sums>
__device__ void join_warps(Size& size, Sums&... sums) {
  __shared__ float parts[Threads / 32][2 + sizeof...(Sums)];
  float *of_this = parts[threadIdx.x / 32], *of_other = parts[threadIdx.x / 32 ^ 1];
  __syncthreads();  // the parts of the rows before have been read
  if (threadIdx.x % 32 == 0) *of_this++ = size.most, *of_this++ = size.sum, ((*of_this++ = sums), ...);
  __syncthreads();
  size.most = fmaxf(size.most, *of_other++), size.sum += *of_other++, ((sums += *of_other++), ...);
}

// Converts eight channels and rounds them to `type`. An input type other than void is that type already.
template <class In>
__device__ void take(const RawVec8<In>& raw, octet_dtype type, Vec8& x) {
  raw.convert(x);
  if constexpr (std::is_void_v<In>)
    for (float& y : x) y = type == OCTET_BF16 ? float(Bf16(y)) : type == OCTET_F16 ? float(F16(y)) : y;
}

// Returns the number of tiles of all heads, to be written or only read.
inline unsigned preprocess_tiles(const PreprocessParams& p) {
  const int of_head = p.group * p.q_blocks.count + (p.measures_all_keys ? p.k_blocks.count : 0);
  return static_cast<unsigned>(p.k.shape[0] * p.k.shape[1]) * static_cast<unsigned>(of_head);
}

// The launches of the kernels, one file each. In is the type of all inputs but the residual of o, which is bytes then;
// their vectors are whole words. void: any types and strides. T is the type of tiles.
template <class In>
void launch_stats(const PreprocessParams& p, cudaStream_t stream);
template <class T, class In>
void launch_tiles(const PreprocessParams& p, cudaStream_t stream);
template <class T, class In>
void launch_rescale(const PreprocessParams& p, cudaStream_t stream);

}  // namespace octet::cuda
