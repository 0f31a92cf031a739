// octet_dequantize, octet_apply_rope and octet_logit_error on the CPU.
#include <cmath>
#include <vector>

#include "core/quant/affine.h"
#include "core/quant/hadamard.h"
#include "core/quantization.h"
#include "cpu/parallel.h"
#include "cpu/quantize/elements.h"
#include "cpu/quantize/norm.h"
#include "cpu/quantize/rope.h"

namespace octet::cpu {
namespace {

constexpr int64_t kChunk = 256;  // tokens per task

// Runs body(b, h, first, last, thread) for chunks of the tokens of every (batch, head).
template <class MakeState, class Body>
void for_chunks(const View& x, MakeState make_state, Body body) {
  const int64_t heads = x.shape[1], tokens = x.shape[2], chunks = tokens / kChunk + (tokens % kChunk != 0);
  const int64_t tasks = x.shape[0] * heads * chunks;
  const unsigned threads = thread_count(0, tasks);
  using State = decltype(make_state());
  std::vector<State> states;
  for (unsigned i = 0; i < threads; ++i) states.push_back(make_state());
  parallel_for(threads, tasks, [&](int64_t task, unsigned thread) {
    const int64_t i = task / chunks, first = task % chunks * kChunk;
    for (int64_t t = first; t < std::min(tokens, first + kChunk); ++t) body(i / heads, i % heads, t, states[thread]);
  });
}

template <class T>
void turn(const Rope& rope, const RopeTable& table, const View& x, const View& y) {
  struct State {
    NormRow<T> norm;
    RopeRow<T> rope;
    std::vector<T> row;
  };
  for_chunks(
      x,
      [&] {
        return State{NormRow<T>(rope, x.shape[3]), RopeRow<T>(table), std::vector<T>(x.shape[3])};
      },
      [&](int64_t b, int64_t h, int64_t t, State& state) {
        load_row(x, b, h, t, state.row.data());
        state.norm(state.row.data(), h);
        state.rope(state.row.data(), t);
        store_row(state.row.data(), y, b, h, t);
      });
}

}  // namespace

void dequantize(const View& codes, const Quantization& how, const View& x) {
  const int64_t dim = x.shape[3];
  const std::array<float, 256> values = decode_table(codes.dtype);
  std::vector<float> signs;
  if (how.hadamard_seed)
    for (int64_t c = 0; c < dim; ++c) signs.push_back(hadamard_sign(how.hadamard_seed, c));
  for_chunks(
      x, [&] { return std::vector<float>(dim); },
      [&](int64_t b, int64_t h, int64_t t, std::vector<float>& row) {
        const int64_t group = how.group_of(t);
        for (int64_t c = 0; c < dim; ++c) {
          const int64_t channel = how.per_channel() ? c : 0;
          const float scale = *how.scale.at<float>(b, h, group, channel);
          const float zero = how.zero_point.present() ? *how.zero_point.at<float>(b, h, group, channel) : 0.f;
          const float value = values[*codes.at<uint8_t>(b, h, t, c)];
          row[c] = affine_value(value, scale, zero, how.zero_point_kind);
        }
        if (how.hadamard_seed) hadamard_inverse(row.data(), signs.data(), dim);
        if (how.mean.present())
          for (int64_t c = 0; c < dim; ++c) row[c] += *how.mean.at<float>(b, h, 0, c);
        store_row(row.data(), x, b, h, t);
      });
}

void apply_rope(const Rope& rope, bool inverse, const View& x, const View& y) {
  const RopeTable table(rope, inverse);
  if (x.dtype == OCTET_F64)
    turn<double>(rope, table, x, y);
  else
    turn<float>(rope, table, x, y);
}

// The errors of q and k are independent of each other and of the rows they meet, and those of a row's channels are
// independent of each other: Var(dq.k) = step_q^2 |k|^2 and Var(q.dk) = step_k^2 |q|^2.
void logit_error(const View& q, const View& k, float scale, const View& error) {
  const int64_t group = k.shape[1] ? q.shape[1] / k.shape[1] : 1;
  for (int64_t b = 0; b < q.shape[0]; ++b)
    for (int64_t h = 0; h < q.shape[1]; ++h) {
      const auto of = [&](const View& s, int64_t head, int64_t which) {
        return static_cast<double>(*s.at<float>(b, head, 0, which));
      };
      const double from_q = of(q, h, OCTET_STATISTIC_STEP) * of(k, h / group, OCTET_STATISTIC_NORM);
      const double from_k = of(k, h / group, OCTET_STATISTIC_STEP) * of(q, h, OCTET_STATISTIC_NORM);
      *error.at<float>(b, h, 0, 0) = static_cast<float>(scale * std::sqrt(from_q * from_q + from_k * from_k));
    }
}

}  // namespace octet::cpu
