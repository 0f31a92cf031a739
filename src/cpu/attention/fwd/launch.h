// The forward pass of a call: its workspace, its key side, its blocks of queries.
#pragma once
#include "cpu/attention/fwd/mainloop.h"
#include "cpu/attention/pack/keys.h"
#include "cpu/attention/pack/statistics.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

// Bytes of scratch memory of one thread.
template <class Qk, class Pv, PFormat format>
std::size_t forward_scratch_bytes(const ForwardNumerics& numerics, const KeySide& side) {
  WorkspaceAllocator workspace(nullptr);
  ForwardScratch<Qk, Pv>::allocate(numerics, side, workspace);
  return workspace.used();
}

template <class Qk, class Pv, PFormat format>
std::size_t forward_workspace_as(const Problem& p, const ForwardNumerics& numerics, unsigned threads) {
  WorkspaceAllocator workspace(nullptr);
  const KeySide side = allocate_key_side<Qk, Pv>(p, numerics, workspace);
  return workspace.used() + threads * forward_scratch_bytes<Qk, Pv, format>(numerics, side);
}

// Fills the key side: statistics, then tiles. With heads enough for all threads, both for one head while it is near.
template <class Qk, class Pv>
void pack_keys(const Job& job, const ForwardNumerics& numerics, const Signs& signs, const KeySide& side) {
  const Problem& p = *job.problem;
  const int64_t sides = job.sequence_count * p.kv_heads;
  const bool statistics = numerics.smooth_k || numerics.smooth_v || side.v_range || side.seen;
  const auto summarise = [&](int64_t task) {
    const int64_t sequence = task / p.kv_heads, g = task % p.kv_heads;
    const Sequence& seq = job.sequences[sequence];
    const int64_t first_tile = seq.k_tokens ? first_tile_of(job, sequence) : 0;
    if (side.seen) list_seen_keys(p, seq, g, side.seen + side.tile_index(g, first_tile) * kKeys);
    channel_statistics(p, numerics, seq, g, task, side.seen_keys(p, seq, g, first_tile), side);
  };
  const auto pack = [&](const Block& block) {
    const FlushDenormals flush;
    pack_key_tile<Qk, Pv>(p, numerics, job.sequences[block.sequence], block, signs, side);
  };
  if (statistics && sides >= job.threads) {
    parallel_for(job.threads, sides, [&](int64_t task, unsigned) {
      const int64_t sequence = task / p.kv_heads;
      summarise(task);
      for (int64_t token = 0; token < job.sequences[sequence].k_tokens; token += kKeys)
        pack({sequence, task % p.kv_heads, token, first_tile_of(job, sequence)});
    });
    return;
  }
  if (statistics) parallel_for(job.threads, sides, [&](int64_t task, unsigned) { summarise(task); });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) { pack(job.key_tiles[task]); });
}

template <class Qk, class Pv, PFormat format>
void forward_as(const Job& job, const ForwardNumerics& numerics) {
  const Problem& p = *job.problem;
  WorkspaceAllocator workspace(job.workspace);
  const KeySide side = allocate_key_side<Qk, Pv>(p, numerics, workspace);
  const std::size_t scratch_bytes = forward_scratch_bytes<Qk, Pv, format>(numerics, side);
  char* scratch = workspace.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const Signs signs(p.q, p.dim);
  pack_keys<Qk, Pv>(job, numerics, signs, side);
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.query_blocks[task];
    WorkspaceAllocator own(scratch + thread * scratch_bytes);
    const FlushDenormals flush;
    configure_tiles();
    Forward<Qk, Pv, format> forward{p,  numerics, side, signs, ForwardScratch<Qk, Pv>::allocate(numerics, side, own),
                                    {}, {}};
    const int64_t next = std::min<int64_t>(task + job.threads, job.query_block_count - 1);
    forward.run(job.sequences[block.sequence], block, job.query_blocks[next]);
    release_tiles();
  });
}

// Calls body with the engines and P format of a numerics.
template <class Body>
auto with_engines(const ForwardNumerics& numerics, Body&& body) {
  const bool int8 = numerics.qk == OCTET_I8;
  switch (numerics.p) {
    case PFormat::u8:
      return body.template operator()<Int8, UInt8, PFormat::u8>();
    case PFormat::e4m3:
      return int8 ? body.template operator()<Int8, Bf16, PFormat::e4m3>()
                  : body.template operator()<Bf16, Bf16, PFormat::e4m3>();
    case PFormat::bf16:
      return body.template operator()<Bf16, Bf16, PFormat::bf16>();
    case PFormat::f16:
      if (int8) return body.template operator()<Int8, F32, PFormat::f16>();
      return numerics.qk == OCTET_BF16 ? body.template operator()<Bf16, F32, PFormat::f16>()
                                       : body.template operator()<F32, F32, PFormat::f16>();
    default:
      return body.template operator()<Split, Split, PFormat::exact>();
  }
}

inline std::size_t forward_workspace(const Problem& p, unsigned threads) {
  const ForwardNumerics numerics = forward_numerics(p);
  return with_engines(numerics, [&]<class Qk, class Pv, PFormat format>() {
    return forward_workspace_as<Qk, Pv, format>(p, numerics, threads);
  });
}

inline int64_t forward_block_rows(const Problem& p) {
  return with_engines(forward_numerics(p), []<class Qk, class Pv, PFormat format>() { return kBlockRows<Qk, Pv>; });
}

inline void forward(const Job& job) {
  const ForwardNumerics numerics = forward_numerics(*job.problem);
  with_engines(numerics, [&]<class Qk, class Pv, PFormat format>() { forward_as<Qk, Pv, format>(job, numerics); });
}

}  // namespace octet::cpu::OCTET_ISA
