// The CPU backend: picks the kernels of the best instruction set, lays out the work, runs it.
#include "core/backend.h"

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/names.h"
#include "cpu/isa.h"
#include "cpu/kernels/plan.h"
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

std::optional<std::string> backward_objection(const Problem& p) {
  const octet_precision x = p.precision;
  if (x == OCTET_PRECISION_INT8_F16 || x == OCTET_PRECISION_INT8_FP8 || x == OCTET_PRECISION_FP8_RAW)
    return text("precision ", octet::name(x),
                " has no backward pass; those that have: f64, f32, f16, bf16, int8, fp8, sagebwd");
  const bool sixteen = x == OCTET_PRECISION_F16 || x == OCTET_PRECISION_BF16;
  const bool exact_o = p.remedy == OCTET_REMEDY_F16_INSIDE || p.remedy == OCTET_REMEDY_EXACT_DELTA;
  if (sixteen && exact_o && p.o.dtype != OCTET_F32 && !p.o_residual.present())
    return text("remedy ", octet::name(p.remedy), " needs the un-rounded output, but o is ", octet::name(p.o.dtype),
                " and o_residual is NULL; pass o_residual (the forward pass writes it), or keep o in f32");
  return std::nullopt;
}

std::optional<std::string> jvp_objection(const Problem& p) {
  if (p.precision != OCTET_PRECISION_F32 && p.precision != OCTET_PRECISION_F16 && p.precision != OCTET_PRECISION_BF16)
    return text("precision ", octet::name(p.precision), " has no jvp here; those that have: f32, f16, bf16");
  for (const auto& [t, label] : {std::pair{&p.q, "q"}, {&p.k, "k"}, {&p.v, "v"}})
    if (t->quantization) return text(label, " came quantised; its jvp takes f32, f16, bf16 and e4m3 as they are");
  return std::nullopt;
}

std::optional<std::string> objection(const Problem& p) {
  if (p.precision == OCTET_PRECISION_F64) return text("precision f64 is the reference backend's");
  if (p.pass == OCTET_BACKWARD) return backward_objection(p);
  if (p.smooth_q) return text("smooth_q is not in its kernels; the reference backend has it");
  return p.pass == OCTET_JVP ? jvp_objection(p) : std::nullopt;
}

std::string kernel(const Problem& p) {
  return text(octet::name(p.pass), ' ', octet::name(p.precision), ", ", name(chosen()), ", ", block_rows(p), " x ",
              kKeys, " tiles, ", threads_of(p), " threads");
}

std::size_t workspace_size(const Problem& p) {
  switch (p.pass) {
    case OCTET_FORWARD:
      return kernels().forward_workspace(p, threads_of(p));
    case OCTET_BACKWARD:
      return kernels().backward_workspace(p, threads_of(p));
    default:
      return kernels().jvp_workspace(p, threads_of(p));
  }
}

void run(const Problem& p, Bytes workspace, void*) {
  const Work work(p, block_rows(p), threads_of(p), workspace.data);
  switch (p.pass) {
    case OCTET_FORWARD:
      return kernels().forward(work.job);
    case OCTET_BACKWARD:
      return kernels().backward(work.job);
    default:
      return kernels().jvp(work.job);
  }
}

}  // namespace

namespace {

// Under f16_inside P is f16, scaled so that the small ones keep their bits: gradients need an output whose weights and
// row sums agree with theirs. An output that is rounded to bf16 and not kept otherwise errs no less with bf16 weights,
// which tile instructions multiply.
ForwardPlan sixteen_bit_plan(const Problem& p) {
  const bool f16 = p.precision == OCTET_PRECISION_F16, beta = p.remedy == OCTET_REMEDY_BETA;
  const octet_dtype format = f16 ? OCTET_F16 : OCTET_BF16;
  ForwardPlan plan{.qk = format, .v = format, .p = f16 ? PFormat::f16 : PFormat::bf16, .l_from_p = !beta, .beta = beta};
  const bool keeps_exact_o = p.o_residual.present() || p.o.dtype == OCTET_F32;
  if (p.pass == OCTET_FORWARD && p.remedy == OCTET_REMEDY_F16_INSIDE && (f16 || keeps_exact_o))
    plan.p = PFormat::f16, plan.p_top = 0x1p15f;
  if (plan.p == PFormat::f16) plan.step_tiles = 2;
  // Half of the format's range, so that the other half is left to the other keys.
  plan.beta_reach = f16 ? 4.f : 40.f;
  return plan;
}

ForwardPlan forward_recipe(const Problem& p) {
  switch (p.precision) {
    case OCTET_PRECISION_F16:
    case OCTET_PRECISION_BF16:
      return sixteen_bit_plan(p);
    case OCTET_PRECISION_INT8:
      return {.qk = OCTET_I8,
              .q_group = 1,
              .k_group = 1,
              .smooth_k = true,
              .hadamard = p.hadamard,
              .v = OCTET_I8,
              .v_scale = VScale::token,
              .smooth_v = true,
              .p = PFormat::u8,
              .p_top = 255.f,
              .l_from_p = false};
    case OCTET_PRECISION_INT8_F16:
      return {.qk = OCTET_I8,
              .q_group = 1,
              .k_group = 1,
              .smooth_k = true,
              .hadamard = p.hadamard,
              .v = OCTET_F16,
              .v_scale = VScale::power,
              .p = PFormat::f16,
              .step_tiles = 2};
    case OCTET_PRECISION_INT8_FP8:
      return {.qk = OCTET_I8,
              .q_group = 1,
              .k_group = kThreadGroups,
              .smooth_k = true,
              .hadamard = p.hadamard,
              .v = OCTET_E4M3,
              .v_scale = VScale::channel,
              .p = PFormat::e4m3,
              .p_top = 448.f,
              .step_tiles = 2};
    case OCTET_PRECISION_FP8:
      return {.qk = OCTET_E4M3,
              .q_group = 1,
              .k_group = 1,
              .smooth_k = true,
              .v = OCTET_E4M3,
              .v_scale = VScale::channel,
              .p = PFormat::e4m3,
              .p_top = 448.f,
              .step_tiles = 2};
    case OCTET_PRECISION_FP8_RAW:
      return {.qk = OCTET_E4M3, .v = OCTET_E4M3, .p = PFormat::e4m3, .l_from_p = false, .step_tiles = 2};
    case OCTET_PRECISION_SAGEBWD:
      return {.qk = OCTET_I8,
              .q_group = 128,
              .k_group = 64,
              .smooth_k = true,
              .v = OCTET_I8,
              .v_scale = VScale::token,
              .v_group = 64,
              .p = PFormat::u8,
              .p_top = 127.f,
              .l_from_p = false};
    default:
      return {.qk = OCTET_F32, .v = OCTET_F32, .p = PFormat::exact};
  }
}

// Codes of `format` with a scale for each token, block or head and nothing else.
bool plain_codes(const View& t, octet_dtype format) {
  if (t.dtype != format || (format != OCTET_I8 && format != OCTET_E4M3)) return false;
  return !t.quantization ||
         (t.quantization->zero_point_kind == OCTET_SYMMETRIC && t.quantization->granularity != OCTET_PER_CHANNEL);
}

uint64_t rotation_of(const View& t) { return t.quantization ? t.quantization->hadamard_seed : 0; }

}  // namespace

// Operands that come in the recipe's own form are not smoothed, rotated or rounded again.
ForwardPlan forward_plan(const Problem& p) {
  ForwardPlan plan = forward_recipe(p);
  const bool q = plain_codes(p.q, plan.qk) && !(p.q.quantization && p.q.quantization->mean),
             k = plain_codes(p.k, plan.qk);
  const bool one_frame =
      q && k ? rotation_of(p.q) == rotation_of(p.k) : plan.qk == OCTET_E4M3 && !rotation_of(p.q) && !rotation_of(p.k);
  plan.q_coded = q && one_frame && plan.q_group;
  plan.k_coded = k && one_frame && plan.k_group;
  if (plan.k_coded) plan.smooth_k = p.k.quantization && p.k.quantization->mean;
  const bool v_mean = p.v.quantization && p.v.quantization->mean;
  plan.v_coded = plan.v_scale == VScale::token && plain_codes(p.v, plan.v) && !rotation_of(p.v);
  if (plan.v_coded) plan.smooth_v = v_mean;
  return plan;
}

namespace {

BackwardPlan sixteen_bits(octet_dtype format, octet_remedy remedy) {
  const Rounding cast{format};
  // Gradients may be too small for f16 as they are.
  const Rounding incoming = format == OCTET_F16 ? Rounding{OCTET_F16, 1} : cast;
  if (remedy == OCTET_REMEDY_F16_INSIDE)
    return {.q = cast,
            .k = cast,
            .smooth_k_dq = true,
            .v = cast,
            .do_dp = incoming,
            .do_dv = incoming,
            .format = GradientFormat::f16,
            .delta = Delta::from_exact_o};
  return {.q = cast,
          .k = cast,
          .v = cast,
          .do_dp = cast,
          .do_dv = cast,
          .format = format == OCTET_F16 ? GradientFormat::f16 : GradientFormat::bf16,
          .delta = remedy == OCTET_REMEDY_EXACT_DELTA ? Delta::from_exact_o : Delta::from_o,
          .project = remedy == OCTET_REMEDY_PROJECT ? format : OCTET_DTYPE_NONE};
}

BackwardPlan recipe(const Problem& p) {
  switch (p.precision) {
    case OCTET_PRECISION_F16:
      return sixteen_bits(OCTET_F16, p.remedy);
    case OCTET_PRECISION_BF16:
      return sixteen_bits(OCTET_BF16, p.remedy);
    case OCTET_PRECISION_INT8:
      return {.q = {OCTET_I8, 1},
              .k = {OCTET_I8, 1},
              .smooth_blocks = true,
              .hadamard = true,
              .do_dv = {OCTET_I8, 1},
              .format = GradientFormat::migrated,
              .delta = Delta::from_p};
    case OCTET_PRECISION_FP8:
      return {.q = {OCTET_E4M3, kWholeHead},
              .k = {OCTET_E4M3, kWholeHead},
              .smooth_k = true,
              .v = {OCTET_BF16},
              .do_dp = {OCTET_BF16},
              .do_dv = {OCTET_E4M3, kWholeHead},
              .format = GradientFormat::e4m3,
              .delta = Delta::from_p};
    case OCTET_PRECISION_SAGEBWD:
      return {.q = {OCTET_I8, 128},
              .k = {OCTET_I8, 64},
              .smooth_k = true,
              .v = {OCTET_F16, 1},
              .do_dp = {OCTET_F16, 1},
              .do_dv = {OCTET_I8, 64},
              .format = GradientFormat::int8};
    default:
      return {.delta = Delta::from_exact_o};
  }
}

}  // namespace

BackwardPlan backward_plan(const Problem& p) {
  BackwardPlan plan = recipe(p);
  // 8-bit codes are not coded again.
  const auto coded = [](const View& x, const Rounding& r) {
    return r.group && r.dtype == x.dtype && x.dtype != OCTET_F16;
  };
  if (coded(p.q, plan.q)) plan.q = {};
  if (coded(p.k, plan.k)) plan.k = {}, plan.smooth_k = false;
  return plan;
}

}  // namespace octet::cpu

namespace octet {

extern const Backend kCpu;
const Backend kCpu = {"cpu",
                      "tiled kernels for the CPU's vector and tile instructions",
                      OCTET_CPU,
                      true,
                      cpu::unavailable,
                      cpu::objection,
                      cpu::kernel,
                      cpu::workspace_size,
                      cpu::run};

}  // namespace octet
