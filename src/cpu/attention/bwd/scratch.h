// The scratch memory of a thread.
#pragma once
#include "cpu/attention/bwd/operands.h"

namespace octet::cpu::OCTET_ISA {

// Tiles that a task may own: the rows of q, do and dq come from far away once for all of them.
constexpr int64_t kTilesPerTask = 4;

// Scratch memory of one thread.
struct BackwardScratch {
  float *s, *dp;               // [kQueries][kKeys]; become p and ds
  float *derivative, *ds_sum;  // [kQueries][kKeys], [kQueries], with a softcap: gradient_row
  uint64_t* kept;              // [kQueries], with dropout: find_kept
  float* p_kept;               // [kQueries][kKeys], with dropout: p without dropped elements
  float* bias_ds;              // [kQueries][kKeys], with dmask: gradient_row
  // These are used where products run in tiles.
  Word *p_t, *ds_t, *ds;       // [kKeys][split_stride(kQueries)]: A of p^T do, ds^T q and ds k
  Word *q, *do_;               // [kQueries][split_stride]: A of q k^T and do v^T
  Word *q_by_row, *do_by_row;  // [words_of<Split>(kQueries)][columns]: B of ds^T q and p^T do
  float* product;              // [kQueries][k_columns], of a block of fewer rows than tiles have
  float *dk, *dv;              // [kTilesPerTask * kKeys][columns]

  static BackwardScratch allocate(const Problem& p, const GradientOperands& w, WorkspaceAllocator& workspace) {
    BackwardScratch t;
    t.s = workspace.take<float>(kQueries * kKeys);
    t.dp = workspace.take<float>(kQueries * kKeys);
    t.derivative = workspace.take<float>(kQueries * kKeys);
    t.ds_sum = workspace.take<float>(kQueries);
    t.kept = p.dropout ? workspace.take<uint64_t>(kQueries) : nullptr;
    t.p_kept = p.dropout ? workspace.take<float>(kQueries * kKeys) : nullptr;
    t.bias_ds = p.dmask.present() ? workspace.take<float>(kQueries * kKeys) : nullptr;
    if (kSplits<Split>) {
      for (Word** x : {&t.p_t, &t.ds_t, &t.ds}) *x = workspace.take<Word>(kKeys * split_stride(kQueries));
      t.q = workspace.take<Word>(kQueries * split_stride(w.k_columns));
      t.do_ = workspace.take<Word>(kQueries * split_stride(w.v_columns));
      t.q_by_row = workspace.take<Word>(words_of<Split>(kQueries) * w.k_columns);
      t.do_by_row = workspace.take<Word>(words_of<Split>(kQueries) * w.v_columns);
      t.product = workspace.take<float>(kQueries * w.k_columns);
    }
    t.dk = workspace.take<float>(kTilesPerTask * kKeys * w.k_columns);
    t.dv = workspace.take<float>(kTilesPerTask * kKeys * w.v_columns);
    return t;
  }
};

}  // namespace octet::cpu::OCTET_ISA
