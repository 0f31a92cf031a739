// The quantisers behind octet.h: judge the arguments, then hand them to the CPU. Each throws Failure.
#pragma once
#include <octet/octet.h>

namespace octet {

void quantize(const octet_tensor* x, const octet_rope* rope, octet_tensor* codes, octet_tensor* statistics, void* stream);
void dequantize(const octet_tensor* codes, octet_tensor* x, void* stream);
void apply_rope(const octet_rope* rope, const octet_tensor* x, uint32_t inverse, octet_tensor* y, void* stream);
int64_t scale_groups(uint32_t operand, uint32_t granularity, int64_t block, int64_t tokens);
void logit_error(const octet_tensor* q_statistics, const octet_tensor* k_statistics, float scale, octet_tensor* error, void* stream);

}  // namespace octet
