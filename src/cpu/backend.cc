// The CPU backend: picks the kernels of the best instruction set, lays out the work, runs it.
#include "core/backend.h"

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/names.h"
#include "core/recipe.h"
#include "cpu/attention/job.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace octet::cpu {

extern const Kernels kernels_portable;
#ifdef OCTET_X86
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx;
#endif

namespace {

const Kernels& kernels() {
#ifdef OCTET_X86
  static const Kernels* const tables[] = {&kernels_portable, &kernels_avx2, &kernels_avx512, &kernels_avx512_bf16,
                                          &kernels_amx};
#else
  static const Kernels* const tables[] = {&kernels_portable};
#endif
  return *tables[static_cast<int>(chosen())];
}

int64_t blocks_of(int64_t tokens, int64_t block) { return (tokens + block - 1) / block; }

// The work of a call in units; what Job points at.
struct Work {
  std::vector<Sequence> sequences;
  std::vector<Block> query_blocks, key_tiles;
  Job job;

  Work(const Problem& p, int64_t block_rows, unsigned threads, void* workspace) : sequences(octet::sequences(p)) {
    int64_t first_tile = 0;
    for (int64_t n = 0; n < static_cast<int64_t>(sequences.size()); ++n) {
      const Sequence& seq = sequences[n];
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t b = blocks_of(seq.q_tokens, block_rows); b-- > 0;)
          query_blocks.push_back({n, h, b * block_rows, first_tile});
      const int64_t tiles = blocks_of(seq.k_tokens, kKeys);
      for (int64_t t = 0; t < tiles; ++t)
        for (int64_t g = 0; g < p.kv_heads; ++g) key_tiles.push_back({n, g, t * kKeys, first_tile});
      first_tile += tiles;
    }
    const auto count = [](const auto& v) { return static_cast<int64_t>(v.size()); };
    job = {&p,
           sequences.data(),
           count(sequences),
           query_blocks.data(),
           count(query_blocks),
           key_tiles.data(),
           count(key_tiles),
           threads,
           workspace};
  }
};

// Queries per block of work.
int64_t block_rows(const Problem& p) { return p.pass == OCTET_FORWARD ? kernels().forward_block_rows(p) : kQueries; }

// At most one thread for each block of queries; known without reading cu_seqlens.
unsigned threads_of(const Problem& p) {
  return thread_count(p.threads, tiles_bound(p, p.tokens_q, block_rows(p)) * p.heads);
}

std::optional<std::string> unavailable() { return std::nullopt; }

std::optional<std::string> why_unsupported(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F64) return text("precision f64 is the reference backend's");
  if (auto reason = unsupported_reason(p)) return reason;
  if (p.pass != OCTET_BACKWARD)
    if (auto reason = smooth_q_unsupported_reason(p)) return reason;
  if (p.dropout && p.pass == OCTET_FORWARD && forward_numerics(p).smooth_v)
    return text("v came quantized with a mean, which it takes without dropout; the reference backend has it");
  if (p.pass == OCTET_JVP)
    for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
      if (t->quantization) return text(label, " came quantized; its jvp takes f32, f16, bf16 and e4m3 as they are");
  return std::nullopt;
}

std::string kernel(const Problem& p) {
  return text(octet::name(p.pass), ' ', octet::name(p.precision), ", ", name(chosen()), ", ", block_rows(p), " x ",
              kKeys, " tiles, ", threads_of(p), " threads");
}

template <auto workspace_of, auto pass>
Plan plan_of(const Problem& p, void* workspace) {
  const auto run = [&p, workspace](void*) {
    const Work work(p, block_rows(p), threads_of(p), workspace);
    (kernels().*pass)(work.job);
  };
  return {(kernels().*workspace_of)(p, threads_of(p)), [&p] { return kernel(p); }, run};
}

Answer plan(const Problem& p, void* workspace) {
  if (auto reason = why_unsupported(p)) return std::move(*reason);
  switch (p.pass) {
    case OCTET_FORWARD:
      return plan_of<&Kernels::forward_workspace, &Kernels::forward>(p, workspace);
    case OCTET_BACKWARD:
      return plan_of<&Kernels::backward_workspace, &Kernels::backward>(p, workspace);
    default:
      return plan_of<&Kernels::jvp_workspace, &Kernels::jvp>(p, workspace);
  }
}

}  // namespace
}  // namespace octet::cpu

namespace octet {

extern const Backend kCpu;
const Backend kCpu = {
    "cpu", "tiled kernels for the CPU's vector and tile instructions", OCTET_CPU, cpu::unavailable, cpu::plan, nullptr};

}  // namespace octet
