// Vectors of floats and 32-bit integers as wide as the instruction set has them. GCC's vector extensions give the
// arithmetic; the few operations they lack are functions here.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __x86_64__
// Intrinsics that have no use for an operand pass an undefined vector, which GCC 12 warns about.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace octet::cpu::OCTET_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t Vi __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVf __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t UnalignedVi __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

#define OCTET_INLINE static inline __attribute__((always_inline))
#define OCTET_INLINE_MEMBER inline __attribute__((always_inline))
#define OCTET_INLINE_LAMBDA __attribute__((always_inline))

OCTET_INLINE Vf load(const float* p) { return *reinterpret_cast<const UnalignedVf*>(p); }
OCTET_INLINE Vi load(const int32_t* p) { return *reinterpret_cast<const UnalignedVi*>(p); }
OCTET_INLINE void store(float* p, Vf x) { *reinterpret_cast<UnalignedVf*>(p) = x; }
OCTET_INLINE void store(int32_t* p, Vi x) { *reinterpret_cast<UnalignedVi*>(p) = x; }

OCTET_INLINE Vf splat(float x) { return x - Vf{}; }
OCTET_INLINE Vi splat(int32_t x) { return x - Vi{}; }
OCTET_INLINE Vi bits(Vf x) { return reinterpret_cast<Vi>(x); }
OCTET_INLINE Vf floats(Vi x) { return reinterpret_cast<Vf>(x); }

// Numbers of 16 bits; load_f16 is in elements.h. GCC splits the conversions of whole vectors in two, hence intrinsics.
OCTET_INLINE Vf load_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
  return floats((Vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
#else
  Vi x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i] << 16;
  return floats(x);
#endif
}

// Exact for magnitudes below 2^24.
OCTET_INLINE Vf to_float(Vf x) { return x; }
OCTET_INLINE Vf to_float(Vi x) { return __builtin_convertvector(x, Vf); }

// The nearest integers, ties to even; magnitudes below 2^22.
OCTET_INLINE Vi nearest(Vf x) {
#if defined(__AVX512F__)
  return (Vi)_mm512_cvtps_epi32(x);
#else
  return bits(x + splat(0x1.8p23f)) - bits(splat(0x1.8p23f));
#endif
}

// Numbers of 8 bits: the low byte of each lane.
OCTET_INLINE void store_bytes(uint8_t* p, Vi x) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(x[i]);
#endif
}
OCTET_INLINE Vi load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vi x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
#endif
}

// `b` where either is NaN.
OCTET_INLINE Vf max(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
OCTET_INLINE Vf min(Vf a, Vf b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__x86_64__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// Returns whether every lane is below y; NaN is not.
OCTET_INLINE bool reduce_is_below(Vf x, float y) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, splat(y), _CMP_LT_OQ) == 0xffff;
#else
  for (int i = 0; i < kLanes; ++i)
    if (!(x[i] < y)) return false;
  return true;
#endif
}

OCTET_INLINE float reduce_add(Vf x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// 0, 1, 2, ...
OCTET_INLINE Vi iota() {
  Vi x;
  for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

// x with lanes i and i ^ distance exchanged; in terms that both g++ and clang know.
template <int distance, int... lane>
OCTET_INLINE Vf exchange(Vf x, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, x, (lane ^ distance)...);
}
template <int distance>
OCTET_INLINE Vf exchange(Vf x) {
  return exchange<distance>(x, std::make_integer_sequence<int, kLanes>());
}

// A step of transpose: two rows that lie `distance` apart exchange the halves off the diagonal.
template <int distance, int... lane>
OCTET_INLINE void exchange_halves(Vf& a, Vf& b, std::integer_sequence<int, lane...>) {
  const Vf upper = __builtin_shufflevector(a, b, (lane & distance ? kLanes + (lane ^ distance) : lane)...);
  b = __builtin_shufflevector(a, b, (lane & distance ? kLanes + lane : lane ^ distance)...);
  a = upper;
}
template <int distance>
OCTET_INLINE void transpose_steps(Vf (&x)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i)
    if (!(i & distance)) exchange_halves<distance>(x[i], x[i + distance], std::make_integer_sequence<int, kLanes>());
  if constexpr (distance > 1) transpose_steps<distance / 2>(x);
}

// Rows become columns.
OCTET_INLINE void transpose(Vf (&x)[kLanes]) { transpose_steps<kLanes / 2>(x); }

OCTET_INLINE float reduce_max(Vf x) {
  if constexpr (kLanes > 8) x = max(exchange<8>(x), x);
  if constexpr (kLanes > 4) x = max(exchange<4>(x), x);
  x = max(exchange<2>(x), x);
  return max(exchange<1>(x), x)[0];
}

template <int N>
OCTET_INLINE Vf add_up(const Vf (&x)[N]) {
  Vf sum = x[0];
  for (int v = 1; v < N; ++v) sum += x[v];
  return sum;
}

OCTET_INLINE Vi max(Vi a, Vi b) { return a > b ? a : b; }

OCTET_INLINE int32_t reduce_max(Vi x) {
  if constexpr (kLanes > 8) x = max(bits(exchange<8>(floats(x))), x);
  if constexpr (kLanes > 4) x = max(bits(exchange<4>(floats(x))), x);
  x = max(bits(exchange<2>(floats(x))), x);
  return max(bits(exchange<1>(floats(x))), x)[0];
}

// The largest lanes of four vectors.
typedef float Quad __attribute__((vector_size(16)));
OCTET_INLINE Quad reduce_max(const Vf (&x)[4]) {
#if defined(__AVX512F__)
  // Pairs, then quads of every vector side by side, then the quarters of the register.
  const Vf ab = max((Vf)_mm512_unpacklo_ps(x[0], x[1]), (Vf)_mm512_unpackhi_ps(x[0], x[1]));
  const Vf cd = max((Vf)_mm512_unpacklo_ps(x[2], x[3]), (Vf)_mm512_unpackhi_ps(x[2], x[3]));
  Vf all = max((Vf)_mm512_shuffle_ps(ab, cd, 0x44), (Vf)_mm512_shuffle_ps(ab, cd, 0xee));
  all = max(exchange<8>(all), all);
  all = max(exchange<4>(all), all);
  return (Quad)_mm512_castps512_ps128(all);
#else
  return Quad{reduce_max(x[0]), reduce_max(x[1]), reduce_max(x[2]), reduce_max(x[3])};
#endif
}

// Sums of vectors, each lane in double.
struct Doubles {
#if defined(__AVX512F__)
  __m512d low, high;
  OCTET_INLINE_MEMBER void add(Vf x) {
    low += _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    high += _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  }
#else
  double lanes[kLanes];
  OCTET_INLINE_MEMBER void add(Vf x) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += x[i];
  }
#endif
  OCTET_INLINE_MEMBER void store(double* sum) const { std::memcpy(sum, this, sizeof *this); }
};

// sum_c a_c b_c, every product exact; n a multiple of 8.
OCTET_INLINE double dot_in_double(const float* a, const float* b, int64_t n) {
  typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));
  typedef double Vd __attribute__((vector_size(64)));
  Vd sum{};
  for (int64_t c = 0; c < n; c += 8)
    sum += __builtin_convertvector(*reinterpret_cast<const Half*>(a + c), Vd) *
           __builtin_convertvector(*reinterpret_cast<const Half*>(b + c), Vd);
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// Sums products likewise for n vectors, and numbers in double already.
OCTET_INLINE double dot_in_double(const Vf* a, int n, const double* b) {
#if defined(__AVX512F__)
  typedef double Vd __attribute__((vector_size(64)));
  Vd sum{};
  for (int v = 0; v < n; ++v) {
    sum += (Vd)_mm512_cvtps_pd(_mm512_castps512_ps256(a[v])) * (Vd)_mm512_loadu_pd(b + v * kLanes);
    sum += (Vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps(a[v], 1)) * (Vd)_mm512_loadu_pd(b + v * kLanes + 8);
  }
#else
  double sum[8] = {};
  for (int c = 0; c < n * kLanes; ++c) sum[c % 8] += static_cast<double>(a[c / kLanes][c % kLanes]) * b[c];
#endif
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

// While it lives, results of this thread below 2^-126 become zero, as those of the GPU's exponential do: probabilities
// that small add nothing, but would take a hundred times longer to multiply. Subnormal operands keep their value.
class FlushDenormals {
 public:
#ifdef __x86_64__
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8000); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
#endif
};

}  // namespace octet::cpu::OCTET_ISA
