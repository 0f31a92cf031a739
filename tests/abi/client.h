// A program that uses every struct and every pass of octet, as it was written for octet.h 0.1.0. It is compiled twice,
// with that header and with today's, which the including file has included; CLIENT is its name.
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kQueries = 70, kKeys = 130, kWidth = 64;

void check(octet_status status) {
  if (status != OCTET_OK) throw std::runtime_error(octet_message());
}

// A float32 tensor [1, heads, tokens, dim] and the memory of its own.
struct Data {
  octet_tensor view = OCTET_TENSOR_INIT;
  std::vector<float> values;

  Data(int64_t heads, int64_t tokens, int64_t dim, uint32_t seed = 0)
      : values(static_cast<size_t>(heads * tokens * dim)) {
    for (float& x : values) {
      if (!seed) break;
      seed = seed * 1664525 + 1013904223;
      x = static_cast<float>(seed >> 8) * 0x1p-23f - 1.f;
    }
    view.dtype = OCTET_F32, view.data = values.data();
    const int64_t shape[4] = {1, heads, tokens, dim};
    const int64_t stride[4] = {heads * tokens * dim, tokens * dim, dim, 1};
    for (int i = 0; i < 4; ++i) view.shape[i] = shape[i], view.stride[i] = stride[i];
  }
  Data(const Data&) = delete;
};

void run(const octet_attention& attention, const octet_arguments& arguments) {
  size_t bytes = 0, length = 0;
  check(octet_workspace_size(&attention, &arguments, &bytes));
  check(octet_explain(&attention, &arguments, nullptr, 0, &length));
  void* workspace = ::operator new (bytes + 1, std::align_val_t{64});
  const octet_status status = octet_run(&attention, &arguments, workspace, bytes, nullptr);
  ::operator delete (workspace, std::align_val_t{64});
  check(status);
}

}  // namespace

// Returns the bytes of all results.
std::vector<unsigned char> CLIENT() {
  std::vector<unsigned char> results;
  const auto keep = [&](const void* data, size_t bytes) {
    const auto* first = static_cast<const unsigned char*>(data);
    results.insert(results.end(), first, first + bytes);
  };
  const auto keep_all = [&](std::initializer_list<const Data*> all) {
    for (const Data* x : all) keep(x->values.data(), x->values.size() * sizeof(float));
  };
  Data q(kHeads, kQueries, kWidth, 1), k(kKvHeads, kKeys, kWidth, 2), v(kKvHeads, kKeys, kWidth, 3);
  Data d_o(kHeads, kQueries, kWidth, 4), tq(kHeads, kQueries, kWidth, 5), tk(kKvHeads, kKeys, kWidth, 6);
  Data tv(kKvHeads, kKeys, kWidth, 7), mask(1, kQueries, kKeys, 8);

  for (const octet_precision precision : {OCTET_PRECISION_F64, OCTET_PRECISION_F32, OCTET_PRECISION_BF16,
                                          OCTET_PRECISION_INT8, OCTET_PRECISION_FP8, OCTET_PRECISION_SAGEBWD}) {
    Data o(kHeads, kQueries, kWidth), lse(kHeads, kQueries, 1), to(kHeads, kQueries, kWidth);
    Data dq(kHeads, kQueries, kWidth), dk(kKvHeads, kKeys, kWidth), dv(kKvHeads, kKeys, kWidth);
    octet_attention attention = OCTET_ATTENTION_INIT;
    attention.precision = precision, attention.scale = .25f;
    attention.mask = OCTET_MASK_CAUSAL | OCTET_MASK_WINDOW, attention.alignment = OCTET_ALIGNMENT_BOTTOM_RIGHT;
    attention.window_left = 90, attention.threads = 2;
    octet_arguments forward = OCTET_ARGUMENTS_INIT;
    forward.q = &q.view, forward.k = &k.view, forward.v = &v.view, forward.mask = &mask.view;
    forward.o = &o.view, forward.lse = &lse.view;
    octet_arguments backward = forward, jvp = forward;
    run(attention, forward);
    backward.pass = OCTET_BACKWARD, backward.do_ = &d_o.view;
    backward.dq = &dq.view, backward.dk = &dk.view, backward.dv = &dv.view;
    run(attention, backward);
    keep_all({&o, &lse, &dq, &dk, &dv});
    if (precision >= OCTET_PRECISION_INT8) continue;
    jvp.pass = OCTET_JVP, jvp.tq = &tq.view, jvp.tk = &tk.view, jvp.tv = &tv.view, jvp.to = &to.view;
    run(attention, jvp);
    keep_all({&to});
  }

  // Keys quantized beforehand, with RoPE; roundings of the caller's.
  std::vector<int8_t> codes(static_cast<size_t>(kKvHeads * kKeys * kWidth));
  Data scale(kKvHeads, kKeys, 1), mean(kKvHeads, 1, kWidth), statistics(kKvHeads, 1, OCTET_STATISTICS);
  Data back(kKvHeads, kKeys, kWidth), o(kHeads, kQueries, kWidth), rounded(kHeads, kQueries, kWidth);
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;
  quantization.operand = OCTET_OPERAND_K, quantization.hadamard_seed = 9;
  quantization.scale = &scale.view, quantization.mean = &mean.view;
  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = OCTET_ROPE_HALF, rope.dim = 32, rope.offset = 3;
  octet_tensor coded = k.view;
  coded.dtype = OCTET_I8, coded.data = codes.data(), coded.quantization = &quantization;
  check(octet_quantize(&k.view, &rope, &coded, &statistics.view, nullptr));
  check(octet_dequantize(&coded, &back.view, nullptr));
  octet_attention attention = OCTET_ATTENTION_INIT;
  attention.precision = OCTET_PRECISION_INT8;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  arguments.q = &q.view, arguments.k = &coded, arguments.v = &v.view, arguments.o = &o.view;
  run(attention, arguments);
  octet_rounding rounding = OCTET_ROUNDING_INIT;
  rounding.p = OCTET_BF16, rounding.beta = 3.f;
  attention.precision = OCTET_PRECISION_F64, attention.rounding = &rounding;
  arguments.k = &k.view, arguments.o = &rounded.view;
  run(attention, arguments);
  keep(codes.data(), codes.size());
  keep_all({&scale, &mean, &statistics, &back, &o, &rounded});
  return results;
}
