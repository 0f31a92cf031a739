// The recipe of a problem in the terms of the CPU's kernels. There is no vector code here.
#pragma once
#include "core/problem.h"

namespace octet::cpu {

// Format of P as the operand of P V.
enum class PFormat {
  exact,  // f32
  f16,    // of p * p_top
  bf16,
  e4m3,  // of p * p_top
  u8     // dynamic: of p_j t_j with the largest of a (row, key tile) at p_top; t_j: token scale of V
};

enum class VScale { none, token, channel, power_of_two };  // power_of_two: of each number, with f16

constexpr int64_t kThreadGroups = -1;  // instead of tokens per scale: those of core/quant/thread_groups.h

// A precision's forward recipe; docs/numerics.md.
struct ForwardNumerics {
  bool q_prequantized = false, k_prequantized = false, v_prequantized = false;  // the kernel takes them as they came
  bool qk_zero_points = false, v_zero_points = false;  // codes of which zero points are subtracted
  octet_dtype qk;                                      // q and k are rounded to it: f32, f16, bf16, e4m3, i8
  int64_t q_group = 0;                                 // tokens per scale of q and k; 0: no scale
  int64_t k_group = 0;                                 // or kThreadGroups
  bool smooth_k = false;
  bool hadamard = false;
  octet_dtype v;
  VScale v_scale = VScale::none;
  int64_t v_group = 1;  // tokens per scale with VScale::token
  bool smooth_v = false;
  PFormat p;
  float p_top = 1.f;
  bool l_from_p = true;    // the row sum adds the rounded P
  bool beta = false;       // shifted maximum
  float beta_limit = 0.f;  // at most this far above the true one
  int64_t step_tiles = 4;  // key tiles per step of the online softmax, which share a maximum
};

ForwardNumerics forward_numerics(const Problem& problem);

// The rows of an operand of the backward pass are rounded so: each number to a format, or quantized with a scale that
// `group` tokens share. f16 with a group: every number has a power of two of its own, which buys range alone.
struct Rounding {
  octet_dtype dtype = OCTET_F32;
  int64_t group = 0;  // 0: no scale

  bool operator==(const Rounding&) const = default;
};
constexpr int64_t kWholeHead = Problem::kUnbounded;  // a group: all tokens of a head

// The format that p and ds are rounded to before the products dv = p^T do, dq = ds k and dk = ds^T q.
enum class GradientFormat {
  exact,
  f16,   // each number; with smooth_k_dq, p times a power of two, ds with 11 bits and the range of a float
  bf16,  // each number
  e4m3,  // p times 256; ds: with a scale for each tile
  int8   // with a scale for each tile
};

// The source of delta = rowsum(do o).
enum class Delta {
  from_o,
  from_exact_o,  // o + o_residual
  from_p         // sum_j p_ij dp_ij with p from these logits' own row sums instead of the caller's lse
};

// A precision's backward recipe; docs/numerics.md.
struct BackwardNumerics {
  Rounding q{}, k{};
  bool smooth_k = false;      // all of k's uses are of k minus its mean
  bool smooth_k_dq = false;   // only dq = ds k is, with k minus its mean in f16; ds in f16 of any range
  bool smooth_tiles = false;  // the logits take k minus the mean of its tile rounded, and the product of that mean
  bool f16_q_dk = false;      // dk = ds^T q takes q in f16 of any range, and k of dq comes as the caller's
  bool hadamard = false;      // q and k of the logits are rotated; with f16_q_dk alone
  Rounding v{}, do_dp{};      // operands of dp = do v^T
  bool smooth_v = false;      // v minus its mean is rounded, and gets it back
  Rounding do_dv{};           // operand of dv = p^T do
  GradientFormat format = GradientFormat::exact;
  Delta delta = Delta::from_o;
  octet_dtype gproj = OCTET_DTYPE_NONE;  // GProj: the format of p and lambda q; none: off
};

BackwardNumerics backward_numerics(const Problem& problem);

}  // namespace octet::cpu
