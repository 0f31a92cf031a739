// octet: attention in 16 and 8 bits, to train with and to trust.
//
// This header is the whole interface of liboctet in C11; octet.hpp wraps it for C++.
//
// Rules that hold everywhere:
//  - Every struct is passed by pointer and starts with its own size; the *_INIT macros set it. New fields come at the
//    end. Programs compiled with an older octet.h, 0.1.0 or later, pass smaller structs: the missing fields count as
//    zero. Those of a newer one pass larger structs: they are rejected unless all bytes that this library does not know
//    are zero. Sizes are multiples of the struct's alignment, at most 4096.
//  - Tensors are views of the caller's memory. The library allocates nothing on a device, never prints, and never
//    synchronises a stream. A failed call has written and launched nothing; octet_message() tells what was found and
//    what is allowed.
//  - Nothing is ignored: an argument that a call cannot honour is rejected.
#ifndef OCTET_OCTET_H
#define OCTET_OCTET_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define OCTET_API
#else
#define OCTET_API __attribute__((visibility("default")))
#endif

#define OCTET_VERSION_MAJOR 0
#define OCTET_VERSION_MINOR 2
#define OCTET_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

typedef enum octet_status {
  OCTET_OK = 0,
  OCTET_INVALID_ARGUMENT = 1,  // the arguments contradict each other or themselves
  OCTET_UNSUPPORTED = 2,       // meaningful, but no backend on this machine does it
  OCTET_WORKSPACE_TOO_SMALL = 3,
  OCTET_FAILURE = 4  // the system failed us: no memory, no thread, a CUDA error
} octet_status;

// Returns what went wrong in this thread's last call that failed: one or more lines of text, valid until the next
// failing call of the same thread. Empty if none has failed.
OCTET_API const char* octet_message(void);

OCTET_API const char* octet_version(void);  // "0.2.0"

// ---------------------------------------------------------------------------------------------
// Tensors

// The type of a tensor's elements. Values are part of the ABI.
typedef enum octet_dtype {
  OCTET_DTYPE_NONE = 0,
  OCTET_F64 = 1,
  OCTET_F32 = 2,
  OCTET_F16 = 3,
  OCTET_BF16 = 4,
  OCTET_E4M3 = 5,  // float8_e4m3fn: largest 448, no infinity, saturating conversion
  OCTET_E5M2 = 6,  // float8_e5m2: largest finite 57344, saturating conversion
  OCTET_I8 = 7,
  OCTET_U8 = 8,
  OCTET_I4 = 9,  // a code in [-7, 7], one per byte
  OCTET_I32 = 10,
  OCTET_BOOL = 11  // one byte, 0 or 1
} octet_dtype;

typedef enum octet_device { OCTET_CPU = 0, OCTET_CUDA = 1 } octet_device;

struct octet_quantization;

// A view of four-dimensional data [batch, head, token, dim] owned by the caller. Strides count
// elements, so [batch, token, head, dim] or a transposed V differ only in `stride`. A stride of 0
// broadcasts (inputs only). An empty tensor may have null data.
typedef struct octet_tensor {
  uint32_t size;
  uint32_t dtype;  // octet_dtype
  void* data;
  int64_t shape[4];
  int64_t stride[4];
  uint32_t device;  // octet_device
  int32_t device_index;
  // How integer or fp8 codes stand for numbers (octet_quantize fills it in); NULL: as they are.
  const struct octet_quantization* quantization;
} octet_tensor;

#define OCTET_TENSOR_INIT \
  { sizeof(octet_tensor), OCTET_DTYPE_NONE, NULL, {0}, {0}, OCTET_CPU, 0, NULL }

// ---------------------------------------------------------------------------------------------
// Attention

// The recipe: operand formats, scales and rounding points. docs/numerics.md describes each.
typedef enum octet_precision {
  OCTET_PRECISION_NONE = 0,
  OCTET_PRECISION_F64 = 1,  // unfused float64: the oracle
  OCTET_PRECISION_F32 = 2,
  OCTET_PRECISION_F16 = 3,
  OCTET_PRECISION_BF16 = 4,
  OCTET_PRECISION_INT8 = 5,      // int8 q k, uint8 P, int8 V with its token scale folded into P
  OCTET_PRECISION_INT8_F16 = 6,  // int8 q k, f16 P V (SageAttention, arXiv 2410.02367)
  OCTET_PRECISION_INT8_FP8 = 7,  // int8 q k, e4m3 P V (SageAttention 2, arXiv 2411.10958)
  OCTET_PRECISION_FP8 = 8,       // e4m3 with a scale per token, smoothed K
  OCTET_PRECISION_FP8_RAW = 9,   // e4m3 as cast, un-scaled P
  OCTET_PRECISION_SAGEBWD = 10   // SageBwd (arXiv 2505.11594): int8 forward and backward per block
} octet_precision;

typedef enum octet_pass { OCTET_FORWARD = 0, OCTET_BACKWARD = 1, OCTET_JVP = 2 } octet_pass;

// Which keys a query sees. The diagonal of query i is key i (top-left) or key i + tokens_k - tokens_q (bottom-right).
typedef enum octet_mask {
  OCTET_MASK_NONE = 0,
  OCTET_MASK_CAUSAL = 1,  // nothing right of the diagonal
  OCTET_MASK_WINDOW = 2   // window_left keys left and window_right keys right of it, -1: all
} octet_mask;

typedef enum octet_alignment {
  OCTET_ALIGNMENT_NONE = 0,  // allowed where both lengths are equal or no diagonal is needed
  OCTET_ALIGNMENT_TOP_LEFT = 1,
  OCTET_ALIGNMENT_BOTTOM_RIGHT = 2
} octet_alignment;

// How 16-bit training keeps the rounding bias out of its gradients (docs/numerics.md).
typedef enum octet_bias_correction {
  OCTET_BIAS_CORRECTION_F16 = 0,          // f16 operands, smoothed K, delta from the un-rounded o
  OCTET_BIAS_CORRECTION_NONE = 1,         // as FlashAttention does it, for comparison
  OCTET_BIAS_CORRECTION_BETA = 2,         // shifted maximum of arXiv 2510.04212, clamped
  OCTET_BIAS_CORRECTION_EXACT_DELTA = 3,  // delta from the un-rounded o
  OCTET_BIAS_CORRECTION_GPROJ = 4         // GProj, arXiv 2609.34272
} octet_bias_correction;

typedef enum octet_switch { OCTET_AUTO = 0, OCTET_ON = 1, OCTET_OFF = 2 } octet_switch;

struct octet_rounding;  // octet_study.h

typedef struct octet_attention {
  uint32_t size;
  uint32_t precision;        // octet_precision
  float scale;               // logits are scale * q.k; 0: 1 / sqrt(dim)
  uint32_t mask;             // octet_mask flags
  uint32_t alignment;        // octet_alignment
  uint32_t bias_correction;  // octet_bias_correction; precisions f16 and bf16; beta and f16 shape the forward pass too
  int64_t window_left;       // with OCTET_MASK_WINDOW, else 0
  int64_t window_right;
  float softcap;                          // logits become softcap * tanh(logit / softcap); 0: none
  float beta;                             // with OCTET_BIAS_CORRECTION_BETA: 2 to 8, 0: 3
  uint32_t hadamard;                      // octet_switch: random-sign Hadamard of q and k before int8
  uint32_t smooth_q;                      // octet_switch: subtract the mean of each 128 queries before int8
  uint32_t deterministic;                 // 1: bitwise repeatable (the CPU always is)
  uint32_t threads;                       // CPU threads; 0: all
  const char* backend;                    // name of a backend, NULL: the best that can
  const struct octet_rounding* rounding;  // NULL: the precision's own; octet_study.h describes others
  double dropout_p;                       // the probability that an element of P is dropped; 0: none
  const char* tile;  // name of a kernel's tile, of octet_tiles; NULL: the tuned one, or the default
} octet_attention;

#define OCTET_ATTENTION_INIT                                                                         \
  {                                                                                                  \
    sizeof(octet_attention), OCTET_PRECISION_NONE, 0.f, OCTET_MASK_NONE, OCTET_ALIGNMENT_NONE,       \
        OCTET_BIAS_CORRECTION_F16, 0, 0, 0.f, 0.f, OCTET_AUTO, OCTET_AUTO, 0, 0, NULL, NULL, 0, NULL \
  }

// The tensors of one call; those that the pass has no use for stay NULL.
//
// Shapes (b batch, h heads of q, g heads of k and v with h a multiple of g, n queries, m keys):
// q [b h n d], k [b g m d], v [b g m e], o [b h n e], lse [b h n 1]; a gradient or tangent has the shape of
// its primal. Head dims d and e: multiples of 8 up to 512.
//
// Sinks [1 h 1 1] or [b h 1 1] (f32; at precision f64 also f64) are one more logit of every query of a head, whose
// value is 0: they enter the sum of exponentials, and so lse, and nothing else. A sink of -inf is none; one of +inf or
// NaN makes lse of its head NaN, and with it o, gradients and tangents. dsinks is summed over the queries, and over the
// batch if it shares its sinks, in a fixed order, and written where there are no queries, too. The gradient of lse,
// where a loss reads it, is dlse; one that is NULL is 0.
//
// Softcap and ALiBi: with s = scale q.k, query i of n and key j of m have the logit
// softcap * tanh(s / softcap) - slope * |i + (m - n) - j| + mask, where slope is the head's alibi_slopes, [1 h 1 1] or
// [b h 1 1] (f32; at precision f64 also f64). The distance is that of FlashAttention-2: the last query is at the last
// key, whatever the alignment of a causal mask or window, and n and m are the lengths of the sequence where sequences
// are packed. Packed sequences may have slopes of their own, [s h 1 1]. Slopes have any sign and no gradient; one that
// is inf or NaN makes o and lse of its head NaN, as does with a softcap an s that is inf or NaN. Sinks are neither
// capped nor at a distance.
//
// o_residual [b h n e] keeps of an o in f16, bf16 or e4m3 what its rounding lost. In i8, -127 to 127, it holds the
// eight bits that follow those of o: with numbers of f32 read as integers, un-rounded o = o + o_residual * 2^(15 - d),
// where d is 7 for bf16, 10 for f16, 3 for e4m3. In o's own type it holds the un-rounded o minus o, which takes more
// memory and time. At precision int8 it also asks a GPU for the forward pass whose o and lse the backward pass there
// reads, which needs all three, of the same q, k and v; CPUs have one forward pass, and their backward pass reads none.
//
// Dropout: of P, normalised, each element is dropped with probability dropout_p, which is rounded to a multiple of
// 2^-23: o = sum over kept keys of P v / (1 - dropout_p). lse, sinks and their derivatives are those of the call
// without dropout, but for gradients and tangents that pass through o. Which elements are dropped is a function of the
// sequence, the head, the query and the key of an element, and of dropout_seed: a uint64 seed and a uint64 offset, read
// as four i32, low words first. Of [1 1 1 4] sequence n (a batch element, or one of the packed) takes offset + n, so
// that a call uses up as many offsets as it has sequences; [b 1 1 4], packed [s 1 1 4], are seeds and offsets of their
// own. A backward pass and a jvp take the seed of the forward pass. docs/numerics.md has the function.
//
// dmask is the gradient of a mask that is added to the logits: its shape, f32 (at precision f64 also f64). Of element
// (b, h, i, j) it is the derivative by that logit, ds = P (dP - delta + dlse), summed over the dimensions that the mask
// broadcasts, in a fixed order. All elements are written: 0 where the mask is -inf and where no query sees the key.
//
// Packed sequences: b = 1, and cu_seqlens_q, cu_seqlens_k (i32, shape [1 1 1 s+1], contiguous) hold the first token of
// each of s sequences and the total at the end. On the CPU, octet_run rejects offsets that do not start at 0, fall, or
// do not end at the number of tokens, and lengths above max_seqlen. On a GPU, where reading them on the host would wait
// for the stream, such offsets make the kernels read and write outside of the tensors.
//
// KV caches, of forward passes: seqused_k (i32, [1 1 1 s], contiguous) says how many keys each of s sequences has, a
// batch element or one that cu_seqlens_q packs. It is read when the pass runs, on the device of the tensors. The
// diagonal of a mask that is aligned bottom-right, and of ALiBi, ends at the last of these keys; k and v behind them
// are not read. With block_table (i32, [s 1 1 c], the last stride 1) k and v lie in pages, [pages g t d] and [pages g t
// e]: key j of sequence n is token j % t of page block_table[n, j / t]. t is a power of two from 16 on or, where c is
// 1, any number. Sequences may share pages, in any order, and entries behind the last key are not read. Sequences that
// cu_seqlens_q packs need a block_table, and have no cu_seqlens_k. max_seqlen_k, a bound on the lengths, or 0, saves
// workspace on a GPU. On the CPU octet_run rejects lengths and entries that are outside of k and v; on a GPU it cannot,
// and with such entries the kernels read outside of the tensors. There are no mask tensor, dropout and o_residual with
// seqused_k. Quantized pages have scales per token, [pages g t 1], and no mean.
typedef struct octet_arguments {
  uint32_t size;
  uint32_t pass;                     // octet_pass
  const octet_tensor *q, *k, *v;     // in
  const octet_tensor* mask;          // in, optional: bool (1: seen) or f32/f16/bf16 (at precision f64 also
                                     //   f64) added to the logits, [b h n m], a dimension of 1 broadcasts
  const octet_tensor* sinks;         // in, optional
  const octet_tensor* cu_seqlens_q;  // in, optional, both or none
  const octet_tensor* cu_seqlens_k;
  int64_t max_seqlen_q;  // with cu_seqlens, that of keys also with seqused_k: bounds on the lengths; else 0
  int64_t max_seqlen_k;
  octet_tensor* o;             // forward, jvp: out; backward: in
  octet_tensor* o_residual;    // what rounding took from o, see above; forward: out, optional; backward: in, optional
  octet_tensor* lse;           // forward, jvp: out, optional; backward: in. f32, natural log
  const octet_tensor* do_;     // backward: in
  octet_tensor *dq, *dk, *dv;  // backward: out
  const octet_tensor *tq, *tk, *tv;  // jvp: in, optional: tangents; NULL: 0, whose products are left out
  octet_tensor* to;                  // jvp: out
  const octet_tensor* dlse;          // backward: in, optional: the gradient of lse, of its shape and types
  octet_tensor* dsinks;              // backward: out, optional, with sinks; of their shape and types
  const octet_tensor* tsinks;        // jvp: in, optional, with sinks; NULL: 0
  octet_tensor* tlse;                // jvp: out, optional: the tangent of lse, of its shape and types
  const octet_tensor* alibi_slopes;  // in, optional
  const octet_tensor* dropout_seed;  // in, with dropout_p: i32, the last stride 1
  octet_tensor* dmask;               // backward: out, optional, with a mask of numbers; of its shape, see above
  const octet_tensor* seqused_k;     // forward: in, optional
  const octet_tensor* block_table;   // forward: in, optional, with seqused_k
} octet_arguments;

#define OCTET_ARGUMENTS_INIT                                                                                        \
  {                                                                                                                 \
    sizeof(octet_arguments), OCTET_FORWARD, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL              \
  }

// Bytes of scratch memory that octet_run needs, on the device of the tensors. Data pointers are not read.
OCTET_API octet_status octet_workspace_size(const octet_attention* attention, const octet_arguments* arguments,
                                            size_t* bytes);

// Runs one pass. `workspace` is aligned to 64 bytes, its content is of no value before or after. `stream` is a
// cudaStream_t for CUDA tensors and NULL for CPU tensors; both are of the device's primary context, as CUDA's runtime
// has it. A row that sees no key gives o = 0, lse = -inf (with a sink: the sink) and zero gradients of q, k and v.
OCTET_API octet_status octet_run(const octet_attention* attention, const octet_arguments* arguments, void* workspace,
                                 size_t bytes, void* stream);

// Which backend and kernel would run, and why each better one would not: a line each. This and the two that follow
// write at most `capacity` bytes with the terminating zero; *length receives the full length without it.
OCTET_API octet_status octet_explain(const octet_attention* attention, const octet_arguments* arguments, char* text,
                                     size_t capacity, size_t* length);

// The kernels that can run a call, by the names of their tiles (docs/tuning.md), as JSON: {cell, call, card, default:
// {backend, tile}, default_is: "measured" or "predicted", tiles: [{backend, tile}, ...]}; default null where none runs.
OCTET_API octet_status octet_tiles(const octet_attention* attention, const octet_arguments* arguments, char* text,
                                   size_t capacity, size_t* length);

// The machine and the build as JSON: {version, compiler, cuda, cpu: {}, gpus: [], tuning: {}, backends: []}.
OCTET_API octet_status octet_info(char* text, size_t capacity, size_t* length);

// ---------------------------------------------------------------------------------------------
// Quantization

typedef enum octet_granularity {
  OCTET_PER_TENSOR = 0,  // a scale per (batch, head)
  OCTET_PER_TOKEN = 1,
  OCTET_PER_CHANNEL = 2,  // rejected for q and k: dim is the index of summation of q k^T
  OCTET_PER_BLOCK = 3,    // `block` consecutive tokens
  OCTET_PER_THREAD = 4    // the rows of one thread's mma fragments (SageAttention 2, section 3.2)
} octet_granularity;

// Which operand of attention a tensor is; granularities and thread groups depend on it.
typedef enum octet_operand { OCTET_OPERAND_Q = 0, OCTET_OPERAND_K = 1, OCTET_OPERAND_V = 2 } octet_operand;

typedef enum octet_zero_point {
  OCTET_SYMMETRIC = 0,           // x = scale * code
  OCTET_ZERO_POINT_INTEGER = 1,  // x = scale * (code - zero_point), zero_point an integer
  OCTET_ZERO_POINT_FLOAT = 2     // x = scale * code + zero_point
} octet_zero_point;

// How codes stand for numbers: (b, h, token, c) has scale[b, h, group(token), 0], or scale[b, h, 0, c] per channel.
typedef struct octet_quantization {
  uint32_t size;
  uint32_t operand;          // octet_operand
  uint32_t granularity;      // octet_granularity
  uint32_t zero_point_kind;  // octet_zero_point
  int64_t block;             // tokens per group with OCTET_PER_BLOCK, else 0
  uint64_t hadamard_seed;    // random signs of the Hadamard rotation of each row; 0: no rotation
  octet_tensor* scale;       // f32 [batch, head, groups, 1] or [batch, head, 1, dim]
  octet_tensor* zero_point;  // f32, shape of scale; NULL when symmetric
  octet_tensor* mean;        // f32 [batch, head, 1, dim], subtracted before rotation and scaling; NULL: none
} octet_quantization;

#define OCTET_QUANTIZATION_INIT \
  { sizeof(octet_quantization), OCTET_OPERAND_Q, OCTET_PER_TOKEN, OCTET_SYMMETRIC, 0, 0, NULL, NULL, NULL }

typedef enum octet_rope_style {
  OCTET_ROPE_NONE = 0,
  OCTET_ROPE_HALF = 1,        // pairs (c, c + dim/2), GPT-NeoX
  OCTET_ROPE_INTERLEAVED = 2  // pairs (2c, 2c + 1), GPT-J
} octet_rope_style;
typedef enum octet_norm { OCTET_NORM_NONE = 0, OCTET_NORM_RMS = 1 } octet_norm;

// Rotary position embedding of the first `dim` channels, position = token + offset. Before it comes a norm of all
// channels of a row, x / sqrt(mean of x^2 + norm_eps) * norm_weight; either may be alone. Both are computed in float,
// and in double where octet_apply_rope turns f64. A model that stores weights less 1 adds the 1 first.
typedef struct octet_rope {
  uint32_t size;
  uint32_t style;                   // octet_rope_style
  int64_t dim;                      // channels rotated, even; 0: all
  int64_t offset;                   // position of token 0
  double base;                      // 0: 10000
  uint32_t norm;                    // octet_norm
  float norm_eps;                   // finite, 0 or more; without a norm 0
  const octet_tensor* norm_weight;  // f32, f16, bf16 [1 h 1 d] or [1 1 1 d]; NULL: 1
} octet_rope;

#define OCTET_ROPE_INIT \
  { sizeof(octet_rope), OCTET_ROPE_NONE, 0, 0, 0.0, OCTET_NORM_NONE, 0.f, NULL }

// Per (batch, head) statistics of a quantization, for octet_logit_error and for choosing a recipe.
enum {
  OCTET_STATISTIC_STEP = 0,     // rms over tokens of the rounding error of one code: scale / sqrt(12), fp8: measured
  OCTET_STATISTIC_NORM = 1,     // rms over tokens of the euclidean norm of the (smoothed) row
  OCTET_STATISTIC_BIAS = 2,     // norm of the channel means / rms of x minus its mean
  OCTET_STATISTIC_OUTLIER = 3,  // largest channel amax / median channel amax, after smoothing, before rotation
  OCTET_STATISTICS = 4
};

// codes = round(rotate(rope(norm(x)) - mean) / scale); norm, RoPE, then mean, then Hadamard, then amax. Fills codes,
// its quantization's scale, zero_point and mean, and statistics: f32 [batch, head, 1, OCTET_STATISTICS] or NULL. mean
// non-NULL asks for smoothing. codes->dtype chooses the format: I8, U8 (needs a zero point unless x >= 0), I4, E4M3,
// E5M2. A group that holds inf or NaN gets scale NaN and codes 0: it comes back as NaN.
OCTET_API octet_status octet_quantize(const octet_tensor* x, const octet_rope* rope, octet_tensor* codes,
                                      octet_tensor* statistics, void* stream);

// x = scale * codes, rotated back, plus mean (RoPE and norm are not undone). x: f32, f16, bf16 or f64.
OCTET_API octet_status octet_dequantize(const octet_tensor* codes, octet_tensor* x, void* stream);

// Normalises and rotates x into y by `rope`; inverse: by the opposite angle (its gradient), without a norm. x may be y.
OCTET_API octet_status octet_apply_rope(const octet_rope* rope, const octet_tensor* x, uint32_t inverse,
                                        octet_tensor* y, void* stream);

// New keys and values of b sequences, and the KV cache that they are appended to (octet_arguments has how one is read).
// Token i of sequence n becomes its key seqused_k[n] + i: it is written to token seqused_k[n] + i of batch element n,
// or to the page that block_table has for it. The caller adds the new tokens to the lengths. With cu_seqlens k, v and q
// have one batch element, whose token cu_seqlens[n] + i is token i of sequence n. With a rope, k is turned first, by
// position = seqused_k[n] + i + offset, and so is q into q_turned, which may be q. The angles are those of the rope's
// base or, with a base of 0, rope_cos and rope_sin have their cosines and sines, a column for each pair of channels;
// dim is 0 then, or twice the pairs. k and v are turned in float and rounded to the cache's type. A cache of i8 or e4m3
// with a symmetric quantization per token, whose scales lie as the tokens do, gets what octet_quantize gives for rows.
//
// The CPU rejects lengths and entries outside of the cache, positions without a row of rope_cos, and a cu_seqlens that
// does not ascend from 0 to n. On a GPU tokens without room or a sequence are left out, and with other entries the
// kernel writes outside of the cache. Where two sequences share the page that both append to, either may be kept.
typedef struct octet_append_arguments {
  uint32_t size;
  const octet_tensor *k, *v;        // in: [b g n d] and [b g n e], f32, f16 or bf16
  octet_tensor *k_cache, *v_cache;  // in and out: [b g m d] and [b g m e], or pages [pages g t d] and [pages g t e]
  const octet_tensor* seqused_k;    // in: i32 [1 1 1 b], the keys of each sequence before the call
  const octet_tensor* block_table;  // in, optional: i32 [b 1 1 c]
  const octet_rope* rope;           // in, optional, without a norm
  const octet_tensor *rope_cos, *rope_sin;  // in, optional, with rope: [1 1 positions pairs], f32, f16, bf16
  const octet_tensor* q;                    // in, optional, with rope: [b h n d]
  octet_tensor* q_turned;                   // out, with q: of its shape, f32, f16 or bf16
  const octet_tensor* cu_seqlens;           // in, optional: i32 [1 1 1 b + 1]; k, v and q have batch 1 then
} octet_append_arguments;

#define OCTET_APPEND_ARGUMENTS_INIT \
  { sizeof(octet_append_arguments), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL }

OCTET_API octet_status octet_append(const octet_append_arguments* arguments, void* stream);

// Number of groups (scale rows) of a granularity for an operand of `tokens` tokens.
OCTET_API octet_status octet_scale_groups(uint32_t operand, uint32_t granularity, int64_t block, int64_t tokens,
                                          int64_t* groups);

// Predicted rms absolute error of the logits scale * q.k from the statistics of both quantizations:
// error [batch, head of q, 1, 1], f32. Above .03, int8 logits are visible in the output (docs/numerics.md).
OCTET_API octet_status octet_logit_error(const octet_tensor* q_statistics, const octet_tensor* k_statistics,
                                         float scale, octet_tensor* error, void* stream);

#ifdef __cplusplus
}
#endif

#endif
