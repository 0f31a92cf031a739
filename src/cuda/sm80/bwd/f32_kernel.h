// The backward pass in f32. A thread block has a block of keys and sums dk and dv over the queries that see it, or a
// block of queries and sums dq over its keys:
//
//   for each tile of tokens that the block meets:
//     dp = y w^T      s = x u^T      p = exp(scale s - lse)      ds = p (dp - delta)
//     of keys:  dv += p w            dk += ds u                  with x, y, u, w = k, v, q, do; p and ds transposed
//     of queries:                    dq += ds u                  with x, y, u, w = q, do, k, v
//
// So seven products take the place of five, and no sum depends on an order: the results are the same in every run. A
// warp has 16 kRowBlocks rows of the block, and their p and ds in registers, which are left operands of the sums. Each
// product is three of f16 halves (sm80/f16_halves.h). u and w have one stage each: the next w is loaded while ds u and
// the next dp are computed, the next u beside the next dp.
//
// Numbers without halves, inf and NaN, are zeros to tensor cores and are added in float32, so that what a mask hides
// changes no bit of the rest.
#pragma once
#include "cuda/bwd/params.h"
#include "cuda/fragment/dropout.h"
#include "cuda/operands/vec8.h"
#include "cuda/sm80/f16_halves.h"
#include "cuda/sm80/logits.h"

namespace octet::cuda::sm80 {

struct F32Operand {
  F16HalvesView halves;
  Output numbers;  // in f32, rows of whole 16-byte words
  int channels;
};

struct F32Params {
  F32Operand q, k, v, do_;
  const float *lse, *delta;  // [batch, head, token]: lse minus the row bias; do.o - dlse
  Strided dq, dk, dv;
  LogitTerms terms;
  Blocks q_blocks, k_blocks;
  Mask mask;
  int heads, kv_heads, tokens_q;
  float scale;
  Dropout dropout;  // of kernels with general logits
};

// The sums that a kernel computes. At d256, and at d128 with general logits, dk and dv take a kernel each, as registers
// do not suffice for both.
enum class F32Sums : int { dk_and_dv, dk, dv, dq, dmask };

//   kWarps        warps of a thread block
//   kRowBlocks    blocks of 16 rows of a warp
//   kTokens       tokens of a tile
//   kBlocks       thread blocks that a multiprocessor's registers must have room for
template <int Dim>
struct F32Tile;
template <>
struct F32Tile<64> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kTokens = 32, kBlocks = 3;
};
template <>
struct F32Tile<128> {
  static constexpr int kWarps = 4, kRowBlocks = 1, kTokens = 32, kBlocks = 2;
};
template <>
struct F32Tile<256> {
  static constexpr int kWarps = 2, kRowBlocks = 1, kTokens = 16, kBlocks = 2;
};
template <int Dim>
constexpr int kF32Rows = 16 * F32Tile<Dim>::kWarps* F32Tile<Dim>::kRowBlocks;

// A mask tensor alone is a general logit here.
template <int Dim, F32Sums which, Logits logits>
struct F32Backward {
  using C = F32Tile<Dim>;
  static constexpr bool kGeneral = logits == Logits::general;
  static constexpr bool kOfKeys = which != F32Sums::dq && which != F32Sums::dmask;
  static constexpr bool kSumsDv = which == F32Sums::dk_and_dv || which == F32Sums::dv, kSumsDs = which != F32Sums::dv;
  static constexpr int kRowBlocks = C::kRowBlocks, kTokens = C::kTokens, kRows = kF32Rows<Dim>;
  static constexpr int kThreads = 32 * C::kWarps;

  using BlockTile = SharedTile<F16, kRows, Dim>;
  using OtherTile = SharedTile<F16, kTokens, Dim>;
  using Block = HalfTiles<BlockTile>;
  using Others = HalfTiles<OtherTile>;
  using Pairs = Accumulator<kTokens>[kRowBlocks];  // a number for each row of a warp and each token of a tile
  using Sums = Accumulator<Dim>[kRowBlocks];

  struct alignas(128) Shared {
    unsigned char x[Block::kBytes], y[Block::kBytes], u[Others::kBytes], w[Others::kBytes];
    float x_factor[kRows], y_factor[kRows], u_factor[kTokens], w_factor[kTokens];
    // The block and its tiles. They lie in shared memory because the sums leave few registers.
    int batch, kv_head, first;     // first: the first token of the block
    Blocks::Sequence own, others;  // of the block and of the tiles
    int start, end, last_head;     // tokens that the block meets, and the end of their heads
    // Those of the queries: of the tile where the block is of keys, else of the block.
    float lse[kOfKeys ? kTokens : kRows], delta[kOfKeys ? kTokens : kRows];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kSharedBytes <= kMostSharedBytes);

  const F32Params& a;
  Shared& shared;

  // A tile of tokens, and the head of q of its pairs.
  struct At {
    int head, token;
  };

  __device__ const Blocks::Sequence& q() const { return kOfKeys ? shared.others : shared.own; }
  __device__ const Blocks::Sequence& k() const { return kOfKeys ? shared.own : shared.others; }
  __device__ const F32Operand& x() const { return kOfKeys ? a.k : a.q; }
  __device__ const F32Operand& y() const { return kOfKeys ? a.v : a.do_; }
  __device__ const F32Operand& u() const { return kOfKeys ? a.q : a.k; }
  __device__ const F32Operand& w() const { return kOfKeys ? a.do_ : a.v; }
  // The heads of x and y, and of u and w.
  __device__ int own_head(const At& at) const { return kOfKeys ? shared.kv_head : at.head; }
  __device__ int others_head(const At& at) const { return kOfKeys ? at.head : shared.kv_head; }

  // Read anew where it is used: the compiler would keep all that it works out from threadIdx in registers throughout
  // the kernel, for which there is no room.
  static __device__ int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
  }
  static __device__ int warp() { return thread() / 32; }
  static __device__ int lane() { return thread() % 32; }
  // Element i of row block m belongs to row first_row() + row_of(m, i) of the block and token first_token() +
  // token_of(i) of the tile.
  static __device__ int first_row() { return warp() * (16 * kRowBlocks) + lane() / 4; }
  static __device__ int first_token() { return lane() % 4 * 2; }
  static constexpr __device__ int row_of(int m, int i) { return 16 * m + i / 2 % 2 * 8; }
  static constexpr __device__ int token_of(int i) { return i / 4 * 8 + i % 2; }

  // Start the copies of `Rows` tokens from `token` on; those beyond the sequence become zeros.
  template <class Tile>
  __device__ void load(const HalfTiles<Tile>& to, float* factors, const F32Operand& from, int head,
                       const Blocks::Sequence& s, int token) const {
    const int64_t at = int64_t{s.first} + token;
    const F16* const row = from.halves.tensor.row<F16>(shared.batch, head, at);
    const Interval there{0, s.tokens - token};
    load_async<kThreads>(to.large(), row, 2 * Dim, there, Dim);
    load_async<kThreads>(to.small(), row + Dim, 2 * Dim, there, Dim);
    load_words_async<kThreads, Tile::kRows>(factors, from.halves.factors.at(shared.batch, head, at), there);
  }
  template <int Rows>
  __device__ void load_statistics(int head, int query) const {
    const int64_t at = (int64_t{shared.batch} * a.heads + head) * a.tokens_q + q().first + query;
    const Interval there{0, q().tokens - query};
    load_words_async<kThreads, Rows>(shared.lse, a.lse + at, there);
    load_words_async<kThreads, Rows>(shared.delta, a.delta + at, there);
  }
  __device__ void load_u(const At& at) const {
    if (is_there(at)) {
      load(Others{shared.u}, shared.u_factor, u(), others_head(at), shared.others, at.token);
      if constexpr (kOfKeys) load_statistics<kTokens>(at.head, at.token);
    }
    ptx::cp_async_commit();
  }
  __device__ void load_w(const At& at) const {
    if (is_there(at)) load(Others{shared.w}, shared.w_factor, w(), others_head(at), shared.others, at.token);
    ptx::cp_async_commit();
  }
  __device__ void load_block(const At& at) const {
    load(Block{shared.x}, shared.x_factor, x(), own_head(at), shared.own, shared.first);
    if constexpr (kSumsDs) load(Block{shared.y}, shared.y_factor, y(), own_head(at), shared.own, shared.first);
    if constexpr (!kOfKeys) load_statistics<kRows>(at.head, shared.first);
  }

  // Returns true if one of `Count` tokens has numbers without halves.
  template <int Count>
  static __device__ bool any_odd(const float* factors) {
    static_assert(Count <= 32 && 32 % Count == 0);
    return __any_sync(~0u, factors[lane() % Count] < 0.f);
  }

  // Computes the products of rows of two operands: of this warp's rows of the block, and the tokens of a tile.
  __device__ void multiply(Pairs& d, unsigned char* left, const float* left_factors, const F32Operand& left_operand,
                           unsigned char* right, const float* right_factors, const F32Operand& right_operand,
                           const At& at) const {
    multiply_ABt(d, Block{left}, warp() * kRowBlocks, Others{right});
    const float *const of_rows = left_factors + first_row(), *const of_tokens = right_factors + first_token();
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) times_factors(d[m], of_rows + 16 * m, of_tokens);
    if (!any_odd<16 * kRowBlocks>(left_factors + warp() * (16 * kRowBlocks)) && !any_odd<kTokens>(right_factors))
      return;
#pragma unroll 1
    for (int j = 0; j < kRowBlocks * kTokens / 2; ++j) {
      const int i = j % (kTokens / 2), row = first_row() + row_of(j / (kTokens / 2), i),
                token = first_token() + token_of(i);
      if (!(left_factors[row] < 0.f || right_factors[token] < 0.f)) continue;
      if (shared.first + row >= shared.own.tokens || at.token + token >= shared.others.tokens) continue;
      const float* const from_left =
          left_operand.numbers.row<float>(shared.batch, own_head(at), int64_t{shared.own.first} + shared.first + row);
      const float* const from_right = right_operand.numbers.row<float>(shared.batch, others_head(at),
                                                                       int64_t{shared.others.first} + at.token + token);
      float sum = 0.f;
#pragma unroll 1
      for (int c = 0; c < left_operand.channels; ++c) sum = fmaf(from_left[c], from_right[c], sum);
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
        for (int each = 0; each < kTokens / 2; ++each)
          d[m].x[each] = m * (kTokens / 2) + each == j ? sum : d[m].x[each];
    }
  }

  __device__ int sequence() const { return a.k_blocks.cu_seqlens ? k().index : shared.batch; }

  // Returns false if all queries of a tile or the block see all keys of the other one.
  __device__ bool needs_mask(int token) const {
    const int query = kOfKeys ? token : shared.first, queries = kOfKeys ? kTokens : kRows;
    const int key = kOfKeys ? shared.first : token, keys = kOfKeys ? kRows : kTokens;
    if (query + queries > q().tokens || key + keys > k().tokens) return true;
    return a.mask.keys_of(query, q().tokens, k().tokens).last < key + keys ||
           a.mask.keys_of(query + queries - 1, q().tokens, k().tokens).first > key;
  }

  // Turns products of q and k into p, without what dropout drops, and those of do and v into ds.
  __device__ void take_p_and_ds(Pairs& s, Pairs& dp, const At& at) const {
    const int row = first_row(), token = first_token(), of_query = kOfKeys ? token : row;
    const float *const lse = shared.lse + of_query, *const delta = shared.delta + of_query;
    const int query = kOfKeys ? at.token + token : shared.first + row;
    const int key = kOfKeys ? shared.first + row : at.token + token;
    const auto query_of = [](int m, int i) { return kOfKeys ? token_of(i) : row_of(m, i); };
    const auto key_of = [](int m, int i) { return kOfKeys ? row_of(m, i) : token_of(i); };
    KeptElements<kTokens, kOfKeys ? RowTokens::keys : RowTokens::queries> kept[kRowBlocks];
    if (kGeneral && a.dropout.seed) {
      find_kept(kept, a.dropout.stream(sequence(), at.head), a.dropout.dropped, shared.first + row, at.token);
      if constexpr (kSumsDs)
        for (auto& block : dp) block.scale(a.dropout.scale);
      if constexpr (kSumsDs) drop(dp, kept);
    }
    const auto each = [&](const auto& f) {
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) f(m, i, s[m].x[i], dp[m].x[i]);
    };
    each([&](int m, int i, float& p, float& ds) {
      const float saved = lse[query_of(m, i)], of_row = saved == -INFINITY ? INFINITY : saved;
      if constexpr (kGeneral) {
        const int at_query = query + query_of(m, i), at_key = min(key + key_of(m, i), k().tokens - 1);
        const RowTerms terms = row_terms(a.terms, shared.batch, sequence(), at.head, at_query, q().tokens, k().tokens,
                                         a.mask.keys_of(min(at_query, q().tokens - 1), q().tokens, k().tokens));
        if (kSumsDs && a.terms.softcap != 0.f)
          ds = (ds - delta[query_of(m, i)]) *
               (which == F32Sums::dmask ? 1.f : softcap(a.terms, p * a.terms.scale).derivative);
        p = expf(logit_of(a.terms, terms, at_key, p) - of_row);
      } else {
        p = expf(__fmaf_rn(p, a.scale, -of_row));
      }
    });
    if (needs_mask(at.token)) {
      const int diagonal = query + a.mask.shift(q().tokens, k().tokens);
      const int left = a.mask.windowed ? a.mask.left : Mask::kUnbounded;
      const int right = a.mask.windowed ? a.mask.right : Mask::kUnbounded;
      each([&](int m, int i, float& p, float&) {
        const int from_diagonal = key - diagonal + key_of(m, i) - query_of(m, i);
        const bool there = (query + query_of(m, i) < q().tokens) & (key + key_of(m, i) < k().tokens);
        p = there & (from_diagonal >= -left) & (from_diagonal <= right) ? p : 0.f;
      });
    }
    const bool has_delta = kGeneral && a.terms.softcap != 0.f;
    if constexpr (kSumsDs)
      each([&](int m, int i, float& p, float& ds) {
        const float x = p * (ds - (has_delta ? 0.f : delta[query_of(m, i)]));
        ds = p == 0.f ? 0.f : x;  // also where the other factor is inf or NaN
      });
    if (kGeneral && kSumsDv && a.dropout.seed) drop(s, kept);
  }

  // Adds f x over the tokens of a tile.
  __device__ void add(Sums& sum, const Pairs& f, unsigned char* tile, const float* factors, const F32Operand& operand,
                      const At& at) const {
    if (any_odd<kTokens>(factors)) add_odd(sum, f, factors, operand, at);
    HalfOperand<kRowBlocks, kTokens> halves;
    RowValues inverse[kRowBlocks];
    const float* const of_tokens = factors + first_token();
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) inverse[m] = to_halves(f[m], of_tokens, halves.large[m], halves.small[m]);
    add_product<32>(sum, halves, inverse, Others{tile});
  }
  // Adds the products with numbers that have no halves, unless f is 0. It is rare, so it takes one token after the
  // other.
  __device__ void add_odd(Sums& sum, const Pairs& f, const float* factors, const F32Operand& operand,
                          const At& at) const {
#pragma unroll 1
    for (int token = 0; token < kTokens; ++token) {
      if (!(factors[token] < 0.f)) continue;
      const float* const numbers =
          operand.numbers.row<float>(shared.batch, others_head(at), int64_t{shared.others.first} + at.token + token) +
          first_token();
      float by[kRowBlocks][kRowsPerThread] = {};  // f of this thread's rows, which some thread of the quad has
#pragma unroll
      for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
          const float each = __shfl_sync(~0u, f[m].x[i], lane() / 4 * 4 + token % 8 / 2);
          if (token_of(i) == token / 8 * 8 + token % 2) by[m][i / 2 % 2] = each;
        }
#pragma unroll
      for (int i = 0; i < Dim / 4; ++i) {
        const int channel = i / 2 * 8 + i % 2;
        if (channel >= operand.channels) break;
        const float x = numbers[channel];
#pragma unroll
        for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
          for (int half = 0; half < kRowsPerThread; ++half) {
            float& to = sum[m].x[i / 2 * 4 + i % 2 + 2 * half];
            to = isfinite(x) || by[m][half] == 0.f ? to : fmaf(by[m][half], x, to);
          }
      }
    }
  }

  // Computes a tile. All threads call it.
  __device__ void compute(Sums& dv, Sums& dx, const At& at) const {
    Pairs s, dp;
    ptx::cp_async_wait<1>();
    __syncthreads();  // w has arrived
    if constexpr (kSumsDs) multiply(dp, shared.y, shared.y_factor, y(), shared.w, shared.w_factor, w(), at);
    ptx::cp_async_wait<0>();
    __syncthreads();  // u has arrived
    if constexpr (!kSumsDv) load_w(next_of(at));
    multiply(s, shared.x, shared.x_factor, x(), shared.u, shared.u_factor, u(), at);
    take_p_and_ds(s, dp, at);
    if constexpr (kSumsDv) {
      add(dv, s, shared.w, shared.w_factor, w(), at);
      __syncthreads();
      load_w(next_of(at));
    }
    if constexpr (kSumsDs) add(dx, dp, shared.u, shared.u_factor, u(), at);
    __syncthreads();
    load_u(next_of(at));
  }

  // Writes sums to memory that nobody reads any more, and from there to the caller's rows.
  __device__ void store(const Sums& sum, unsigned char* through, const Strided& to, int head, float scale) const {
    auto* const rows = reinterpret_cast<float(*)[Dim]>(through);
    float* const sums = &rows[first_row()][first_token()];
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m)
#pragma unroll
      for (int i = 0; i < Dim / 2; ++i) sums[row_of(m, i) * Dim + token_of(i)] = sum[m].x[i];
    __syncthreads();
    const int count = min(kRows, shared.own.tokens - shared.first), channels = static_cast<int>(to.shape[3]);
    with_type(to.element, [&](auto* type) {
      using Type = std::remove_pointer_t<decltype(type)>;
#pragma unroll 1
      for (int i = thread(); i < count * Dim; i += kThreads) {
        const int row = i / Dim, c = i % Dim;
        if (c >= channels) continue;
        const Index4 at{shared.batch, head, int64_t{shared.own.first} + shared.first + row, c};
        static_cast<Type*>(to.data)[at.offset(to)] = Type(scale * rows[row][c]);
      }
    });
  }

  // Finds the tokens that the block meets, of all heads of q that belong to `head`.
  __device__ void start(int head) const {
    const int first = shared.first, end = min(first + kRows, shared.own.tokens);
    Interval any;
    if constexpr (kOfKeys) {
      shared.last_head = (head + 1) * (a.heads / a.kv_heads);
      any = a.mask.windowed ? a.mask.queries_of_all(first, end, q().tokens, k().tokens).any : Interval{0, q().tokens};
    } else {
      shared.last_head = head + 1;
      any = a.mask.keys_of_all(first, end, q().tokens, k().tokens).any;
    }
    shared.start = any.first / kTokens * kTokens, shared.end = any.last;
  }
  __device__ At next_of(At at) const {
    at.token += kTokens;
    if (at.token >= shared.end) at.token = shared.start, ++at.head;
    return at;
  }
  __device__ bool is_there(const At& at) const { return shared.start < shared.end && at.head < shared.last_head; }

  // Computes the block; `head`: of q, or of k and v.
  __device__ void run(int head) const {
    At at{kOfKeys ? head * (a.heads / a.kv_heads) : head, shared.start};
    Sums dv, dx;
#pragma unroll
    for (int m = 0; m < kRowBlocks; ++m) dv[m].zero(), dx[m].zero();
    if (is_there(at)) load_block(at);
    load_w(at), load_u(at);
#pragma unroll 1
    for (; is_there(at); at = next_of(at)) compute(dv, dx, at);
    if constexpr (kSumsDv) store(dv, shared.y, a.dv, head, kGeneral ? a.dropout.scale : 1.f);
    if constexpr (kSumsDs) store(dx, shared.x, kOfKeys ? a.dk : a.dq, head, a.scale);
  }
};

// Launches the kernels for that many blocks of keys and of queries of all heads.
template <Logits logits>
void launch_f32(int dim, const F32Params& a, int64_t key_blocks, int64_t query_blocks, cudaStream_t stream);

}  // namespace octet::cuda::sm80
