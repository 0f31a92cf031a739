// The loops that the oracle spends its time in, with wider vectors where the CPU has them. Neither version fuses
// multiplications with additions, so that both give the same bits.
#include "cpu/reference/matrix.h"

#ifdef OCTET_CHECKS_ROWS
#include <sanitizer/asan_interface.h>

#include <cstdlib>
#endif

namespace octet::reference {
namespace {

// Under an address sanitizer these loops are not instrumented, which makes them 14 times as slow. Instead each of their
// rows is checked as a whole.
inline void check_row([[maybe_unused]] const double* x, [[maybe_unused]] int64_t n) {
#ifdef OCTET_CHECKS_ROWS
  if (n <= 0) return;
  void* const found = __asan_region_is_poisoned(const_cast<double*>(x), static_cast<std::size_t>(n) * sizeof *x);
  if (!found) return;
  __asan_describe_address(found);
  std::abort();
#endif
}

// y += sum of a[i] row(i), i < count. Four rows at a time halve the traffic to y.
template <class Row>
[[gnu::always_inline]] inline void add_in_any_vectors(double* y, const double* a, int64_t count, int64_t n,
                                                      const Row& row) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const double a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    const double *x0 = row(i), *x1 = row(i + 1), *x2 = row(i + 2), *x3 = row(i + 3);
    for (int64_t c = 0; c < n; ++c) y[c] += a0 * x0[c] + a1 * x1[c] + a2 * x2[c] + a3 * x3[c];
  }
  for (; i < count; ++i) {
    const double* const x = row(i);
    const double factor = a[i];
    for (int64_t c = 0; c < n; ++c) y[c] += factor * x[c];
  }
}

#ifdef __x86_64__
template <class Row>
[[gnu::target("avx2")]] void add_in_avx2(double* y, const double* a, int64_t count, int64_t n, const Row& row) {
  add_in_any_vectors(y, a, count, n, row);
}
#endif

template <class Row>
void add(double* y, const double* a, int64_t count, int64_t n, const Row& row) {
  check_row(y, n), check_row(a, count);
  for (int64_t i = 0; i < count; ++i) check_row(row(i), n);
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return add_in_avx2(y, a, count, n, row);
#endif
  add_in_any_vectors(y, a, count, n, row);
}

}  // namespace

void add_scaled(double* y, double a, const double* x, int64_t n) {
  add(y, &a, 1, n, [&](int64_t) { return x; });
}

void add_rows(double* y, const double* a, const Matrix& x, int64_t first, int64_t n) {
  add(y, a, x.rows, n, [&](int64_t i) { return x[i] + first; });
}

void add_rows(double* y, const double* a, const Matrix& x, const std::vector<int64_t>& rows) {
  add(y, a, static_cast<int64_t>(rows.size()), x.cols, [&](int64_t i) { return x[rows[static_cast<std::size_t>(i)]]; });
}

}  // namespace octet::reference
