// Rows of q, k and v to codes. Lanes of a warp share a row, eight channels each.
#include <type_traits>

#include "cuda/host/status.h"
#include "cuda/ptx/types.h"
#include "cuda/quant/codes.h"
#include "cuda/quant/elements.h"
#include "cuda/quant/key_tiles.h"
#include "cuda/tile/shared.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256, kQueries = 64;  // queries of a thread block

template <class Vectors, int Lanes>
struct Row : Vectors {
  static constexpr int kRows = kThreads / Lanes;  // at a time
  static __device__ int lane() { return threadIdx.x % Lanes; }
  static __device__ int row() { return threadIdx.x / Lanes; }
  static __device__ int channel() { return lane() * kVector; }

  // Channels past the row's end are 0.
  static __device__ typename Vectors::Raw load(const Strided& t, int64_t batch, int64_t head, int64_t token) {
    if (channel() < t.shape[3]) return Vectors::load(t, {batch, head, token, channel()});
    return {};
  }

  static __device__ float sum(float x) {
    for (int by = 1; by < Lanes; by *= 2) x += __shfl_xor_sync(~0u, x, by);
    return x;
  }

  // octet::amax: NaN lies above infinity.
  static __device__ float amax(const Vector& x) {
    int most = 0;
    for (const float element : x) most = max(most, __float_as_int(element) & 0x7fffffff);
    for (int by = 1; by < Lanes; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
    return __int_as_float(most);
  }

  // octet::hadamard: stages at distance 1, 2, 4 within a lane, then between lanes.
  static __device__ void rotate(const Rotation& r, Vector& x) {
    const unsigned negative = r.negative[channel() / 32] >> channel() % 32;
    for (int i = 0; i < kVector; ++i) x[i] = negative >> i & 1 ? -x[i] : x[i];
#pragma unroll
    for (int half = 1; half < kVector; half *= 2)
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i & half) continue;
        const float a = x[i], b = x[i + half];
        x[i] = a + b, x[i + half] = a - b;
      }
#pragma unroll
    for (int by = 1; by < Lanes; by *= 2) {
      if (by * kVector >= r.block) continue;
      const bool upper = lane() & by;
      for (float& element : x) {
        const float other = __shfl_xor_sync(~0u, element, by);
        element = upper ? other - element : element + other;
      }
    }
    for (float& element : x) element = __fmul_rn(element, r.norm);
  }

  // Codes of a row and its step. A row that is not finite has step NaN and codes 0.
  template <class Code>
  static __device__ float encode(const Vector& x, uint2& codes) {
    constexpr float kTop = std::is_same_v<Code, S8> ? 127.f : 448.f;
    const float most = amax(x);
    const bool finite = most <= FLT_MAX;
    const Step step = step_of(finite ? most : 0.f, kTop);
    float scaled[kVector];
    for (int i = 0; i < kVector; ++i) scaled[i] = finite ? __fmul_rn(x[i], step.inverse) : 0.f;
    codes = pack_codes<Code>(scaled);
    return finite ? step.step : NAN;
  }

  template <class Code>
  static __device__ uint2 pack_codes(const Vector& x) {
    return {ptx::pack<Code>(x[0], x[1], x[2], x[3]), ptx::pack<Code>(x[4], x[5], x[6], x[7])};
  }
};

// Calls f(i, row i) for `rows` rows from a tile's first token; those past its tokens are 0.
template <class R, class F>
__device__ void for_batches(const Strided& t, int batch, int head, const TileOfKeys& tile, int rows, const F& f) {
  constexpr int kBatch = R::kBatch;
  for (int first = R::row(); first < rows; first += kBatch * R::kRows) {
    typename R::Raw raw[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * R::kRows;
      raw[j] = i < tile.tokens ? R::load(t, batch, head, tile.first + i) : typename R::Raw{};
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * R::kRows >= rows) break;
      Vector x;
      R::convert(raw[j], x);
      f(first + j * R::kRows, x);
    }
  }
}

template <class Code, class Vectors, int Lanes>
__device__ void quantise_q(const CodesArguments& a, int block) {
  using R = Row<Vectors, Lanes>;
  const int tokens = static_cast<int>(a.q.shape[2]), blocks = (tokens + kQueries - 1) / kQueries;
  const int first = block % blocks * kQueries, side = block / blocks, head = side % a.heads, batch = side / a.heads;
  for_batches<R>(a.q, batch, head, {0, first, min(tokens - first, kQueries)}, kQueries, [&](int i, Vector& x) {
    const int token = first + i;
    const bool present = token < tokens;
    const int64_t at = static_cast<int64_t>(side) * tokens + token;
    if (a.mean_logit) {
      const int sequence =
          a.cu_seqlens_q ? last_at_most(token, a.keys.sequences, [&](int s) { return a.cu_seqlens_q[s]; }) : batch;
      const float* mean = a.channels.k_mean +
                          (static_cast<int64_t>(sequence) * a.kv_heads + head / (a.heads / a.kv_heads)) * a.dim +
                          R::channel();
      float product = 0.f;
      for (int c = 0; c < kVector; ++c) product = fmaf(x[c], mean[c], product);
      product = R::sum(product);
      if (present && R::lane() == 0) a.mean_logit[at] = product;
    }
    if (a.rotation.block) R::rotate(a.rotation, x);
    uint2 codes;
    const float step = R::template encode<Code>(x, codes);
    if (!present) return;
    *reinterpret_cast<uint2*>(static_cast<unsigned char*>(a.q_codes) + at * a.dim + R::channel()) = codes;
    if (R::lane() == 0) a.q_step[at] = step;
  });
}

template <class Code, class Vectors, int Lanes>
__device__ void quantise_k(const CodesArguments& a, int block) {
  using R = Row<Vectors, Lanes>;
  const int tiles = a.keys.count(), side = block / tiles, head = side % a.kv_heads, batch = side / a.kv_heads;
  const TileOfKeys tile = tile_of_keys(a.keys, block % tiles);
  const int sequence = a.keys.cu_seqlens ? tile.sequence : batch;
  Vector mean{};
  if (a.channels.k_mean)
    for (int i = 0; i < kVector; ++i)
      mean[i] = a.channels.k_mean[(static_cast<int64_t>(sequence) * a.kv_heads + head) * a.dim + R::channel() + i];
  for_batches<R>(a.k, batch, head, tile, a.keys.tile, [&](int i, Vector& x) {
    if (i < tile.tokens)
      for (int c = 0; c < kVector; ++c) x[c] -= mean[c];
    if (a.rotation.block) R::rotate(a.rotation, x);
    uint2 codes;
    const float step = R::template encode<Code>(x, codes);
    const int64_t at = static_cast<int64_t>(block) * a.keys.tile + i;
    *reinterpret_cast<uint2*>(static_cast<unsigned char*>(a.k_codes) + at * a.dim + R::channel()) = codes;
    if (R::lane() == 0) a.k_step[at] = step;
  });
}

// Byte b of four words, from each.
__device__ uint32_t gather(const uint32_t (&words)[4], int b) {
  const uint32_t low = __byte_perm(words[0], words[1], b | (b + 4) << 4);
  const uint32_t high = __byte_perm(words[2], words[3], b | (b + 4) << 4);
  return __byte_perm(low, high, 0x5410);
}

// Through shared memory: rows of tokens become rows of channels.
template <class Code, class Vectors, int Lanes>
__device__ void quantise_v(const CodesArguments& a, int block, uint32_t* words) {
  using R = Row<Vectors, Lanes>;
  constexpr int kWords = Lanes * kVector / 4, kGroup = 16;
  auto* const steps = reinterpret_cast<float*>(words + a.keys.tile * kWords + a.keys.tile / kGroup * 4);
  const int tiles = a.keys.count(), side = block / tiles, head = side % a.kv_heads, batch = side / a.kv_heads;
  const TileOfKeys tile = tile_of_keys(a.keys, block % tiles);
  const int sequence = a.keys.cu_seqlens ? tile.sequence : batch;
  const int64_t channels = (static_cast<int64_t>(sequence) * a.kv_heads + head) * a.dim + R::channel();
  // Groups of 16 tokens lie four words apart, so that threads read them from different banks.
  const auto word_of = [&](int token, int word) { return token * kWords + token / kGroup * 4 + word; };
  const float scale = a.v_scale.at(batch, head);
  Vector mean{}, inverse;
  for (int i = 0; i < kVector; ++i) {
    if (a.channels.v_mean) mean[i] = a.channels.v_mean[channels + i];
    inverse[i] = a.channels.v_inverse ? a.channels.v_inverse[channels + i] : 1.f;
  }
  for_batches<R>(a.v, batch, head, tile, a.keys.tile, [&](int i, Vector& x) {
    if (i < tile.tokens) {
      for (float& element : x) element = __fmul_rn(element, scale);
      for (int c = 0; c < kVector; ++c) x[c] = a.v_step ? x[c] - mean[c] : __fmul_rn(x[c], inverse[c]);
    }
    uint2 codes;
    if (a.v_step) {
      const float step = R::template encode<Code>(x, codes);
      if (R::lane() == 0) steps[i] = step;
    } else {
      for (float& element : x) element = isinf(element) ? NAN : element;
      codes = R::template pack_codes<Code>(x);
    }
    *reinterpret_cast<uint2*>(&words[word_of(i, 2 * R::lane())]) = codes;
  });
  __syncthreads();
  if (a.v_step) {
    float most = 0.f;
    for (int i = 0; i < a.keys.tile; ++i) most = fmaxf(most, steps[i]);
    const float least = most == 0.f ? 1.f : most * 0x1p-40f;
    for (int i = threadIdx.x; i < a.keys.tile; i += kThreads) {
      const float step = steps[i] == 0.f ? least : steps[i];
      float* const to = a.v_step + static_cast<int64_t>(block) * 2 * a.keys.tile + i;
      to[0] = log2f(step);
      to[a.keys.tile] = isnan(step) ? 0.f : __frcp_rn(step);
    }
  }
  const int groups = a.keys.tile / kGroup;
  const int64_t row = static_cast<int64_t>(tiles) * a.keys.tile;
  for (int item = threadIdx.x; item < groups * kWords; item += kThreads) {
    const int group = item % groups, word = item / groups;
    uint32_t tokens[4][4];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) tokens[i / 4][i % 4] = words[word_of(group * kGroup + byte_order(i), word)];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int64_t at = (static_cast<int64_t>(side) * a.dim + 4 * word + b) * row +
                         static_cast<int64_t>(block % tiles) * a.keys.tile + group * kGroup;
      *reinterpret_cast<uint4*>(static_cast<unsigned char*>(a.v_codes) + at) = {
          gather(tokens[0], b), gather(tokens[1], b), gather(tokens[2], b), gather(tokens[3], b)};
    }
  }
}

// Thread blocks of q come first, then those of k, then those of v.
struct Blocks {
  int q, k, v;
};

template <class QCode, class VCode, class Vectors, int Lanes>
__global__ void __launch_bounds__(kThreads, 3) quantise_kernel(const CodesArguments a, const Blocks blocks) {
  extern __shared__ uint32_t words[];
  const int block = blockIdx.x;
  if (block < blocks.q)
    quantise_q<QCode, Vectors, Lanes>(a, block);
  else if (block < blocks.q + blocks.k)
    quantise_k<QCode, Vectors, Lanes>(a, block - blocks.q);
  else
    quantise_v<VCode, Vectors, Lanes>(a, block - blocks.q - blocks.k, words);
}

template <class QCode, class VCode, int Lanes>
void launch(const CodesArguments& a, cudaStream_t stream) {
  const int64_t batch = a.q.shape[0], tiles = batch * a.kv_heads * a.keys.count();
  const int64_t q = batch * a.heads * ((a.q.shape[2] + kQueries - 1) / kQueries);
  const Blocks blocks{a.q_code == Code::none ? 0 : static_cast<int>(q),
                      a.k_code == Code::none ? 0 : static_cast<int>(tiles),
                      a.v_code == Code::none ? 0 : static_cast<int>(tiles)};
  const int all = blocks.q + blocks.k + blocks.v;
  if (!all) return;
  const int bytes = a.keys.tile * (a.dim + 1 + static_cast<int>(sizeof(float)));  // words, gaps, steps
  with_vectors({&a.q, &a.k, &a.v}, [&](auto vectors) {
    quantise_kernel<QCode, VCode, decltype(vectors), Lanes><<<all, kThreads, bytes, stream>>>(a, blocks);
  });
  check(cudaGetLastError(), "quantise");
}

template <class QCode, class VCode>
void launch(const CodesArguments& a, cudaStream_t stream) {
  a.dim == 64 ? launch<QCode, VCode, 8>(a, stream) : launch<QCode, VCode, 16>(a, stream);
}

__global__ void fill_kernel(const HeadScale q, const HeadScale k, int heads, int group, int tokens, float* steps) {
  const int side = blockIdx.y, batch = side / heads, head = side % heads;
  const float step = q.at(batch, head) * k.at(batch, head / group);
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < tokens; i += gridDim.x * kThreads)
    steps[static_cast<int64_t>(side) * tokens + i] = step;
}

}  // namespace

void fill_steps(const HeadScale& q, const HeadScale& k, int batch, int heads, int kv_heads, int tokens, float* steps,
                cudaStream_t stream) {
  if (!batch || !heads || !tokens) return;
  fill_kernel<<<dim3((tokens + kThreads - 1) / kThreads, batch * heads), kThreads, 0, stream>>>(
      q, k, heads, heads / kv_heads, tokens, steps);
  check(cudaGetLastError(), "fill_steps");
}

void quantise(const CodesArguments& a, cudaStream_t stream) {
  const bool integers = a.q_code == Code::s8;
  if (a.dim == 256) return launch<S8, E4m3, 32>(a, stream);  // without v
  if (a.v_code == Code::s8)
    launch<S8, S8>(a, stream);
  else if (integers)
    launch<S8, E4m3>(a, stream);
  else
    launch<E4m3, E4m3>(a, stream);
}

}  // namespace octet::cuda
