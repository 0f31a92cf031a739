// The producer warpgroup of the 2-CTA backward pass: one thread loads k and v, one loads q and do, and two warps
// clear the sums of dq of a later head.
#pragma once
#include "cuda/sm90/bwd/backward_2cta.h"

namespace octet::cuda::sm90 {

// Returns the number of the next block of keys. Thread block 0 takes it from the counter and sends it to its peer.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline unsigned Backward2Cta<T, Dims, sums, bins>::next_number(unsigned numbers_taken) {
  if (rank() == 0) {
    const unsigned number = atomicAdd(a.counter, 1u);
    shared.number_pipe.empty[0].wait(numbers_taken % 2 ^ 1);
    ptx::store_at(ptx::at_rank(&shared.number, 1), number, ptx::at_rank(&shared.number_pipe.full[0], 1));
    return number;
  }
  shared.number_pipe.full[0].arrive_expecting(sizeof(shared.number));
  shared.number_pipe.full[0].wait(numbers_taken % 2);
  const unsigned number = *static_cast<volatile uint32_t*>(&shared.number);
  // The number must have been read when the next one is stored over it. Arrivals at the peer overtake loads in flight,
  // which may wait behind other warps' stores; this one cannot, because its address depends on the number.
  ptx::arrive_at(ptx::at_rank(&shared.number_pipe.empty[0], 0) + (number >> 31));  // numbers are below 2^31
  return number;
}

// Takes blocks of keys, each once for each bin of its queries, and loads k and v. Runs on one thread.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::load_keys() {
  unsigned tile_index = 0, numbers_taken = 0;
  for (;;) {
    KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    const KeyBlockInfo& last = shared.key_block[(tile_index + Shared::kTileSlots - 1) % Shared::kTileSlots];
    if (bins == Bins::first || tile_index == 0 || !scheduler.next_bin(last, w)) {
      const unsigned number = next_number(numbers_taken++);
      scheduler.find(number, w);
      if (w.valid() && w.k.index < 0) continue;  // skip blocks beyond the last packed sequence
    }
    const uint32_t empty = tile_index % 2 ^ 1;
    shared.tile_pipe.full[0].arrive();
    if (!w.valid()) {
      shared.k_pipe.empty[0].wait(empty);
      shared.k_pipe.full[0].arrive();
      return;
    }
    const int64_t tile = (static_cast<int64_t>(w.batch) * a.kv_heads + w.kv_head) * a.k_blocks.count + w.block;
    // Fetches every `step`-th panel from `first` on, where the first panel follows the last, of the keys of a thread
    // block.
    const auto fetch_panels = [&](unsigned char* to, const unsigned char* tiles, int of_rank, int first, int panels,
                                  Pipeline<1>& pipe, int step = 1) {
      const unsigned char* const from = tiles + tile * TileCluster::kBytes + of_rank * TileK::kPanelBytes;
#pragma unroll kLocalFirst ? 1 : 4  // registers are few
      for (int i = 0; i < panels; ++i) {
        const int panel = kLocalFirst ? (first + i * step) % TileCluster::kPanels : first + i;
        fetch(to + i * TileK::kPanelBytes, from + panel * TileCluster::kPanelBytes, TileK::kPanelBytes, pipe.full[0]);
      }
    };
    const auto first_panel = [&] { return kLocalFirst ? rank() * Local::kPanels : 0; };
    shared.v_pipe.empty[0].wait(empty);
    shared.v_pipe.full[0].arrive_expecting(TileV::kBytes);
    if (kMayReadRows && !a.v)
      load_rows_of_keys(w, false);
    else
      fetch_panels(shared.v, a.v, rank(), first_panel(), TileV::kPanels, shared.v_pipe,
                   Local::kPanels / LocalDo::kPanels);
    await_zeros(a, w, kBlocks * a.k_blocks.count);
    shared.k_pipe.empty[0].wait(empty);
    shared.k_pipe.full[0].arrive_expecting(TileK::kBytes + Local::kBytes);
    if (kMayReadRows && !a.k) {
      load_rows_of_keys(w, true);
    } else {
      fetch_panels(shared.k, a.k, rank(), first_panel(), TileK::kPanels, shared.k_pipe);
      fetch_panels(shared.remote_k, a.k, peer(), rank() * Local::kPanels, Local::kPanels, shared.k_pipe);
    }
    // The next block is taken late, once all tiles of this one are loaded, so that all thread blocks end together.
    shared.tile_pipe.empty[0].wait(tile_index % 2);
    ++tile_index;
  }
}

// Loads k or v of a block of keys from the caller's rows.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::load_rows_of_keys(const KeyBlockInfo& w, bool is_k) {
  const int me = rank(), first = kLocalFirst ? me : 0, own_row = w.first_key + me * kKeys;
  if (is_k) {
    Barrier& full = shared.k_pipe.full[0];
    load_rows<Dim>(Local{shared.k}, a.k_rows, first, own_row, w.kv_head, w.batch, full);
    load_rows<Dim>(Remote{shared.k + Local::kBytes}, a.k_rows, first ^ 1, own_row, w.kv_head, w.batch, full);
    load_rows<Dim>(Local{shared.remote_k}, a.k_rows, me, w.first_key + (me ^ 1) * kKeys, w.kv_head, w.batch, full);
  } else {
    Barrier& full = shared.v_pipe.full[0];
    load_rows<DimV>(LocalDo{shared.v}, a.v_rows, first, own_row, w.kv_head, w.batch, full);
    load_rows<DimV>(Remote{shared.v + LocalDo::kBytes}, a.v_rows, first ^ 1, own_row, w.kv_head, w.batch, full);
  }
}

// Clears the sums of dq of later heads, a share with each block of keys.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::clear_all(int thread) {
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.k_pipe.full[0].wait_asleep(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) return;
    const int share = kBlocks * w.block + rank();
    clear_ahead<kQueries * kTileDim, kClearThreads>(a, w, share, kBlocks * a.k_blocks.count, thread, kClearBarrier);
    shared.k_pipe.empty[0].arrive();
  }
}

// Loads q and do, in the order in which their stages are released. Those of a block's first iteration are loaded before
// k of the block before is released. Runs on one thread.
template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::load_queries() {
  unsigned n = 0;  // iterations so far
  for (unsigned tile_index = 0;; ++tile_index) {
    shared.tile_pipe.full[0].wait(tile_index % 2);
    const KeyBlockInfo& w = shared.key_block[tile_index % Shared::kTileSlots];
    if (!w.valid()) return;
    load_queries(w, n);
    shared.tile_pipe.empty[0].arrive();
  }
}

template <class T, class Dims, Sums sums, Bins bins>
__device__ inline void Backward2Cta<T, Dims, sums, bins>::load_queries(const KeyBlockInfo& w, unsigned& n) {
  const int group = a.heads / a.kv_heads;
  MBlock m_block{w.tiles.start, 0};
  for (int left = group * w.tiles.count(); left; --left, ++n, m_block.advance(w.tiles, group)) {
    const int64_t tile = scheduler.q_tile(w, m_block, group);
    // Fetches the first columns of the half of the channels that `of_rank` has: from the tiles of preprocessing or,
    // where there are none, from the caller.
    const auto fetch_columns = [&](const auto& to, const unsigned char* tiles, const CUtensorMap& rows, auto channels,
                                   int of_rank, Barrier& full, uint32_t more = 0) {
      constexpr uint32_t kBytes = std::remove_cvref_t<decltype(to)>::kBytes;
      full.arrive_expecting(kBytes + more);
      if (kMayReadRows && !tiles)
        load_rows<channels>(to, rows, of_rank, m_block.tile * kQueries, w.kv_head * group + m_block.head, w.batch,
                            full);
      else
        fetch(to.data, tiles + tile * TileQ::kBytes + of_rank * Local::kBytes, kBytes, full);
    };
    constexpr std::integral_constant<int, Dim> kOfQ;
    constexpr std::integral_constant<int, DimV> kOfDo;
    const int s = n % kQStages, do_s = n % kDoStages, remote_s = n % kRemoteStages;
    const uint32_t empty = n / kQStages % 2 ^ 1;
    shared.q_pipe.empty[s].wait(empty);
    shared.rows_empty[s].wait(empty);
    fetch_columns(Local{shared.q_local[s]}, a.q, a.q_rows, kOfQ, rank(), shared.q_pipe.full[s], sizeof(Rows));
    fetch(&shared.rows[s], scheduler.template rows<Rows>(w, tile), sizeof(Rows), shared.q_pipe.full[s]);
    shared.q_remote_pipe.empty[remote_s].wait(n / kRemoteStages % 2 ^ 1);
    fetch_columns(Remote{shared.q_remote[remote_s]}, a.q, a.q_rows, kOfQ, peer(), shared.q_remote_pipe.full[remote_s]);
    shared.do_pipe.empty[do_s].wait(n / kDoStages % 2 ^ 1);
    fetch_columns(LocalDo{shared.do_local[do_s]}, a.do_, a.do_rows, kOfDo, rank(), shared.do_pipe.full[do_s]);
    shared.do_remote_pipe.empty[remote_s].wait(n / kRemoteStages % 2 ^ 1);
    fetch_columns(Remote{shared.do_remote[remote_s]}, a.do_, a.do_rows, kOfDo, peer(),
                  shared.do_remote_pipe.full[remote_s]);
  }
}

}  // namespace octet::cuda::sm90
