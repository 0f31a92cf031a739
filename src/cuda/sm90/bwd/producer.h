// The producer warpgroup of the backward pass: one thread takes blocks of keys and loads all operands; three warps
// convert k and v of the next block and clear the sums of dq of a later head.
#pragma once
#include "cuda/sm90/bwd/backward.h"

namespace octet::cuda::sm90 {

// Loads q and do, and k and v ahead of the first iteration of their block. Runs on one thread.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::produce() {
  unsigned n = 0;  // iterations so far
  next_tile(0);
  for (unsigned tile_index = 0;; ++tile_index) {
    const int slot = tile_index % Shared::kTileSlots;
    const KeyBlockInfo& w = shared.key_block[slot];
    if (!w.valid()) return;
    load_tiles(w, tile_index, n);
    shared.tile_pipe.empty[slot].arrive();
  }
}

template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::load_tiles(const KeyBlockInfo& w, unsigned tile_index,
                                                                       unsigned& n) {
  const int group = a.heads / a.kv_heads, iterations = group * w.tiles.count();
  // The next block is taken when this many iterations are left.
  const int prefetch_at = max(min(iterations, kPrefetchDistance) - 1, 0);
  MBlock m_block{w.tiles.start, 0};
  for (int left = iterations;; --left, ++n, m_block.advance(w.tiles, group)) {
    if (left == prefetch_at) next_tile(tile_index + 1);
    if (!left) return;
    const int64_t tile = scheduler.q_tile(w, m_block, group);
    // From the tiles of preprocessing or, where there are none, from the caller.
    const auto fetch_queries = [&](unsigned char* to, const unsigned char* tiles, const CUtensorMap& rows,
                                   Barrier& full) {
      if (kMayReadRows && !tiles)
        load(TileQ{to}, rows, m_block.tile * kQueries, w.kv_head * group + m_block.head, w.batch, &full.word);
      else
        fetch(to, tiles + tile * TileQ::kBytes, TileQ::kBytes, full);
    };
    const int s = n % kStages, do_stage = n % kDoStages;
    const uint32_t empty = n / kStages % 2 ^ 1;
    shared.q_pipe.empty[s].wait(empty);
    shared.q_pipe.full[s].arrive_expecting(TileQ::kBytes + sizeof(Rows));
    fetch_queries(shared.q[s], a.q, a.q_rows, shared.q_pipe.full[s]);
    shared.rows_empty[s].wait(empty);
    fetch(&shared.rows[s], scheduler.template rows<Rows>(w, tile), sizeof(Rows), shared.q_pipe.full[s]);
    shared.do_pipe.empty[do_stage].wait(n / kDoStages % 2 ^ 1);
    shared.do_pipe.full[do_stage].arrive_expecting(TileQ::kBytes);
    fetch_queries(shared.do_[do_stage], a.do_, a.do_rows, shared.do_pipe.full[do_stage]);
    if constexpr (kMasked) fetch_mask(w, m_block, group, n);
  }
}

// Loads the mask tensor of iteration n.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::fetch_mask(const KeyBlockInfo& w, const MBlock& at,
                                                                       int group, unsigned n) const {
  Mask::fetch(shared, n, [&](const auto& tile, int query, int key, Barrier& full) {
    load(tile, a.mask_tiles, w.first_key + key, (at.tile * kQueries + query) * a.mask_broadcast[0],
         (w.kv_head * group + at.head) * a.mask_broadcast[1], w.batch * a.mask_broadcast[2], &full.word);
  });
}

// Takes the next block of keys, or the last one again for one more bin of its queries, and loads its k and v.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::next_tile(unsigned tile_index) {
  const int slot = tile_index % Shared::kTileSlots, stage = tile_index % kKeyStages;
  KeyBlockInfo& w = shared.key_block[slot];
  shared.tile_pipe.empty[slot].wait(tile_index / Shared::kTileSlots % 2 ^ 1);
  const KeyBlockInfo& last = shared.key_block[(tile_index + Shared::kTileSlots - 1) % Shared::kTileSlots];
  const bool again = bins == Bins::further && tile_index > 0 && scheduler.next_bin(last, w);
  while (!again) {
    scheduler.find(atomicAdd(a.counter, 1u), w);
    if (!w.valid() || w.k.index >= 0) break;  // skip blocks beyond the last packed sequence
  }
  shared.tile_pipe.full[slot].arrive();
  const uint32_t empty = tile_index / kKeyStages % 2 ^ 1;
  shared.k_pipe.empty[stage].wait(empty), shared.v_pipe.empty[stage].wait(empty);
  if (!w.valid()) {
    // Not earlier: converters that still sleep before the stage's last block would miss the end of its phase, and wait
    // forever.
    shared.k_rows_full[stage].arrive();
    return;
  }
  if (a.k)
    fetch_tiles(tile_index, stage);
  else
    fetch_rows(true, w, stage), fetch_rows(false, w, stage);
}

template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::fetch_tiles(unsigned tile_index, int stage) {
  const int slot = tile_index % Shared::kTileSlots;
  KeyBlockInfo& w = shared.key_block[slot];
  const int head = w.batch * a.kv_heads + w.kv_head;
  const int64_t tile = (static_cast<int64_t>(head) * a.k_blocks.count + w.block) * TileK::kBytes;
  const Exponents& e = scheduler.exponents(w);
  w.exponents.k = e.k, w.exponents.v = e.v, w.exponents.ds = 0;
  set_factors(slot);
  shared.k_pipe.full[stage].arrive_expecting(TileK::kBytes);
  fetch(shared.k[stage], a.k + tile, TileK::kBytes, shared.k_pipe.full[stage]);
  shared.v_pipe.full[stage].arrive_expecting(TileK::kBytes);
  fetch(shared.v[stage], a.v + tile, TileK::kBytes, shared.v_pipe.full[stage]);
}

// Runs on the thread that sets the exponents of the block, before k and v are ready.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::set_factors(int slot) {
  const auto power_of_two = [](int exponent) { return exp2f(static_cast<float>(exponent)); };
  const KeyBlockInfo& w = shared.key_block[slot];
  BlockFactors& f = shared.factors[slot];
  const Exponents& e = scheduler.exponents(w);
  const KeyExponents& of_keys = w.exponents;
  f.usual = sums == Sums::integers || (bins == Bins::first && of_keys.k == e.k && of_keys.ds == 0);
  f.logits = a.scale * 1.44269504f * power_of_two(-e.q - of_keys.k);
  const float kept_scale = kDrops ? a.dropout.scale : 1.f;
  f.product = kept_scale * power_of_two(e.product + e.v - of_keys.v);
  f.ds = power_of_two(-of_keys.ds);
  f.dq = power_of_two(of_keys.ds + e.k - of_keys.k + (bins == Bins::first ? 0 : e.dq));
  f.dv = WideFactor::of(kept_scale, -e.p - e.do_);
  f.dk = WideFactor::of(a.scale, of_keys.ds - e.p - e.product - e.do_ - e.v - e.q);
  const int group = a.heads / a.kv_heads;
  f.iterations = group * w.tiles.count();
  f.passes_first = a.mask.windowed && f.iterations &&
                   (w.tiles.first + 1) * kQueries - 1 + a.mask.shift(w.q.tokens, w.k.tokens) + a.mask.right <
                       w.first_key + kWarpgroupRows;
  f.unmasked = {a, w, w.first_key, kKeys, kQueries, group};
  if constexpr (kAlibi) f.usual = f.usual && has_gentle_terms(a.slopes, a, w, w.tiles.first * kQueries);
}

template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::fetch_rows(bool is_k, const KeyBlockInfo& w,
                                                                       int stage) const {
  Barrier& full = rows_full(is_k, stage);
  full.arrive_expecting(TileK::kBytes);
  load(TileK{is_k ? shared.k[stage] : shared.v[stage]}, is_k ? a.k_rows : a.v_rows, w.k.first + w.first_key, w.kv_head,
       w.batch, &full.word);
}

// Converts k and v of a block of keys while the block before is computed, unless they were preprocessed as tiles.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::convert_keys(int thread) {
  if (a.k) return;
  uint32_t phases = 0;  // a bit for the barrier of k and of v in each stage; see rows_phase_bit
  for (unsigned tile_index = 0;; ++tile_index) {
    const int stage = tile_index % kKeyStages;
    KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    // One thread polls the barrier with pauses, as polling takes issue slots from the consumers.
    if (thread == 0) shared.k_rows_full[stage].wait_asleep(phases >> rows_phase_bit(true, stage) & 1);
    __syncwarp();
    ptx::barrier_sync(kConverterBarrier, Converter::kThreads);
    if (!w.valid()) return;
    convert_rows(thread, true, tile_index, stage, phases);
    if (thread == 0) await_zeros(a, w, a.k_blocks.count);
    convert_rows(thread, false, tile_index, stage, phases);
    clear_ahead<kQueries * kTileDim, Converter::kThreads>(a, w, w.block, a.k_blocks.count, thread, kConverterBarrier);
    shared.tile_pipe.empty[tile_index % Shared::kTileSlots].arrive();
  }
}

// Converts k or v once it has arrived.
template <class T, int Dim, Sums sums, Bins bins, Extra extra>
__device__ inline void Backward<T, Dim, sums, bins, extra>::convert_rows(int thread, bool is_k, unsigned tile_index,
                                                                         int stage, uint32_t& phases) {
  const int slot = tile_index % Shared::kTileSlots;
  KeyBlockInfo& w = shared.key_block[slot];
  const auto await = [&] {
    const int bit = rows_phase_bit(is_k, stage);
    rows_full(is_k, stage).wait(phases >> bit & 1);
    phases ^= 1u << bit;
  };
  const auto fetch_again = [&] {
    if (thread == 0) fetch_rows(is_k, w, stage);
    __syncwarp();
    await();
  };
  const int head = w.batch * a.kv_heads + w.kv_head, channel = Converter::channel(thread);
  const Interval seen = a.mask.seen(w.q.tokens, w.k.tokens);
  const int first_row = max(seen.first - w.first_key, 0);
  const unsigned rows = static_cast<unsigned>(max(min(seen.last - w.first_key, kKeys) - first_row, 0));
  uint32_t flagged = 0;
  if constexpr (kMasked)
    flagged = Converter::seen_of(thread, first_row, rows, a.seen_keys.of(w.batch, w.kv_head) + w.first_key);
  const Converter converter{.thread = static_cast<unsigned>(thread),
                            .tile = {is_k ? shared.k[stage] : shared.v[stage]},
                            .first_row = static_cast<unsigned>(first_row),
                            .rows = rows,
                            .bf16 = a.rows_are_bf16,
                            .mean = is_k && channel < a.dim ? a.k_mean + head * a.dim + channel : nullptr,
                            .seen = flagged};
  const Exponents& e = scheduler.exponents(w);
  await();
  typename Converter::Fitted fitted{is_k ? e.k : e.v, Converter::kNone};
  if constexpr (sums == Sums::integers)
    converter.convert(fitted.exponent);
  else
    fitted = is_k ? converter.fit(e.k, Converter::kLargest, e.k == kMaxKeyExponent, fetch_again)
                  : converter.fit(e.v, fminf(e.largest_v, Converter::kLargest), false, fetch_again);
  if (thread > 0) return;
  if (is_k) {
    w.exponents.k = fitted.exponent;
  } else {
    w.exponents.v = fitted.exponent;
    w.exponents.ds =
        fitted.largest > Converter::kNone ? max(fitted.largest + e.v + 1 - exponent_above(e.largest_v), 0) : 0;
    set_factors(slot);
  }
  (is_k ? shared.k_pipe : shared.v_pipe).full[stage].arrive();
}

}  // namespace octet::cuda::sm90
