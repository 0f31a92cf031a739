// A job tells the kernels of any instruction set what to do: it holds a problem, the work cut into blocks, and where in
// the workspace everything lies. There is no vector code here.
#pragma once
#include <algorithm>

#include "cpu/attention/numerics.h"

namespace octet::cpu {

constexpr int64_t kKeys = 64;           // keys per tile
constexpr int64_t kMaxStepKeys = 256;   // keys per step of the forward pass, at most
constexpr int64_t kQueries = 64;        // queries per block of the backward pass and the jvp
constexpr int64_t kMaxBlockRows = 192;  // queries per block of any pass, at most

// A block of queries or a tile of keys of one head, which one task works on.
struct Block {
  int64_t sequence;    // index into Job::sequences
  int64_t head;        // of q for queries, of k and v for keys
  int64_t token;       // first token, within the sequence
  int64_t first_tile;  // of the sequence, counting the key tiles of all sequences before it
};

// Work shared by all kernels: the problem, its sequences and blocks, the caller's scratch memory.
struct Job {
  const Problem* problem;
  const Sequence* sequences;
  int64_t sequence_count;
  const Block* query_blocks;  // longest rows first
  int64_t query_block_count;
  const Block* key_tiles;
  int64_t key_tile_count;
  unsigned threads;
  void* workspace;
};

// The first of the tiles of a sequence that has some, counting those of all sequences before it.
inline int64_t first_tile_of(const Job& job, int64_t sequence) {
  return std::partition_point(job.key_tiles, job.key_tiles + job.key_tile_count,
                              [&](const Block& block) { return block.sequence < sequence; })
      ->first_tile;
}

// Hands out 64-byte aligned pieces of the workspace; with null memory it only adds up sizes.
class WorkspaceAllocator {
 public:
  explicit WorkspaceAllocator(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    char* piece = memory_ ? memory_ + used_ : nullptr;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return used_; }

 private:
  char* memory_;
  std::size_t used_ = 0;
};

// Upper bound on tiles of queries or of keys that do not lie in a cache, of all sequences together, without reading
// cu_seqlens.
inline int64_t tiles_bound(const Problem& p, int64_t tokens, int64_t tile) {
  return p.packed() ? tokens / tile + (p.cu_seqlens_q.shape[3] - 1) : p.batch * ((tokens + tile - 1) / tile);
}

// The same of the key tiles.
inline int64_t key_tiles_bound(const Problem& p) {
  return p.cached() ? p.sequence_count() * ((p.tokens_k + kKeys - 1) / kKeys) : tiles_bound(p, p.tokens_k, kKeys);
}

// The kernels of one instruction set.
struct Kernels {
  int64_t (*forward_block_rows)(const Problem&);
  std::size_t (*forward_workspace)(const Problem&, unsigned threads);
  void (*forward)(const Job&);
  std::size_t (*backward_workspace)(const Problem&, unsigned threads);
  void (*backward)(const Job&);
  std::size_t (*jvp_workspace)(const Problem&, unsigned threads);
  void (*jvp)(const Job&);
};

}  // namespace octet::cpu
