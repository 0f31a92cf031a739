#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "core/error.h"
#include "core/names.h"
#include "cuda/fwd/few_queries.h"
#include "cuda/host/card.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tiles.h"
#include "cuda/sm80/fwd/choose.h"
#include "cuda/sm80/fwd/operands_codes.h"
#include "cuda/sm80/fwd/operands_e4m3.h"
#include "cuda/sm80/fwd/operands_f16_sums.h"
#include "cuda/sm80/fwd/operands_int8.h"
#include "cuda/sm80/fwd/operands_training.h"
#include "cuda/sm80/mask_tile.h"
#include "cuda/sm80/passes.h"

namespace octet::cuda::sm80 {
namespace {

using KernelOf = ForwardKernel (*)(int64_t most_dim);

// This is true where a precision has kernels that load two tiles of keys at a time.
template <class Precision>
constexpr bool kHasDoubled = requires {
  ForwardOperands<Precision>::template Tile<Dims64, Logits::plain, TileRows::doubled>::kDoubles;
};

// Returns null where there is no kernel: f32 takes mask tensors as general logits, and where keys are split o is not
// compensated.
template <class Precision, Logits logits, TileRows rows>
constexpr KernelOf kernel_of() {
  if constexpr (logits == Logits::masked && (rows != TileRows::queries || !ForwardOperands<Precision>::kStagesMasks))
    return nullptr;
  else if constexpr (rows == TileRows::doubled && !kHasDoubled<Precision>)
    return nullptr;
  else if constexpr (has_small_dims(rows) && rows != TileRows::doubled && !ForwardOperands<Precision>::kHasHalfQueries)
    return nullptr;
  else if constexpr ((rows == TileRows::half_queries || rows == TileRows::doubled) && logits != Logits::plain)
    return nullptr;
  else if constexpr (rows == TileRows::pairs && !ForwardOperands<Precision>::kHasPairs)
    return nullptr;
  else if constexpr (rows == TileRows::pages && !ForwardOperands<Precision>::kHasPages)
    return nullptr;
  else
    return forward_kernel_of<Precision, logits, rows>;
}

struct Kernels {
  KernelOf plain, masked, general;
};
template <class Precision, TileRows rows>
constexpr Kernels kKernels = {kernel_of<Precision, Logits::plain, rows>(), kernel_of<Precision, Logits::masked, rows>(),
                              kernel_of<Precision, Logits::general, rows>()};

// The kernels of a recipe.
struct Row {
  ForwardFormats formats;
  Kernels queries, half_queries, doubled, pairs, pages, few_pairs, few_pages;
};
template <class Precision>
constexpr Row row(const ForwardFormats& formats) {
  return {formats,
          kKernels<Precision, TileRows::queries>,
          kKernels<Precision, TileRows::half_queries>,
          kKernels<Precision, TileRows::doubled>,
          kKernels<Precision, TileRows::pairs>,
          kKernels<Precision, TileRows::pages>,
          kKernels<Precision, TileRows::few_pairs>,
          kKernels<Precision, TileRows::few_pages>};
}
constexpr Row kRows[] = {row<PrecisionF32>(kF32),
                         row<PrecisionF16>(kF16),
                         row<PrecisionBf16>(kBf16),
                         row<PrecisionBf16F16Compute>(kBf16F16Compute),
                         row<PrecisionInt8F16>(kInt8F16),
                         row<PrecisionInt8>(kInt8),
                         row<PrecisionInt8>(kSagebwd),
                         row<PrecisionInt8Training>(kInt8Training),
                         row<PrecisionInt8Fp8InF16>(kInt8Fp8),
                         row<PrecisionFp8InF16>(kFp8),
                         row<PrecisionFp8RawInF16>(kFp8Raw)};

// The recipes of e4m3 where tensor cores multiply it.
constexpr Row kRowsInE4m3[] = {row<PrecisionInt8Fp8InE4m3>(kInt8Fp8), row<PrecisionFp8InE4m3>(kFp8),
                               row<PrecisionFp8RawInE4m3>(kFp8Raw)};

// Of codes in pages, whatever type q has.
constexpr Kernels kOfCodes = {forward_kernel_of<PrecisionCodes, Logits::plain, TileRows::pages>, nullptr,
                              forward_kernel_of<PrecisionCodes, Logits::general, TileRows::pages>};

// These kernels sum P v in f16. They take plain logits.
constexpr KernelOf kOfF16Sums = forward_kernel_of<PrecisionInt8F16Sums, Logits::plain, TileRows::queries>;

// Returns what a variable of the environment says, 0 or 1, or where it is not set `otherwise`.
bool environment_switch(const char* name, bool otherwise, const char* zero, const char* one) {
  const char* const wanted = std::getenv(name);
  if (!wanted || !*wanted) return otherwise;
  if (std::string_view(wanted) == "0") return false;
  if (std::string_view(wanted) == "1") return true;
  invalid(name, ": found ", quoted(wanted), ", allowed: 0 (", zero, "), 1 (", one, ")");
}

// Return whether P v is summed in f16, and whether e4m3 is multiplied as it is, where kernels can: by default where
// that is faster.
bool prefers_f16_sums(const Card& gpu) {
  return environment_switch("OCTET_F16_SUMS", gpu.has_fast_f16_sums, "sums of P v in float32", "in f16");
}
bool prefers_e4m3_products(const Card& gpu) {
  const char* const name = "OCTET_E4M3_PRODUCTS";
  const bool wanted = environment_switch(name, gpu.has_e4m3_products, "e4m3 as f16", "as it is");
  if (wanted && !gpu.has_e4m3) invalid(name, ": found '1', allowed: 0 before compute capability 8.9");
  return wanted;
}

constexpr int64_t kMostDimOfFewRows = 128;

// A multiprocessor reserves so much of its shared memory for each thread block. One block can have all the rest.
constexpr int kReservedBytes = 1024;
// Returns how many thread blocks of a kernel the shared memory of a multiprocessor holds.
int blocks_in_shared_memory(const Card& gpu, const ForwardKernel& kernel) {
  return (gpu.shared_bytes + kReservedBytes) / (kernel.shared_bytes + kReservedBytes);
}

template <std::size_t N>
const Row* row_of(const Row (&rows)[N], const ForwardFormats& formats) {
  const auto* const row = std::find_if(rows, rows + N, [&](const Row& x) { return x.formats == formats; });
  return row == rows + N ? nullptr : row;
}
// Returns the row of a recipe; null: it has no kernels.
const Row* row_of(const ForwardFormats& formats) { return row_of(kRows, formats); }
// The same where tensor cores may multiply e4m3; null: it has no such products, or they are not wanted.
const Row* row_in_e4m3(const ForwardFormats& formats, int device) {
  const Row* const row = row_of(kRowsInE4m3, formats);
  return row && prefers_e4m3_products(card(device)) ? row : nullptr;
}

struct Candidate {
  ForwardKernel kernel;
  bool few;       // it is one for few queries
  bool f16_sums;  // it sums P v in f16
};

// The kernels for queries, the default first. A tile changes no rounding point: they all sum P v in f16, or none does.
Candidates<Candidate> kernels_for_queries(const Problem& p, const Row& row, Logits logits, int64_t most_dim) {
  Candidates<Candidate> all;
  const auto add = [&](const ForwardKernel& kernel, const char* also = "") {
    all.add({kernel.rows, kernel.keys, also}, {kernel, false, false});
  };
  if (logits == Logits::plain) {
    if (row.formats == kInt8F16 && prefers_f16_sums(card(p.device_index))) {
      const ForwardKernel kernel = kOfF16Sums(most_dim);
      all.add({kernel.rows, kernel.keys}, {kernel, false, true});
      return all;
    }
    const KernelOf doubled = most_dim <= 128 ? row.doubled.plain : nullptr;
    const bool fits =
        doubled && blocks_in_shared_memory(card(p.device_index), doubled(most_dim)) >= doubled(most_dim).blocks;
    const KernelOf half = most_dim <= 128 ? row.half_queries.plain : nullptr;
    const bool fills_half = half && most_queries(p) <= half(most_dim).rows;
    if (fills_half) add(half(most_dim));
    if (fits) add(doubled(most_dim));
    add(row.queries.plain(most_dim));
    if (doubled && !fits) add(doubled(most_dim));
    if (half && !fills_half) add(half(most_dim));
    return all;
  }
  bool masked = false;
  if (logits == Logits::masked && row.queries.masked) {
    ForwardKernel kernel = row.queries.masked(most_dim);
    kernel.shared_bytes += kernel.rows * mask_row_bytes(kernel.keys, mask_tensor(p).bytes);
    masked = most_dim <= kernel.dim && kernel.shared_bytes <= card(p.device_index).shared_bytes;
    if (masked) add(kernel);
  }
  add(row.queries.general(most_dim), masked ? "-general" : "");
  return all;
}

// Returns whether kernels read the codes of a tensor where they lie.
bool reads_codes(const View& t) {
  if (!t.quantization || (t.dtype != OCTET_I8 && t.dtype != OCTET_E4M3) || !reads_directly(t)) return false;
  const Quantization how = quantization_of(t);
  return how.granularity == OCTET_PER_TOKEN && how.zero_point_kind == OCTET_SYMMETRIC && !how.mean.present() &&
         !how.hadamard_seed;
}

// Returns whether 32 bits count all chunks of 16 bytes of a tensor in pages.
bool counts_chunks(const View& t) {
  int64_t last = 0;
  for (int i = 0; i < 3; ++i) last += std::max<int64_t>(t.shape[i] - 1, 0) * t.stride[i];
  return last * static_cast<int64_t>(bytes_of(t.dtype)) < int64_t{16} << 32;
}

bool has_pages_of_codes(const Problem& p) {
  return p.k.pages.size && reads_codes(p.k) && reads_codes(p.v) &&
         std::max(p.dim, p.dim_v) <= kOfCodes.plain(std::numeric_limits<int64_t>::max()).dim;
}

// Returns whether q and k came as codes that stay as they are.
bool has_codes(const ForwardNumerics& numerics) {
  return numerics.formats.qk == OCTET_I8 && numerics.came.q && numerics.came.k;
}

bool smooths_q(const Problem& p, const ForwardNumerics& numerics) { return p.smooth_q && !has_codes(numerics); }

Logits kernel_logits(const Problem& p, const ForwardNumerics& numerics) {
  const bool int8_v = numerics.formats == kInt8 || numerics.formats == kSagebwd;
  const bool zero_points = (has_codes(numerics) && (has_zero_points(p.q) || has_zero_points(p.k))) ||
                           (int8_v && numerics.came.v && has_zero_points(p.v));
  return numerics.beta != 0.f || zero_points || smooths_q(p, numerics) ? Logits::general : logits_of(p);
}

// The kernels that can run a problem, the default first. k and v in pages have those of few queries alone.
Candidates<Candidate> candidates_of(const Problem& p, const ForwardNumerics& numerics) {
  const Row* const in_e4m3 = row_in_e4m3(numerics.formats, p.device_index);
  const Row& row = in_e4m3 ? *in_e4m3 : *row_of(numerics.formats);
  const int64_t most_dim = std::max(p.dim, p.dim_v);
  const Logits logits = kernel_logits(p, numerics);
  const Candidates<Candidate> queries = kernels_for_queries(p, row, logits, most_dim);
  if (!can_split_keys(p) || p.dropout || smooths_q(p, numerics)) return queries;
  const bool codes_in_pages = row.pages.plain && has_pages_of_codes(p), pages = p.k.pages.size && row.pages.plain;
  const Kernels& of_few = codes_in_pages ? kOfCodes : pages ? row.pages : row.pairs;
  const auto of_logits = [&](const Kernels& x) { return logits != Logits::plain ? x.general : x.plain; };
  const ForwardKernel few = of_logits(of_few)(most_dim);
  // Keys in pages would have to be copied for the other kernels.
  const bool is_default =
      pages || has_few_queries(p, packed_tiles(p, few.rows), query_tiles(p, queries.first().kernel.rows),
                               card(p.device_index).multiprocessors);
  Candidates<Candidate> all;
  const auto add_few = [&] {
    const auto add = [&](const ForwardKernel& kernel) {
      all.add({kernel.rows, kernel.keys, "-split"}, {kernel, true, false});
    };
    // Where 16 rows have all queries of a group, warps share them.
    if (const KernelOf shared = of_logits(pages ? row.few_pages : row.few_pairs);
        shared && !codes_in_pages && most_dim <= kMostDimOfFewRows) {
      const ForwardKernel kernel = shared(most_dim);
      const PackedTiles tiles = packed_tiles(p, kernel.rows);
      if (tiles.heads == p.group() && most_queries(p) <= tiles.queries) add(kernel);
    }
    add(few);
  };
  if (is_default) add_few();
  if (!pages) all.add(queries);
  if (!is_default) add_few();
  return all;
}

}  // namespace

bool has_kernels(const ForwardFormats& formats) { return row_of(formats); }

int64_t most_head_dim(const ForwardFormats& formats) {
  return row_of(formats)->queries.plain(std::numeric_limits<int64_t>::max()).dim;
}

bool reads_pages(const Problem& p, const ForwardNumerics& numerics) {
  const auto as_it_is = [&](const View& t) { return t.dtype == numerics.type() && reads_directly(t); };
  const bool numbers = as_it_is(p.k) && as_it_is(p.v);
  if (!counts_chunks(p.k) || !counts_chunks(p.v)) return false;
  if (!row_of(numerics.formats)->pages.plain || !(numbers || has_pages_of_codes(p))) return false;
  const ForwardChoice choice = choose_forward(p, numerics);
  return choice.few && !choice.scales_v;
}

ForwardChoice choose_forward(const Problem& p, const ForwardNumerics& numerics) {
  const bool int8_qk = numerics.formats.qk == OCTET_I8;
  const Prequantized& came = numerics.came;
  const bool by_blocks = numerics.formats == kSagebwd, int8_v = numerics.formats == kInt8 || by_blocks;
  const auto [kernel, few, f16_sums] = candidates_of(p, numerics).pick(p.tile, kName);
  ForwardChoice choice{.kernel = kernel,
                       .numerics = numerics,
                       .general = kernel_logits(p, numerics) != Logits::plain,
                       .f32 = numerics.formats == kF32,
                       .int8_qk = int8_qk,
                       .int8_v = int8_v,
                       .blocks = by_blocks,
                       .k_groups = numerics.formats == kInt8Fp8 && !has_codes(numerics),
                       .codes = has_codes(numerics),
                       .v_codes = int8_v && came.v,
                       .training = numerics.formats == kInt8Training,
                       .e4m3_qk = numerics.formats == kFp8 || numerics.formats == kFp8Raw,
                       .e4m3_v = numerics.formats.v == OCTET_E4M3,
                       .e4m3_scales = numerics.formats.v_scale == Group::channel,
                       .e4m3_products = row_in_e4m3(numerics.formats, p.device_index) != nullptr,
                       .scales_v = f16_sums || numerics.scales_v(p.v.dtype),
                       .f16_sums = f16_sums,
                       .few = few,
                       .tile_queries = kernel.rows,
                       .tiles = query_tiles(p, kernel.rows)};
  if (!few) return choice;

  choice.pages_of_codes = row_of(numerics.formats)->pages.plain && has_pages_of_codes(p);
  const PackedTiles tiles = packed_tiles(p, kernel.rows);
  choice.tile_heads = tiles.heads, choice.tile_queries = tiles.queries, choice.tiles = tiles.count;
  const Card& gpu = card(p.device_index);
  const int blocks = blocks_in_shared_memory(gpu, kernel);
  const int64_t rows = tiles.heads * std::min<int64_t>(tiles.queries, most_queries(p));
  choice.splits = key_splits(tiles.count, (most_keys(p) + kernel.keys - 1) / kernel.keys,
                             {gpu.multiprocessors, std::clamp(blocks, 1, kernel.blocks)},
                             split_costs(kernel.rows, rows, kernel.keys));
  return choice;
}

std::vector<std::string> forward_tiles(const Problem& p, const ForwardNumerics& numerics) {
  return candidates_of(p, numerics).names();
}

}  // namespace octet::cuda::sm80
