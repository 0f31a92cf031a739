#include <algorithm>

#include "cuda/fragment/precision.h"
#include "cuda/fwd/few_queries.h"
#include "cuda/host/card.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

// The kernels of a recipe: for many queries with plain and with general logits, for few queries likewise, and for a
// mask tensor as the only term beside scale q.k. Null: there is none.
struct Row {
  ForwardFormats formats;
  ForwardKernel (*many[2])(int64_t most_dim);
  ForwardKernel (*few[2])(int64_t most_dim);
  ForwardKernel (*masked)(int64_t most_dim);
};
template <class Precision>
constexpr Row row(const ForwardFormats& formats) {
  return {formats,
          {forward_kernel_of<Precision, false, false>, forward_kernel_of<Precision, true, false>},
          {forward_kernel_of<Precision, false, true>, forward_kernel_of<Precision, true, true>},
          masked_forward_kernel_of<Precision>};
}
constexpr Row kRows[] = {
    {kF32,
     {forward_kernel_of<PrecisionF32, false, false>, forward_kernel_of<PrecisionF32, true, false>},
     {forward_kernel_of<PrecisionF32, false, true>, forward_kernel_of<PrecisionF32, true, true>},
     nullptr},
    row<PrecisionF16>(kF16),
    row<PrecisionBf16>(kBf16),
    {kBf16F16Compute,
     {forward_kernel_of<PrecisionBf16F16Compute, false, false>,
      forward_kernel_of<PrecisionBf16F16Compute, true, false>},
     {nullptr, nullptr},
     masked_forward_kernel_of<PrecisionBf16F16Compute>},
};

const Row* row_of(const ForwardFormats& formats) {
  const auto* const row =
      std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& x) { return x.formats == formats; });
  return row == std::end(kRows) ? nullptr : row;
}

ForwardKernel kernel_for_many(const Problem& p, const Row& row, bool shifts, int64_t most_dim) {
  const MaskTensor mask = mask_tensor(p);
  if (row.masked && mask.chunks && !p.softcap && !p.alibi_slopes.present() && !shifts) {
    ForwardKernel kernel = row.masked(most_dim);
    kernel.shared_bytes += kernel.rows * mask_row_bytes(kernel.keys, mask.bytes);
    if (kernel.shared_bytes <= card(p.device_index).shared_bytes) return kernel;
  }
  return row.many[!p.plain_logits() || shifts](most_dim);
}

}  // namespace

bool has_kernels(const ForwardFormats& formats) { return row_of(formats); }

ForwardChoice choose_forward(const Problem& p, const ForwardNumerics& numerics) {
  const Row& row = *row_of(numerics.formats);
  const int64_t most_dim = std::max(p.dim, p.dim_v);
  const bool shifts = numerics.beta != 0.f, general = !p.plain_logits() || shifts;
  const ForwardKernel kernel = kernel_for_many(p, row, shifts, most_dim);
  ForwardChoice choice{.kernel = kernel,
                       .numerics = numerics,
                       .general = general,
                       .f32 = numerics.formats == kF32,
                       .tile_queries = kernel.rows,
                       .tiles = query_tiles(p, kernel.rows)};
  if (!numerics.splits_keys()) return choice;
  const ForwardKernel few = row.few[general](most_dim);
  const PackedTiles tiles = packed_tiles(p, few.rows);
  const Card& gpu = card(p.device_index);
  if (!has_few_queries(p, tiles, choice.tiles, gpu.multiprocessors)) return choice;

  choice.kernel = few, choice.few = true;
  choice.tile_heads = tiles.heads, choice.tile_queries = tiles.queries, choice.tiles = tiles.count;
  // A thread block can have all of a multiprocessor's shared memory but what is reserved for each thread block.
  constexpr int kReservedBytes = 1024;
  const int blocks = (gpu.shared_bytes + kReservedBytes) / (few.shared_bytes + kReservedBytes);
  choice.splits = key_splits(tiles.count, (most_keys(p) + few.keys - 1) / few.keys,
                             int64_t{gpu.multiprocessors} * std::clamp(blocks, 1, few.blocks));
  return choice;
}

}  // namespace octet::cuda::sm80
