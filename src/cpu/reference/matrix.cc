// The loops that the oracle spends its time in, with wider vectors where the CPU has them. Neither version fuses
// multiplications with additions, so that both give the same bits.
#include "cpu/reference/matrix.h"

namespace octet::reference {
namespace {

[[gnu::always_inline]] inline void add_one_row(double* y, double a, const double* x, int64_t n) {
  for (int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}

// Four rows at a time halve the traffic to y.
[[gnu::always_inline]] inline void add_four_rows(double* y, const double* a, const double* const* x, int64_t n) {
  const double a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
  const double *x0 = x[0], *x1 = x[1], *x2 = x[2], *x3 = x[3];
  for (int64_t c = 0; c < n; ++c) y[c] += a0 * x0[c] + a1 * x1[c] + a2 * x2[c] + a3 * x3[c];
}

struct Loops {
  void (*one)(double* y, double a, const double* x, int64_t n);
  void (*four)(double* y, const double* a, const double* const* x, int64_t n);
};

void one(double* y, double a, const double* x, int64_t n) { add_one_row(y, a, x, n); }
void four(double* y, const double* a, const double* const* x, int64_t n) { add_four_rows(y, a, x, n); }

#ifdef __x86_64__
[[gnu::target("avx2")]] void one_avx2(double* y, double a, const double* x, int64_t n) { add_one_row(y, a, x, n); }
[[gnu::target("avx2")]] void four_avx2(double* y, const double* a, const double* const* x, int64_t n) {
  add_four_rows(y, a, x, n);
}
#endif

const Loops& loops() {
  static const Loops best = [] {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return Loops{one_avx2, four_avx2};
#endif
    return Loops{one, four};
  }();
  return best;
}

// y += sum of a[i] row(i), i < count
template <class Row>
void add(double* y, const double* a, int64_t count, int64_t n, const Row& row) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const double* const x[] = {row(i), row(i + 1), row(i + 2), row(i + 3)};
    loops().four(y, a + i, x, n);
  }
  for (; i < count; ++i) loops().one(y, a[i], row(i), n);
}

}  // namespace

void add_scaled(double* y, double a, const double* x, int64_t n) { loops().one(y, a, x, n); }

void add_rows(double* y, const double* a, const Matrix& x, int64_t first, int64_t n) {
  add(y, a, x.rows, n, [&](int64_t i) { return x[i] + first; });
}

void add_rows(double* y, const double* a, const Matrix& x, const std::vector<int64_t>& rows) {
  add(y, a, static_cast<int64_t>(rows.size()), x.cols, [&](int64_t i) { return x[rows[static_cast<std::size_t>(i)]]; });
}

}  // namespace octet::reference
