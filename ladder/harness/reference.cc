// Attention in float64 on all cores, and the check against it.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>

#include "harness.h"

// The compiler makes several versions of such a function; that for the vector units of this processor is called.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define LADDER_CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define LADDER_CLONES
#endif

namespace ladder {
namespace {

constexpr int kRows = 4;     // queries at a time, so that a key that was loaded serves all of them
constexpr int kKeys = 1024;  // keys at a time, whose scores stay in the first cache

// scores[r][j] += q[r][c] * k_t[c][j] for all channels c: in order of the keys, so that the loop over j is vectors.
LADDER_CLONES void add_scores(const double* q, const double* k_t, int dim, int seq, int first, int count,
                              double* scores) {
  for (int c = 0; c < dim; ++c) {
    const double* k = k_t + static_cast<int64_t>(c) * seq + first;
    const double a = q[c], b = q[dim + c], d = q[2 * dim + c], e = q[3 * dim + c];
    for (int j = 0; j < count; ++j) {
      scores[j] += a * k[j];
      scores[kKeys + j] += b * k[j];
      scores[2 * kKeys + j] += d * k[j];
      scores[3 * kKeys + j] += e * k[j];
    }
  }
}

// o[r][c] += p[r][j] * v[j][c].
LADDER_CLONES void add_product(const double* p, const double* v, int dim, int count, double* o) {
  for (int j = 0; j < count; ++j, v += dim) {
    const double a = p[j], b = p[kKeys + j], d = p[2 * kKeys + j], e = p[3 * kKeys + j];
    for (int c = 0; c < dim; ++c) {
      o[c] += a * v[c];
      o[dim + c] += b * v[c];
      o[2 * dim + c] += d * v[c];
      o[3 * dim + c] += e * v[c];
    }
  }
}

LADDER_CLONES void add_row(double a, const float* b, int64_t count, double* sum) {
  for (int64_t i = 0; i < count; ++i) sum[i] += a * b[i];
}

// Queries first to first + kRows - 1 of one head; those past the end repeat the last and are not stored. The largest
// score is not known before all keys were seen: it is found first, from scores that are then computed again.
void attend_rows(const Problem& p, const double* q, const double* k_t, const double* v, double* o, int first) {
  const int rows = std::min(kRows, p.seq - first), keys = p.causal ? first + rows : p.seq;
  std::vector<double> q_rows(kRows * p.dim), scores(kRows * kKeys), sum_v(kRows * p.dim, 0.0);
  for (int r = 0; r < kRows; ++r) {
    const double* row = q + static_cast<int64_t>(std::min(first + r, p.seq - 1)) * p.dim;
    for (int c = 0; c < p.dim; ++c) q_rows[r * p.dim + c] = row[c] / std::sqrt(static_cast<double>(p.dim));
  }
  double largest[kRows], sum[kRows] = {};
  std::fill(largest, largest + kRows, -INFINITY);
  for (const bool second : {false, true}) {
    for (int j0 = 0; j0 < keys; j0 += kKeys) {
      const int count = std::min(kKeys, keys - j0);
      std::fill(scores.begin(), scores.end(), 0.0);
      add_scores(q_rows.data(), k_t, p.dim, p.seq, j0, count, scores.data());
      for (int r = 0; r < kRows; ++r) {
        const int seen = p.causal ? std::min(count, first + r + 1 - j0) : count;
        double* row = &scores[r * kKeys];
        for (int j = 0; j < seen && !second; ++j) largest[r] = std::max(largest[r], row[j]);
        for (int j = 0; j < seen && second; ++j) sum[r] += row[j] = std::exp(row[j] - largest[r]);
        std::fill(row + std::max(seen, 0), row + count, 0.0);
      }
      if (second) add_product(scores.data(), v + static_cast<int64_t>(j0) * p.dim, p.dim, count, sum_v.data());
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < p.dim; ++c) o[static_cast<int64_t>(first + r) * p.dim + c] = sum_v[r * p.dim + c] / sum[r];
  }
}

}  // namespace

void parallel_for(int64_t count, const std::function<void(int64_t)>& f, const char* name) {
  std::atomic<int64_t> next = 0, done = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&](bool prints) {
    try {
      int64_t printed = -1;
      for (int64_t i; (i = next++) < count;) {
        f(i);
        const int64_t percent = 100 * ++done / count;
        if (prints && percent != printed)
          std::fprintf(stderr, "\r%s: %3d %%", name, static_cast<int>(printed = percent));
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(1u, std::thread::hardware_concurrency()); ++i) threads.emplace_back(work, false);
  work(name != nullptr);
  for (std::thread& thread : threads) thread.join();
  if (name) std::fprintf(stderr, "\r%s: done \n", name);
  if (error) std::rethrow_exception(error);
}

std::vector<double> reference_attention(const Problem& p, const std::vector<double>& q, const std::vector<double>& k,
                                        const std::vector<double>& v) {
  const int64_t heads = static_cast<int64_t>(p.batch) * p.heads, size = static_cast<int64_t>(p.seq) * p.dim;
  std::vector<double> o(p.elements()), k_t(p.elements());
  parallel_for(heads, [&](int64_t head) {
    for (int j = 0; j < p.seq; ++j) {
      for (int c = 0; c < p.dim; ++c) {
        k_t[head * size + static_cast<int64_t>(c) * p.seq + j] = k[head * size + static_cast<int64_t>(j) * p.dim + c];
      }
    }
  });
  const int64_t groups = ceil_div(p.seq, kRows);
  parallel_for(
      heads * groups,
      [&](int64_t i) {
        const int64_t at = i / groups * size;
        attend_rows(p, &q[at], &k_t[at], &v[at], &o[at], static_cast<int>(i % groups) * kRows);
      },
      "float64 reference");
  return o;
}

void reference_rope(std::vector<double>& x, int64_t heads, int seq, int dim, Pairing pairing) {
  if (pairing == Pairing::none) return;
  parallel_for(seq, [&](int64_t position) {
    for (int pair = 0; pair < dim / 2; ++pair) {
      const double angle = position * std::pow(10000.0, -2.0 * pair / dim), c = std::cos(angle), s = std::sin(angle);
      const int first = pairing == Pairing::halves ? pair : 2 * pair;
      const int second = pairing == Pairing::halves ? pair + dim / 2 : 2 * pair + 1;
      for (int64_t head = 0; head < heads; ++head) {
        double* row = &x[(head * seq + position) * dim];
        const double a = row[first], b = row[second];
        row[first] = a * c - b * s;
        row[second] = a * s + b * c;
      }
    }
  });
}

std::vector<double> reference_product(const std::vector<double>& a, const std::vector<float>& b, int64_t m, int64_t k,
                                      int64_t n) {
  std::vector<double> result(m * n, 0.0);
  parallel_for(m, [&](int64_t i) {
    for (int64_t x = 0; x < k; ++x) add_row(a[i * k + x], &b[x * n], n, &result[i * n]);
  });
  return result;
}

Rotated rotate(const Options& options, const Rung& rung, const Tensors& tensors) {
  const Problem& p = options.problem;
  Rotated rotated{{tensors.q.begin(), tensors.q.end()}, {tensors.k.begin(), tensors.k.end()}};
  for (auto* x : {&rotated.q, &rotated.k}) {
    reference_rope(*x, static_cast<int64_t>(p.batch) * p.heads, p.seq, p.dim, options.rope);
    if (options.rope != Pairing::none && !rung.rotates && rung.element != Element::f32) {
      for (double& value : *x) value = round_to(rung.element, static_cast<float>(value));
    }
  }
  return rotated;
}

Errors compare(const std::vector<float>& o, const std::vector<double>& reference, int64_t heads, double bound,
               double largest) {
  Errors errors;
  const int64_t size = static_cast<int64_t>(o.size()) / heads;
  for (int64_t head = 0; head < heads; ++head) {
    double squares = 0, norm = 0;
    for (int64_t i = head * size; i < (head + 1) * size; ++i) {
      if (!std::isfinite(o[i])) {
        ++errors.not_finite;
        continue;
      }
      const double error = o[i] - reference[i];
      squares += error * error;
      norm += reference[i] * reference[i];
      errors.max_absolute = std::max(errors.max_absolute, std::abs(error));
    }
    const double relative = norm > 0 ? std::sqrt(squares / norm) : squares > 0 ? INFINITY : 0;
    errors.relative_l2 = std::max(errors.relative_l2, relative);
  }
  errors.passed = !errors.not_finite && errors.relative_l2 <= bound && errors.max_absolute <= bound * largest;
  return errors;
}

double error_bound(const Problem& problem, Element element, double largest_score, bool equal) {
  const double f32 = 0x1p-24, type = element == Element::f32 ? 0 : element == Element::f16 ? 0x1p-11 : 0x1p-8;
  const double keys = equal ? problem.seq : 2 * std::sqrt(problem.seq);
  const double channels = equal ? problem.dim : std::sqrt(problem.dim);
  return 2 * type + f32 * (keys + channels * largest_score + 16);
}

}  // namespace ladder
