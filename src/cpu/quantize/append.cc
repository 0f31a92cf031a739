// octet_append on the CPU.
#include "core/append.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/quant/affine.h"
#include "cpu/parallel.h"
#include "cpu/quantize/elements.h"
#include "cpu/quantize/rope.h"

namespace octet::cpu {
namespace {

constexpr int64_t kRowsPerThread = 256;

// Turns rows by the angles of their positions: by the rope's base, or by tables. One per thread.
class Turner {
 public:
  Turner(const Append& a, const RopeTable* angles) : a_(a), cosine_(a.rope.dim / 2), sine_(a.rope.dim / 2) {
    if (angles) by_base_.emplace(*angles);
  }
  void operator()(float* row, int64_t position) {
    if (by_base_) return (*by_base_)(row, position);
    if (!a_.cosine.present()) return;
    load_row(a_.cosine, 0, 0, position + a_.rope.offset, cosine_.data());
    load_row(a_.sine, 0, 0, position + a_.rope.offset, sine_.data());
    const int64_t pairs = a_.rope.dim / 2;
    const bool half = a_.rope.style == OCTET_ROPE_HALF;
    for (int64_t c = 0; c < pairs; ++c)
      rotate(row[half ? c : 2 * c], row[half ? c + pairs : 2 * c + 1], cosine_[c], sine_[c]);
  }

 private:
  const Append& a_;
  std::optional<RopeRow<float>> by_base_;
  std::vector<float> cosine_, sine_;
};

// Writes a row as a token of a tensor, quantized where that has scales.
void write(const float* row, const Append::Part& part, int64_t b, int64_t h, int64_t token) {
  const View& to = part.to;
  const int64_t dim = to.shape[3];
  if (to.dtype != OCTET_I8 && to.dtype != OCTET_E4M3) return store_row(row, to, b, h, token);
  const Range range = range_of(to.dtype);
  AffineScale scale{.scale = 1.f, .inverse = 1.f};
  if (part.scale.present()) {
    Extremes extremes;
    for (int64_t c = 0; c < dim; ++c) extremes.add(order_of(magnitude_of(row[c])));
    scale = affine_scale_of(extremes, OCTET_SYMMETRIC, range);
    *part.scale.at<float>(b, h, token) = scale.scale;
  }
  for (int64_t c = 0; c < dim; ++c)
    *to.at<uint8_t>(b, h, token, c) = byte_of(to.dtype, range, part.scale.present() ? scaled(row[c], scale) : row[c]);
}

}  // namespace

void append(const Append& a) {
  std::optional<RopeTable> angles;
  if (a.rope.style != OCTET_ROPE_NONE && !a.cosine.present()) angles.emplace(a.rope, false);
  const auto* lengths = static_cast<const int32_t*>(a.seqused_k.data);
  // Tensors one after the other, by sequences and heads.
  const auto copy = [&](const Append::Part& part, bool turns, bool to_cache) {
    const View& x = part.from;
    const int64_t heads = a.sequences() * x.shape[1];  // of all sequences
    if (!x.elements()) return;
    const unsigned threads = thread_count(0, std::min(heads, 1 + x.elements() / x.shape[3] / kRowsPerThread));
    const int64_t of_thread = (heads + threads - 1) / threads;
    parallel_for(threads, threads, [&](int64_t task, unsigned) {
      Turner turner(a, angles ? &*angles : nullptr);
      std::vector<float> row(static_cast<std::size_t>(x.shape[3]));
      for (int64_t i = task * of_thread; i < std::min((task + 1) * of_thread, heads); ++i) {
        const int64_t sequence = i / x.shape[1], h = i % x.shape[1];
        const auto [batch, first, count] = a.new_tokens(x, sequence);
        for (int64_t t = 0; t < count; ++t) {
          const int64_t position = lengths[sequence] + t;
          load_row(x, batch, h, first + t, row.data());
          if (turns) turner(row.data(), position);
          write(row.data(), part, to_cache ? sequence : batch, h, to_cache ? position : first + t);
        }
      }
    });
  };
  const bool turns = a.rope.style != OCTET_ROPE_NONE;
  copy(a.k, turns, true), copy(a.v, false, true);
  if (a.q.from.present()) copy(a.q, true, false);
}

}  // namespace octet::cpu
