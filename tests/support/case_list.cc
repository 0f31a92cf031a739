// The list of cases: each row adds something the rows above have not.
#include "support/cases.h"

namespace octet::test {

const std::vector<Case>& cases() {
  constexpr auto top_left = Alignment::top_left, bottom_right = Alignment::bottom_right;
  static const std::vector<Case> list = {
      // Lengths
      {.name = "one_tile"},
      {.name = "one_by_one", .tokens_q = 1, .tokens_k = 1},
      {.name = "ragged", .batch = 2, .heads = 3, .kv_heads = 3, .tokens_q = 200, .tokens_k = 333, .layout = Layout::padded, .kv_layout = Layout::padded},
      {.name = "one_past_a_tile", .heads = 2, .kv_heads = 2, .tokens_q = 65, .tokens_k = 129, .dim = 128, .dim_v = 128, .dtype = DType::bf16},
      {.name = "long", .tokens_q = 1025, .tokens_k = 1100, .dtype = DType::bf16, .kv_layout = Layout::transposed},
      {.name = "long_causal", .heads = 2, .tokens_q = 1024, .tokens_k = 1024, .dim = 128, .dim_v = 128, .causal = true, .dtype = DType::f16},
      {.name = "decode", .batch = 2, .heads = 4, .kv_heads = 2, .tokens_q = 1, .tokens_k = 300, .dim = 128, .dim_v = 128, .causal = true, .alignment = bottom_right, .dtype = DType::bf16, .layout = Layout::bthd, .kv_layout = Layout::bthd},
      {.name = "one_key", .heads = 2, .kv_heads = 2, .tokens_q = 130, .tokens_k = 1},
      {.name = "no_queries", .tokens_q = 0, .tokens_k = 70},
      {.name = "no_keys", .tokens_q = 70, .tokens_k = 0},
      {.name = "no_batch", .batch = 0},
      // Heads
      {.name = "grouped_heads", .heads = 8, .kv_heads = 2, .tokens_q = 129, .tokens_k = 257, .causal = true, .alignment = bottom_right, .dtype = DType::f16},
      {.name = "one_kv_head", .batch = 2, .heads = 4, .kv_heads = 1, .tokens_q = 65, .tokens_k = 65, .dim = 96, .dim_v = 96, .causal = true, .dtype = DType::bf16, .out_dtype = DType::bf16, .layout = Layout::bthd, .kv_layout = Layout::bthd},
      // Head dims
      {.name = "dim_8", .tokens_q = 100, .tokens_k = 90, .dim = 8, .dim_v = 8},
      {.name = "dim_40", .heads = 2, .kv_heads = 2, .tokens_q = 77, .tokens_k = 140, .dim = 40, .dim_v = 40, .kv_layout = Layout::transposed},
      {.name = "dim_72", .tokens_q = 100, .tokens_k = 100, .dim = 72, .dim_v = 72, .causal = true, .dtype = DType::f16, .out_dtype = DType::f16},
      {.name = "dim_160", .tokens_q = 70, .tokens_k = 130, .dim = 160, .dim_v = 160, .dtype = DType::bf16},
      {.name = "dim_192_128", .heads = 2, .tokens_q = 90, .tokens_k = 90, .dim = 192, .dim_v = 128, .causal = true},
      {.name = "dim_256", .tokens_q = 66, .tokens_k = 100, .dim = 256, .dim_v = 256, .dtype = DType::bf16},
      {.name = "dim_64_256", .tokens_q = 66, .tokens_k = 100, .dim = 64, .dim_v = 256},
      {.name = "scale", .tokens_q = 100, .tokens_k = 100, .dim = 64, .dim_v = 40, .scale = .3f},
      // Positional masks
      {.name = "causal_top_left_wide", .tokens_q = 100, .tokens_k = 230, .causal = true, .alignment = top_left},
      {.name = "causal_top_left_tall", .tokens_q = 230, .tokens_k = 100, .causal = true, .alignment = top_left},
      {.name = "causal_bottom_right_wide", .tokens_q = 100, .tokens_k = 230, .causal = true, .alignment = bottom_right, .layout = Layout::padded},
      {.name = "causal_bottom_right_tall", .heads = 2, .tokens_q = 230, .tokens_k = 100, .causal = true, .alignment = bottom_right},
      {.name = "window_3_0", .heads = 2, .kv_heads = 2, .tokens_q = 200, .tokens_k = 200, .window = {{3, 0}}},
      {.name = "window_both_ways", .tokens_q = 150, .tokens_k = 260, .window = {{70, 5}}, .alignment = top_left, .dtype = DType::bf16},
      {.name = "window_right_only", .tokens_q = 140, .tokens_k = 200, .window = {{-1, 2}}, .alignment = bottom_right},
      {.name = "window_left_only", .tokens_q = 300, .tokens_k = 130, .window = {{10, -1}}, .alignment = top_left},
      {.name = "window_causal", .tokens_q = 300, .tokens_k = 300, .causal = true, .window = {{31, -1}}, .dtype = DType::f16},
      // Mask tensors
      {.name = "mask_keys", .batch = 2, .heads = 2, .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::keys},
      {.name = "mask_heads", .batch = 2, .heads = 2, .kv_heads = 2, .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::heads, .dtype = DType::bf16},
      {.name = "mask_blind", .batch = 2, .heads = 2, .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::blind},
      {.name = "bias_f32", .batch = 2, .heads = 2, .tokens_q = 90, .tokens_k = 90, .causal = true, .mask = MaskTensor::bias_f32},
      {.name = "bias_bf16", .batch = 2, .heads = 2, .tokens_q = 70, .tokens_k = 150, .mask = MaskTensor::bias_bf16, .dtype = DType::f16},
      // Packed sequences: the second has no queries, the third no keys
      {.name = "packed", .heads = 4, .kv_heads = 2, .tokens_q = 200, .tokens_k = 213, .cu_seqlens_q = {0, 70, 70, 133, 200}, .cu_seqlens_k = {0, 65, 80, 80, 213}, .dtype = DType::f16},
      {.name = "packed_causal", .heads = 2, .tokens_q = 200, .tokens_k = 213, .causal = true, .alignment = bottom_right, .cu_seqlens_q = {0, 70, 70, 133, 200}, .cu_seqlens_k = {0, 65, 80, 80, 213}, .layout = Layout::bthd, .kv_layout = Layout::bthd},
      // Narrow inputs
      {.name = "e4m3", .heads = 4, .kv_heads = 2, .tokens_q = 100, .tokens_k = 150, .causal = true, .alignment = bottom_right, .dtype = DType::e4m3},
      // Layouts
      {.name = "interleaved", .batch = 2, .heads = 3, .kv_heads = 3, .tokens_q = 80, .tokens_k = 80, .causal = true, .dtype = DType::bf16, .out_dtype = DType::bf16, .interleaved = true},
      {.name = "broadcast_kv", .batch = 3, .heads = 2, .tokens_q = 50, .tokens_k = 120, .dtype = DType::bf16, .kv_layout = Layout::broadcast},
      {.name = "transposed", .batch = 2, .heads = 2, .kv_heads = 2, .tokens_q = 90, .tokens_k = 70, .layout = Layout::transposed, .kv_layout = Layout::transposed},
  };
  return list;
}

}  // namespace octet::test
