// The gradient of a mask tensor: ds of each logit, before it is rounded and before the derivative of a softcap, summed
// over the dimensions that the mask broadcasts. Every sum has one order, whatever the number of threads:
//
//   mask of one key      the sums of the rows of ds, [b h n], which grow in the turns of dq; at the end their sums
//   mask of one query    the sums of the columns of ds, [b h m], each of which one task adds up; at the end their sums
//   any other            dmask itself. Tiles of ds that batch elements or heads share take turns, in ascending order
//
// so that no call takes memory for [b h n m] that its mask does not have.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/attention/bwd/turn.h"
#include "cpu/attention/job.h"
#include "cpu/parallel.h"

namespace octet::cpu::OCTET_ISA {

inline bool has_one_key(const View& dmask) { return dmask.present() && dmask.shape[3] == 1; }
inline bool has_one_query(const View& dmask) { return dmask.present() && dmask.shape[3] != 1 && dmask.shape[2] == 1; }
inline bool has_tiles(const View& dmask) { return dmask.present() && dmask.shape[3] != 1 && dmask.shape[2] != 1; }

// The place of an index in a dimension that may be broadcast.
inline int64_t place_in(const View& dmask, int dimension, int64_t i) { return dmask.shape[dimension] == 1 ? 0 : i; }

struct MaskGradient {
  float* sums;    // of one key: [row]; of one query: [batch][head][key]
  int32_t* turn;  // of any other: [batch of dmask][head of dmask][block of queries][tile of keys]
  int64_t sum_count, turn_count;

  static MaskGradient allocate(const Problem& p, WorkspaceAllocator& workspace) {
    MaskGradient d{};
    if (has_one_key(p.dmask)) d.sum_count = p.batch * p.heads * p.tokens_q;
    if (has_one_query(p.dmask)) d.sum_count = p.batch * p.heads * p.tokens_k;
    if (has_tiles(p.dmask))
      d.turn_count = p.dmask.shape[0] * p.dmask.shape[1] * blocks(p.tokens_q, kQueries) * blocks(p.tokens_k, kKeys);
    d.sums = workspace.take<float>(d.sum_count);
    d.turn = workspace.take<int32_t>(d.turn_count);
    return d;
  }

  static int64_t blocks(int64_t tokens, int64_t block) { return (tokens + block - 1) / block; }

  // Clears what the tasks add to.
  void clear(const Job& job) const {
    const View& dmask = job.problem->dmask;
    if (sums) std::memset(sums, 0, sizeof(float) * sum_count);
    if (turn) std::memset(turn, 0, sizeof(int32_t) * turn_count);
    if (!has_tiles(dmask)) return;
    parallel_for(job.threads, dmask.shape[0] * dmask.shape[1], [&](int64_t task, unsigned) {
      for (int64_t i = 0; i < dmask.shape[2]; ++i)
        for (int64_t j = 0; j < dmask.shape[3]; ++j)
          *dmask.at<float>(task / dmask.shape[1], task % dmask.shape[1], i, j) = 0.f;
    });
  }

  // Adds the rows of a tile of ds [rows][kKeys]; the caller has the turn of dq.
  void add_rows(const Problem& p, int64_t first, int64_t rows, const float* ds) const {
    if (!has_one_key(p.dmask)) return;
    for (int64_t i = 0; i < rows; ++i) {
      Vf sum{};
      for (int64_t j = 0; j < kKeys; j += kLanes) sum += load(ds + i * kKeys + j);
      sums[first + i] += reduce_add(sum);
    }
  }

  // Adds a tile of ds to its columns or to dmask.
  void add_tile(const Problem& p, const Sequence& seq, int64_t h, int64_t token, int64_t rows, int64_t tile,
                const float* ds) const {
    const View& dmask = p.dmask;
    const int64_t b = seq.batch, key = tile * kKeys, keys = std::min(p.tokens_k - key, kKeys);
    if (has_one_query(dmask))
      for (int64_t i = 0; i < rows; ++i) add(ds + i * kKeys, keys, sums + (b * p.heads + h) * p.tokens_k + key, 1);
    if (!has_tiles(dmask)) return;
    const int64_t to_b = place_in(dmask, 0, b), to_h = place_in(dmask, 1, h);
    int32_t* const own_turn =
        turn +
        ((to_b * dmask.shape[1] + to_h) * blocks(p.tokens_q, kQueries) + token / kQueries) * blocks(p.tokens_k, kKeys) +
        tile;
    // All batch elements and heads see the same tiles.
    const int64_t heads = dmask.shape[1] == 1 ? p.heads : 1;
    const auto number = static_cast<int32_t>((b - to_b) * heads + (h - to_h));
    wait_for_turn(own_turn, number);
    for (int64_t i = 0; i < rows; ++i)
      add(ds + i * kKeys, keys, dmask.at<float>(to_b, to_h, token + i, key), dmask.stride[3]);
    end_turn(own_turn, number);
  }

  static void add(const float* ds, int64_t keys, float* out, int64_t stride) {
    if (stride == 1)
      for (int64_t j = 0; j < keys; ++j) out[j] += ds[j];
    else
      for (int64_t j = 0; j < keys; ++j) out[j * stride] += ds[j];
  }

  // Sums rows or columns over the other dimensions that the mask broadcasts, in double.
  void store(const Job& job) const {
    const Problem& p = *job.problem;
    const View& dmask = p.dmask;
    if (!dmask.present() || has_tiles(dmask)) return;
    const int64_t count = has_one_key(dmask) ? p.tokens_q : p.tokens_k;
    const int dimension = has_one_key(dmask) ? 2 : 3;
    parallel_for(job.threads, dmask.shape[0] * dmask.shape[1], [&](int64_t task, unsigned) {
      const int64_t to_b = task / dmask.shape[1], to_h = task % dmask.shape[1];
      const int64_t last_b = dmask.shape[0] == 1 ? job.sequence_count : std::min(to_b + 1, job.sequence_count),
                    last_h = dmask.shape[1] == 1 ? p.heads : to_h + 1;
      for (int64_t to = 0; to < dmask.shape[dimension]; ++to) {
        const int64_t last = dmask.shape[dimension] == 1 ? count : to + 1;
        double sum = 0;
        for (int64_t b = to_b; b < last_b; ++b)
          for (int64_t h = to_h; h < last_h; ++h)
            for (int64_t t = to; t < last; ++t) sum += sums[(b * p.heads + h) * count + t];
        dmask.at<float>(to_b, to_h, 0)[to * dmask.stride[dimension]] = static_cast<float>(sum);
      }
    });
  }
};

}  // namespace octet::cpu::OCTET_ISA
