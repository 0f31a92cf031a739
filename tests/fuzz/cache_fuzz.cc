// KV caches with lengths and block tables of any numbers: octet_append writes into the cache and the turned q alone,
// and nothing where it rejects, and octet_run reads no byte outside of its tensors, each of which is an allocation of
// its own that the address sanitizer watches.
#include <fuzzer/FuzzedDataProvider.h>
#include <octet/octet.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

// A tensor and its memory.
struct Array {
  octet_tensor tensor = OCTET_TENSOR_INIT;
  std::vector<unsigned char> bytes;

  Array(FuzzedDataProvider& in, uint32_t dtype, const std::vector<int64_t>& shape) {
    int64_t elements = 1;
    for (int i = 3; i >= 0; elements *= shape[static_cast<size_t>(i--)])
      tensor.shape[i] = shape[static_cast<size_t>(i)], tensor.stride[i] = elements;
    const size_t size = dtype == OCTET_F32 || dtype == OCTET_I32 ? 4 : dtype == OCTET_I8 || dtype == OCTET_E4M3 ? 1 : 2;
    bytes = in.ConsumeBytes<unsigned char>(static_cast<size_t>(elements) * size);
    bytes.resize(static_cast<size_t>(elements) * size, 0x3c);
    bytes.shrink_to_fit();
    tensor.dtype = dtype, tensor.data = bytes.data();
  }
  Array(const Array&) = delete;

  // Sets whole numbers, most of them near those that are right.
  void draw(FuzzedDataProvider& in, int32_t most) {
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const int32_t x = in.ConsumeIntegralInRange(0, 15) ? in.ConsumeIntegralInRange<int32_t>(0, most)
                                                         : in.ConsumeIntegral<int32_t>();
      std::memcpy(bytes.data() + i, &x, sizeof x);
    }
  }
};

[[noreturn]] void report(const char* what) {
  std::fprintf(stderr, "%s; the last message: %s\n", what, octet_message());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  const auto upto = [&](int64_t least, int64_t most) { return in.ConsumeIntegralInRange<int64_t>(least, most); };
  const int64_t b = upto(0, 3), g = upto(1, 2), h = g * upto(1, 2), n = upto(0, 3), d = 8 * upto(1, 2),
                e = 8 * upto(1, 2);
  const bool in_pages = in.ConsumeBool(), turns = in.ConsumeBool(), tables = turns && in.ConsumeBool();
  const int64_t columns = in_pages ? upto(1, 3) : 1, tokens = in.ConsumeBool() ? 16 : upto(1, 20);
  const int64_t elements = in_pages ? upto(0, 4) : b, pairs = upto(1, d / 2), positions = upto(1, 60);
  const auto type = in.PickValueInArray<uint32_t>({OCTET_F32, OCTET_BF16, OCTET_F16});
  const auto cached = in.PickValueInArray<uint32_t>({OCTET_F32, OCTET_BF16, OCTET_F16, OCTET_E4M3, OCTET_I8});
  const bool scales = cached == OCTET_I8 || (cached == OCTET_E4M3 && in.ConsumeBool());

  Array lengths(in, OCTET_I32, {1, 1, 1, b}), table(in, OCTET_I32, {b, 1, 1, columns});
  lengths.draw(in, static_cast<int32_t>(columns * tokens)), table.draw(in, static_cast<int32_t>(elements));
  Array k(in, type, {b, g, n, d}), v(in, type, {b, g, n, e}), q(in, type, {b, h, n, d}), turned(in, type, {b, h, n, d});
  Array k_cache(in, cached, {elements, g, tokens, d}), v_cache(in, cached, {elements, g, tokens, e});
  Array k_scale(in, OCTET_F32, {elements, g, tokens, 1}), v_scale(in, OCTET_F32, {elements, g, tokens, 1});
  Array cosine(in, OCTET_F32, {1, 1, positions, pairs}), sine(in, OCTET_F32, {1, 1, positions, pairs});
  octet_quantization of_k = OCTET_QUANTIZATION_INIT, of_v = OCTET_QUANTIZATION_INIT;
  of_k.operand = OCTET_OPERAND_K, of_k.scale = &k_scale.tensor, of_v.operand = OCTET_OPERAND_V,
  of_v.scale = &v_scale.tensor;
  if (scales) k_cache.tensor.quantization = &of_k, v_cache.tensor.quantization = &of_v;

  octet_rope rope = OCTET_ROPE_INIT;
  rope.style = in.ConsumeBool() ? OCTET_ROPE_HALF : OCTET_ROPE_INTERLEAVED;
  rope.offset = in.ConsumeBool() ? 0 : in.ConsumeIntegral<int64_t>();
  octet_append_arguments call = OCTET_APPEND_ARGUMENTS_INIT;
  call.k = &k.tensor, call.v = &v.tensor, call.k_cache = &k_cache.tensor, call.v_cache = &v_cache.tensor;
  call.seqused_k = &lengths.tensor;
  if (in_pages) call.block_table = &table.tensor;
  if (turns) call.rope = &rope, call.q = &q.tensor, call.q_turned = &turned.tensor;
  if (tables) call.rope_cos = &cosine.tensor, call.rope_sin = &sine.tensor;
  const std::vector<unsigned char> before[] = {k_cache.bytes, v_cache.bytes, k_scale.bytes, v_scale.bytes,
                                               turned.bytes};
  if (octet_append(&call, nullptr) != OCTET_OK) {
    if (!*octet_message()) report("a rejection without a message");
    const Array* const after[] = {&k_cache, &v_cache, &k_scale, &v_scale, &turned};
    for (size_t i = 0; i < std::size(before); ++i)
      if (after[i]->bytes != before[i]) report("a rejected call has written");
  }

  lengths.draw(in, static_cast<int32_t>(columns * tokens));
  Array o(in, type, {b, h, n, e}), lse(in, OCTET_F32, {b, h, n, 1});
  octet_attention attention = OCTET_ATTENTION_INIT;
  attention.precision = in.ConsumeIntegralInRange<uint32_t>(1, 9), attention.threads = 1;
  attention.backend = in.PickValueInArray<const char*>({nullptr, "reference"});
  attention.mask = in.ConsumeBool() ? OCTET_MASK_CAUSAL : 0;
  attention.alignment = attention.mask ? OCTET_ALIGNMENT_BOTTOM_RIGHT : 0;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  arguments.q = &turned.tensor, arguments.k = &k_cache.tensor, arguments.v = &v_cache.tensor;
  arguments.o = &o.tensor, arguments.lse = &lse.tensor, arguments.seqused_k = &lengths.tensor;
  if (in_pages) arguments.block_table = &table.tensor;
  size_t bytes = 0;
  if (octet_workspace_size(&attention, &arguments, &bytes) != OCTET_OK) return 0;
  const std::vector<unsigned char> keys = k_cache.bytes, values = v_cache.bytes, was = o.bytes;
  void* const workspace = std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64));
  const octet_status status = octet_run(&attention, &arguments, workspace, bytes, nullptr);
  std::free(workspace);
  if (k_cache.bytes != keys || v_cache.bytes != values) report("the cache was written");
  if (status != OCTET_OK && o.bytes != was) report("a rejected call has written");
  return 0;
}
