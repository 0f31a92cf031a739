// The rounding study of octet: attention in float64 that rounds at chosen points, to see what each rounding costs.
// `octet study` is made of it; docs/numerics.md describes the points. No other call needs this header.
#ifndef OCTET_OCTET_STUDY_H
#define OCTET_OCTET_STUDY_H

#include <octet/octet.h>

#ifdef __cplusplus
extern "C" {
#endif

// The source of delta = rowsum(dO * O).
typedef enum octet_delta {
  OCTET_DELTA_FROM_O = 0,  // the saved output
  OCTET_DELTA_FROM_P = 1   // sum_j P_ij dP_ij: consistent with the P of the backward
} octet_delta;

// A format for each rounding point of attention (OCTET_F64: not rounded).
// Formats are those of octet_dtype: f64, f32, f16, bf16, e4m3, e5m2. Honoured by the reference
// backend at precision f64 only, rejected elsewhere.
typedef struct octet_rounding {
  uint32_t size;
  uint32_t qk;          // inputs q and k
  uint32_t v;           // input v
  uint32_t s;           // logits
  uint32_t s_scaled;    // 1: s is rounded after multiplication by the scale, 0: before
  uint32_t m;           // running maximum, in units of the rounded s
  uint32_t arg;         // (s - m) * scale
  uint32_t p;           // operand of P V
  uint32_t l_from_p;    // 1: the row sum adds the rounded P, 0: the un-rounded
  uint32_t alpha;       // rescaling factor between tiles
  uint32_t acc;         // accumulator of o, after each tile
  uint32_t o;           // output
  uint32_t o_saved;     // the output that delta reads
  uint32_t delta;       // octet_delta
  uint32_t ds;          // operand of dQ and dK
  uint32_t p_backward;  // operand of dV
  float beta;           // shifted maximum on ties; 0: off
  float tie_epsilon;    // scaled logits within this of the maximum count as ties
  uint32_t tile;        // keys per tile; 0: all keys in one tile
} octet_rounding;

#define OCTET_ROUNDING_INIT                                                                                    \
  {                                                                                                            \
    sizeof(octet_rounding), OCTET_F64, OCTET_F64, OCTET_F64, 0, OCTET_F64, OCTET_F64, OCTET_F64, 1, OCTET_F64, \
        OCTET_F64, OCTET_F64, OCTET_F64, OCTET_DELTA_FROM_O, OCTET_F64, OCTET_F64, 0.f, 0.f, 64                \
  }

#ifdef __cplusplus
}
#endif

#endif
