#include "core/append.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/arguments.h"
#include "core/error.h"
#include "core/names.h"
#include "core/structs.h"
#include "core/validate_parts.h"

namespace octet {
namespace {

// A tensor of numbers beside k.
View numbers(const octet_tensor* t, const char* label, const octet_tensor& k, bool output) {
  const View view = plain(t, label, output);
  expect_dtype(view, label, {OCTET_F32, OCTET_F16, OCTET_BF16});
  expect_beside(*t, label, k, "k is");
  return view;
}

// A cache of numbers, or of codes with their scales.
void validate_part(const octet_tensor* from, const char* label, octet_tensor* cache, const char* cache_label,
                   octet_operand operand, const octet_tensor& k, Append::Part& part) {
  part.from = numbers(from, label, k, false);
  part.to = view_of(cache, cache_label, true);
  expect_beside(*cache, cache_label, k, "k is");
  if (!part.to.quantization) return expect_dtype(part.to, cache_label, {OCTET_F32, OCTET_F16, OCTET_BF16, OCTET_E4M3});
  expect_dtype(part.to, cache_label, {OCTET_I8, OCTET_E4M3});
  const Quantization how = validate_quantization(*cache, cache_label, true);
  if (how.operand != operand)
    invalid(cache_label, ": quantized as operand ", name(how.operand), ", expected ", name(operand));
  if (how.granularity != OCTET_PER_TOKEN || how.zero_point_kind != OCTET_SYMMETRIC || how.mean.present() ||
      how.hadamard_seed)
    invalid(cache_label, ": a quantization per ", name(how.granularity), ", ", name(how.zero_point_kind),
            how.mean.present() ? ", with a mean" : "", how.hadamard_seed ? ", rotated" : "",
            "; allowed: per token, symmetric, without a mean and a rotation");
  part.scale = how.scale;
}

// The shape of a cache for [b, heads, n, dim]; `elements`: its batch elements, or pages.
void expect_cache(const Append::Part& part, const char* label, const View& like, int64_t elements, bool in_pages) {
  const View& x = part.from;
  expect_shape(part.to, label, {elements, x.shape[1], like.shape[2], x.shape[3]},
               in_pages ? "pages, heads, tokens of a page, dim" : "sequences, heads and dim of what is appended");
}

// The sequences of packed new tokens.
void validate_packing(const octet_append_arguments& args, Append& a) {
  if (!args.cu_seqlens) return;
  a.cu_seqlens = plain(args.cu_seqlens, "cu_seqlens", false);
  expect_beside(*args.cu_seqlens, "cu_seqlens", *args.k, "k is");
  expect_cu_seqlens(a.cu_seqlens, "cu_seqlens");
  if (a.k.from.shape[0] != 1)
    invalid("k: batch ", a.k.from.shape[0], ", but packed sequences (cu_seqlens) have batch 1");
}

void validate_angles(const octet_append_arguments& args, Append& a) {
  if (args.rope) a.rope = validate_rope(*args.rope, *args.k, a.k.from);
  if (a.rope.norm != OCTET_NORM_NONE)
    invalid("rope norm: found ", name(a.rope.norm), ", allowed: none, as q and k have weights of their own; ",
            "octet_apply_rope has it");
  const bool turns = a.rope.style != OCTET_ROPE_NONE;
  if (!args.rope_cos != !args.rope_sin) invalid("rope_cos, rope_sin: only one of them given; angles need both");
  if (!turns && args.rope_cos) invalid("rope_cos: given without a rope, whose style says which channels are a pair");
  if (!args.q != !args.q_turned) invalid("q, q_turned: only one of them given; q is turned into q_turned");
  if (!turns && args.q) invalid("q: given without a rope, by which it would be turned");
  if (!args.rope_cos) return;
  if (args.rope->base != 0.0)
    invalid("rope base: ", args.rope->base, " given with rope_cos, which has the angles; leave it 0");
  a.cosine = numbers(args.rope_cos, "rope_cos", *args.k, false);
  a.sine = numbers(args.rope_sin, "rope_sin", *args.k, false);
  const int64_t positions = a.cosine.shape[2], pairs = a.cosine.shape[3];
  expect_shape(a.cosine, "rope_cos", {1, 1, positions, pairs}, "1, 1, positions, pairs");
  expect_shape(a.sine, "rope_sin", a.cosine.shape, "shape of rope_cos");
  if (args.rope->dim == 0) a.rope.dim = 2 * pairs;
  if (a.rope.dim != 2 * pairs || a.rope.dim > a.k.from.shape[3])
    invalid("rope_cos: ", pairs, " pairs, but rope dim is ", args.rope->dim, " and k has head dim ", a.k.from.shape[3],
            "; allowed: half of rope dim, or with 0 up to half of the head dim");
}

Append validate_append(const octet_append_arguments& args) {
  Append a{};
  if (!args.k) invalid("k: NULL");
  validate_part(args.k, "k", args.k_cache, "k_cache", OCTET_OPERAND_K, *args.k, a.k);
  validate_part(args.v, "v", args.v_cache, "v_cache", OCTET_OPERAND_V, *args.k, a.v);
  const View &k = a.k.from, &v = a.v.from;
  expect_shape(v, "v", {k.shape[0], k.shape[1], k.shape[2], v.shape[3]}, "batch, heads and tokens of k");
  validate_packing(args, a);
  const bool in_pages = args.block_table, packed = a.cu_seqlens.present();
  const int64_t sequences = packed ? a.cu_seqlens.shape[3] - 1 : k.shape[0];
  const char* const of_sequences = packed ? "the sequences of cu_seqlens" : "the batch of k";
  for (const auto& [part, label] : {std::pair{&a.k, "k_cache"}, {&a.v, "v_cache"}})
    expect_cache(*part, label, a.k.to, in_pages ? a.k.to.shape[0] : sequences, in_pages);
  if (!args.seqused_k) invalid("seqused_k: NULL, but it says where to append");
  a.seqused_k = plain(args.seqused_k, "seqused_k", false);
  expect_beside(*args.seqused_k, "seqused_k", *args.k, "k is");
  expect_lengths(a.seqused_k, sequences, of_sequences);
  View table;
  if (in_pages) {
    table = plain(args.block_table, "block_table", false);
    expect_beside(*args.block_table, "block_table", *args.k, "k is");
    const Pages pages = validate_pages(table, a.k.to, sequences, of_sequences);
    for (View* t : {&a.k.to, &a.v.to, &a.k.scale, &a.v.scale}) t->pages = pages;
  }
  a.capacity = in_pages ? a.k.to.pages.tokens() : a.k.to.shape[2];
  validate_angles(args, a);
  if (args.q) {
    a.q.from = numbers(args.q, "q", *args.k, false), a.q.to = numbers(args.q_turned, "q_turned", *args.k, true);
    const int64_t* const shape = a.q.from.shape;
    expect_shape(a.q.from, "q", {k.shape[0], shape[1], packed ? k.shape[2] : shape[2], k.shape[3]},
                 packed ? "batch, tokens and dim of k" : "batch and dim of k");
    expect_shape(a.q.to, "q_turned", {shape[0], shape[1], shape[2], shape[3]}, "shape of q");
  }
  const bool in_place = a.q.from.data == a.q.to.data && a.q.from.dtype == a.q.to.dtype &&
                        std::equal(a.q.from.stride, a.q.from.stride + 4, a.q.to.stride);
  const View nothing;
  expect_memory_of_their_own({{&a.k.to, "k_cache"},
                              {&a.v.to, "v_cache"},
                              {&a.k.scale, "scale of k_cache"},
                              {&a.v.scale, "scale of v_cache"},
                              {&a.q.to, "q_turned"}},
                             {{&k, "k"},
                              {&v, "v"},
                              {&a.seqused_k, "seqused_k"},
                              {&a.cu_seqlens, "cu_seqlens"},
                              {&table, "block_table"},
                              {&a.cosine, "rope_cos"},
                              {&a.sine, "rope_sin"},
                              {in_place ? &nothing : &a.q.from, "q"}});
  return a;
}

// Checks on the CPU that each new token has a place in the cache and a row of angles. On a GPU that would wait for it.
void expect_places(const Append& a) {
  if (a.cu_seqlens.present()) expect_ascending(a.cu_seqlens, "cu_seqlens", a.k.from.shape[2], "k");
  for (int64_t n = 0; n < a.sequences(); ++n) {
    const int64_t added = a.new_tokens(a.k.from, n).count, turned = std::max(added, a.new_tokens(a.q.from, n).count);
    const int64_t first = expect_in_cache(a.seqused_k, n, a.k.to, a.capacity, added, "k_cache") + a.rope.offset;
    if (a.cosine.present() && turned && (first < 0 || first + turned > a.cosine.shape[2]))
      invalid("rope_cos: ", a.cosine.shape[2], " positions, but those of sequence ", n, " are ", first, " to ",
              first + turned - 1);
  }
}

}  // namespace

void append(const octet_append_arguments* given, void* stream) {
  if (!given) invalid("arguments: NULL");
  const octet_append_arguments args = whole(*given, "octet_append_arguments");
  const Append a = validate_append(args);
  [[maybe_unused]] const auto place = place_of(*args.k, "k", stream);
#ifdef OCTET_CUDA_QUANTIZERS
  if (place) return cuda::append(a, *place);
#endif
  expect_places(a);
  cpu::append(a);
}

}  // namespace octet
