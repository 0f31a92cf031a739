// The backward pass of a call: its workspace, what its tasks share, its tasks.
#pragma once
#include "cpu/attention/bwd/mainloop.h"
#include "cpu/attention/bwd/postprocess.h"
#include "cpu/attention/bwd/row_sums.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

inline std::size_t backward_scratch_bytes(const Problem& p, const GradientOperands& w) {
  WorkspaceAllocator workspace(nullptr);
  BackwardScratch::allocate(p, w, workspace);
  return workspace.used();
}

inline std::size_t backward_workspace(const Problem& p, unsigned threads) {
  WorkspaceAllocator workspace(nullptr);
  const GradientOperands w = allocate_gradient_operands(p, backward_numerics(p), workspace);
  return workspace.used() + threads * backward_scratch_bytes(p, w);
}

// Everything that the tasks share.
inline void prepare_operands(const Job& job, const BackwardNumerics& numerics, const GradientOperands& w) {
  const Problem& p = *job.problem;
  const Rounding roundings[] = {numerics.q, numerics.k, numerics.v, numerics.do_dp, numerics.do_dv};
  bool whole_heads = false;
  for (const Rounding& r : roundings) whole_heads |= r.group == kWholeHead;
  parallel_for(job.threads, job.sequence_count * p.kv_heads, [&](int64_t side, unsigned) {
    const Sequence& seq = job.sequences[side / p.kv_heads];
    float* mean = w.k_mean + side * kMaxDim;
    const int64_t g = side % p.kv_heads;
    const int64_t first_tile = seq.k_tokens ? first_tile_of(job, side / p.kv_heads) : 0;
    if (w.seen_keys) list_seen_keys(p, seq, g, listed_keys(w, g, first_tile));
    const SeenTokens seen = seen_keys(p, seq, g, first_tile, w);
    const bool smooth = numerics.smooth_k || numerics.smooth_k_dq;
    if (smooth) mean_of_tokens(p.k, seq, g, seen, mean);
    if (numerics.smooth_v) mean_of_tokens(p.v, seq, g, seen, w.v_mean + side * kMaxDim);
    if (whole_heads)
      w.key_heads[side] = head_statistics(
          p.k, p.v, seq.batch, g, seq.k_first, seq.k_tokens, [&](int64_t j) { return seen[j]; },
          smooth ? mean : nullptr);
  });
  if (whole_heads || w.seen_queries)
    parallel_for(job.threads, job.sequence_count * p.heads, [&](int64_t side, unsigned) {
      const Sequence& seq = job.sequences[side / p.heads];
      const int64_t h = side % p.heads;
      for (int64_t i = 0; i < seq.q_tokens && w.seen_queries; ++i)
        w.seen_queries[row_index(p, seq, h, i)] = sees_a_key(p, seq, h, i);
      if (whole_heads)
        w.query_heads[side] = head_statistics(
            p.q, p.do_, seq.batch, h, seq.q_first, seq.q_tokens, [&](int64_t i) { return seen_query(p, seq, h, i, w); },
            nullptr);
    });
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned) {
    prepare_keys(p, numerics, job.sequences[job.key_tiles[task].sequence], job.key_tiles[task], w);
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    prepare_queries(p, numerics, job.sequences[job.query_blocks[task].sequence], job.query_blocks[task], w);
  });
}

template <GradientFormat format>
void backward_as(const Job& job, const BackwardNumerics& numerics) {
  const Problem& p = *job.problem;
  WorkspaceAllocator workspace(job.workspace);
  const GradientOperands w = allocate_gradient_operands(p, numerics, workspace);
  const std::size_t scratch_bytes = backward_scratch_bytes(p, w);
  char* scratch = workspace.take<char>(static_cast<int64_t>(job.threads * scratch_bytes));
  const auto tile_of = [&](unsigned thread) {
    WorkspaceAllocator own(scratch + thread * scratch_bytes);
    return BackwardTile{p, numerics, w, BackwardScratch::allocate(p, w, own)};
  };
  prepare_operands(job, numerics, w);
  w.dmask.clear(job);
  if (w.row_bias && numerics.delta != Delta::from_p)
    parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
      configure_tiles();
      BlockRowSums{tile_of(thread)}.renew_lse(job.sequences[job.query_blocks[task].sequence], job.query_blocks[task]);
      release_tiles();
    });
  if (numerics.delta == Delta::from_p || numerics.gproj)
    parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned thread) {
      configure_tiles();
      BlockRowSums{tile_of(thread)}.compute<format>(job.sequences[job.query_blocks[task].sequence],
                                                    job.query_blocks[task]);
      release_tiles();
    });
  const int64_t tiles_per_task = std::clamp<int64_t>(job.key_tile_count / (8 * job.threads), 1, kTilesPerTask);
  parallel_for(job.threads, job.key_tile_count, [&](int64_t task, unsigned thread) {
    const Block& block = job.key_tiles[task];
    if (block.token / kKeys % tiles_per_task != 0) return;
    configure_tiles();
    Backward<format>{tile_of(thread)}.run(job.sequences[block.sequence], block, tiles_per_task);
    release_tiles();
  });
  parallel_for(job.threads, job.query_block_count, [&](int64_t task, unsigned) {
    store_dq(p, numerics, job.sequences[job.query_blocks[task].sequence], job.query_blocks[task], w);
  });
  store_dsinks(job, w);
  w.dmask.store(job);
}

inline void backward(const Job& job) {
  const BackwardNumerics numerics = backward_numerics(*job.problem);
  switch (numerics.format) {
    case GradientFormat::exact:
      return backward_as<GradientFormat::exact>(job, numerics);
    case GradientFormat::f16:
      return backward_as<GradientFormat::f16>(job, numerics);
    case GradientFormat::bf16:
      return backward_as<GradientFormat::bf16>(job, numerics);
    case GradientFormat::e4m3:
      return backward_as<GradientFormat::e4m3>(job, numerics);
    case GradientFormat::int8:
      return backward_as<GradientFormat::int8>(job, numerics);
  }
}

}  // namespace octet::cpu::OCTET_ISA
