// Dense float64 matrices, row by row: what the oracle computes with.
#pragma once
#include <cstdint>
#include <vector>

namespace octet::reference {

struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> data;

  Matrix() = default;
  Matrix(int64_t rows, int64_t cols) : rows(rows), cols(cols), data(static_cast<std::size_t>(rows * cols), 0.0) {}

  double* operator[](int64_t row) { return data.data() + row * cols; }
  const double* operator[](int64_t row) const { return data.data() + row * cols; }
};

inline Matrix transposed(const Matrix& x) {
  Matrix y(x.cols, x.rows);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.cols; ++j) y[j][i] = x[i][j];
  return y;
}

inline double dot(const double* x, const double* y, int64_t n) {
  double sum = 0.0;
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c];
  return sum;
}

// y += a x
void add_scaled(double* y, double a, const double* x, int64_t n);

// y += a^T x[:, first : first + n]
void add_rows(double* y, const double* a, const Matrix& x, int64_t first, int64_t n);

// y += a^T x[rows, :]
void add_rows(double* y, const double* a, const Matrix& x, const std::vector<int64_t>& rows);

}  // namespace octet::reference
