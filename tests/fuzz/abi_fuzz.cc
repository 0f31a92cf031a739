// The structs of octet.h with arbitrary fields. A small valid call is drawn, then some of its fields are overwritten.
// octet_workspace_size and octet_explain must survive every call, as they read no data. octet_run is called when all
// that the tensors describe lies inside the arena, as computed here; it may write outputs alone, and nothing at all
// when it rejects.
#include <fuzzer/FuzzedDataProvider.h>
#include <octet/octet.h>
#include <octet/octet_study.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr size_t kArena = 1 << 14;
constexpr int kTensors = 25;
constexpr int64_t kMostWork = 1 << 20;  // multiplications of a call that is run

struct Call {
  octet_attention attention = OCTET_ATTENTION_INIT;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  octet_rounding rounding = OCTET_ROUNDING_INIT;
  octet_tensor tensors[kTensors], scale;
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;
  unsigned char behind[4096] = {};  // the fields of a newer quantization; those of other structs are the structs behind
};

size_t bytes_of(uint32_t dtype) {
  constexpr size_t bytes[] = {0, 8, 4, 2, 2, 1, 1, 1, 1, 1, 4, 1};
  return dtype < std::size(bytes) ? bytes[dtype] : 0;
}

octet_tensor contiguous(unsigned char* data, uint32_t dtype, int64_t b, int64_t h, int64_t t, int64_t c) {
  octet_tensor x = OCTET_TENSOR_INIT;
  x.data = data;
  x.dtype = dtype;
  const int64_t shape[4] = {b, h, t, c}, stride[4] = {h * t * c, t * c, c, 1};
  std::copy(shape, shape + 4, x.shape);
  std::copy(stride, stride + 4, x.stride);
  return x;
}

// A call that is nearly always valid. Tensors are laid one after the other.
void draw(FuzzedDataProvider& in, unsigned char* arena, Call& call) {
  octet_attention& a = call.attention;
  octet_arguments& args = call.arguments;
  args.pass = in.ConsumeIntegralInRange<uint32_t>(0, 2);
  a.precision = in.ConsumeIntegralInRange<uint32_t>(1, 10);
  a.mask = in.ConsumeIntegralInRange<uint32_t>(0, 3);
  a.alignment = a.mask ? in.ConsumeIntegralInRange<uint32_t>(1, 2) : 0;
  if (a.mask & OCTET_MASK_WINDOW)
    a.window_left = in.ConsumeIntegralInRange<int64_t>(-1, 6),
    a.window_right = in.ConsumeIntegralInRange<int64_t>(-1, 0);
  a.threads = in.ConsumeIntegralInRange<uint32_t>(1, 2);
  a.backend = in.PickValueInArray<const char*>({nullptr, "cpu", "reference"});
  const bool packed = in.ConsumeIntegralInRange(0, 3) == 0;
  const int64_t b = packed ? 1 : in.ConsumeIntegralInRange<int64_t>(0, 2), g = in.ConsumeIntegralInRange<int64_t>(1, 2);
  const int64_t h = g * in.ConsumeIntegralInRange<int64_t>(1, 2), n = in.ConsumeIntegralInRange<int64_t>(0, 5);
  const int64_t m = in.ConsumeIntegralInRange<int64_t>(0, 5), d = 8 * in.ConsumeIntegralInRange<int64_t>(1, 2);
  const int64_t e = 8 * in.ConsumeIntegralInRange<int64_t>(1, 2);
  const auto type = in.PickValueInArray<uint32_t>({OCTET_F32, OCTET_BF16, OCTET_F16, OCTET_E4M3});
  const uint32_t out = type == OCTET_E4M3 ? uint32_t{OCTET_BF16} : type;
  const uint32_t residual = out == OCTET_F32 || in.ConsumeBool() ? out : uint32_t{OCTET_I8};

  size_t used = 0;
  octet_tensor* t = call.tensors;
  const auto place = [&](uint32_t dtype, int64_t b, int64_t h, int64_t t, int64_t c) {
    const octet_tensor x = contiguous(arena + used, dtype, b, h, t, c);
    used += (static_cast<size_t>(b * h * t * c) * bytes_of(dtype) + 7) / 8 * 8;
    return x;
  };
  t[0] = place(type, b, h, n, d), t[1] = place(type, b, g, m, d), t[2] = place(type, b, g, m, e);
  t[3] = place(OCTET_F32, 1, h, n, m);
  t[4] = t[5] = place(OCTET_I32, 1, 1, 1, 2);
  t[6] = place(out, b, h, n, e), t[7] = place(residual, b, h, n, e), t[8] = place(OCTET_F32, b, h, n, 1),
  t[9] = place(out, b, h, n, e);
  t[10] = place(out, b, h, n, d), t[11] = place(out, b, g, m, d), t[12] = place(out, b, g, m, e);
  t[13] = place(out, b, h, n, d), t[14] = place(out, b, g, m, d), t[15] = place(out, b, g, m, e),
  t[16] = place(out, b, h, n, e);
  const int64_t of_batch = in.ConsumeBool() ? b : 1;
  t[17] = place(OCTET_F32, of_batch, h, 1, 1), t[18] = place(OCTET_F32, of_batch, h, 1, 1);
  t[19] = place(OCTET_F32, of_batch, h, 1, 1);
  t[20] = place(OCTET_F32, b, h, n, 1), t[21] = place(OCTET_F32, b, h, n, 1),
  t[22] = place(OCTET_F32, of_batch, h, 1, 1), t[23] = place(OCTET_I32, of_batch, 1, 1, 4);
  t[24] = place(OCTET_F32, 1, h, n, m);
  call.scale = place(OCTET_F32, b, h, n, 1);
  call.quantization.scale = &call.scale;

  args.q = &t[0], args.k = &t[1], args.v = &t[2], args.o = &t[6], args.lse = &t[8];
  if (packed) args.cu_seqlens_q = &t[4], args.cu_seqlens_k = &t[5];
  if (!packed && in.ConsumeBool()) args.mask = &t[3];
  if (args.mask && args.pass == OCTET_BACKWARD && in.ConsumeBool()) args.dmask = &t[24];
  if (args.pass != OCTET_JVP && in.ConsumeBool()) args.o_residual = &t[7];
  if (args.pass == OCTET_BACKWARD) args.do_ = &t[9], args.dq = &t[10], args.dk = &t[11], args.dv = &t[12];
  if (args.pass == OCTET_JVP) args.tq = &t[13], args.tk = &t[14], args.tv = &t[15], args.to = &t[16];
  if (in.ConsumeBool()) {
    args.sinks = &t[17];
    if (args.pass == OCTET_BACKWARD) args.dsinks = &t[18];
    if (args.pass == OCTET_JVP && in.ConsumeBool()) args.tsinks = &t[19];
  }
  if (args.pass == OCTET_BACKWARD && in.ConsumeBool()) args.dlse = &t[20];
  if (args.pass == OCTET_JVP && in.ConsumeBool()) args.tlse = &t[21];
  if (in.ConsumeBool()) args.alibi_slopes = &t[22];
  if (in.ConsumeBool()) args.dropout_seed = &t[23], a.dropout_p = .25;
  if (in.ConsumeBool()) a.softcap = 2.f;
  if (in.ConsumeIntegralInRange(0, 7) == 0) a.precision = OCTET_PRECISION_F64, a.rounding = &call.rounding;
  if (in.ConsumeIntegralInRange(0, 7) == 0) t[0].dtype = OCTET_I8, t[0].quantization = &call.quantization;
}

template <class T>
T field(FuzzedDataProvider& in) {
  return in.ConsumeBool() ? static_cast<T>(in.ConsumeIntegralInRange<int>(-3, 12)) : in.ConsumeIntegral<T>();
}

void spoil_tensor(FuzzedDataProvider& in, unsigned char* arena, octet_tensor& t) {
  const int i = in.ConsumeIntegralInRange(0, 3);
  switch (in.ConsumeIntegralInRange(0, 6)) {
    case 0:
      t.shape[i] = field<int64_t>(in);
      break;
    case 1:
      t.stride[i] = field<int64_t>(in);
      break;
    case 2:
      t.dtype = field<uint32_t>(in);
      break;
    case 3:
      t.data = in.ConsumeBool() ? arena + in.ConsumeIntegralInRange<size_t>(0, kArena) : nullptr;
      break;
    case 4:
      t.device = field<uint32_t>(in);
      break;
    case 5:
      t.device_index = field<int32_t>(in);
      break;
    case 6:
      t.size = field<uint32_t>(in);
      break;
  }
}

void spoil_attention(FuzzedDataProvider& in, octet_attention& a) {
  // Every 32-bit field in turn; the bits of a float are as good as any.
  uint32_t* const fields[] = {&a.size,     &a.precision, &a.mask,          &a.alignment, &a.bias_correction,
                              &a.hadamard, &a.smooth_q,  &a.deterministic, &a.threads};
  float* const floats[] = {&a.scale, &a.softcap, &a.beta};
  switch (in.ConsumeIntegralInRange(0, 3)) {
    case 0:
      *fields[in.ConsumeIntegralInRange<size_t>(0, std::size(fields) - 1)] = field<uint32_t>(in);
      break;
    case 1:
      *floats[in.ConsumeIntegralInRange<size_t>(0, std::size(floats) - 1)] = in.ConsumeFloatingPoint<float>();
      break;
    case 2:
      a.window_left = field<int64_t>(in);
      break;
    case 3:
      a.window_right = field<int64_t>(in);
      break;
  }
}

void spoil_quantization(FuzzedDataProvider& in, octet_quantization& q) {
  switch (in.ConsumeIntegralInRange(0, 5)) {
    case 0:
      q.size = field<uint32_t>(in);
      break;
    case 1:
      q.operand = field<uint32_t>(in);
      break;
    case 2:
      q.granularity = field<uint32_t>(in);
      break;
    case 3:
      q.zero_point_kind = field<uint32_t>(in);
      break;
    case 4:
      q.block = field<int64_t>(in);
      break;
    case 5:
      q.scale = nullptr;
      break;
  }
}

void spoil(FuzzedDataProvider& in, unsigned char* arena, Call& call) {
  switch (in.ConsumeIntegralInRange(0, 7)) {
    case 0:
      spoil_attention(in, call.attention);
      break;
    case 1:
      (in.ConsumeBool() ? call.arguments.pass : call.arguments.size) = field<uint32_t>(in);
      break;
    case 2:
      (in.ConsumeBool() ? call.arguments.max_seqlen_q : call.arguments.max_seqlen_k) = field<int64_t>(in);
      break;
    case 3:
      (&call.rounding.size)[in.ConsumeIntegralInRange<size_t>(0, 15)] = field<uint32_t>(in);
      break;
    case 4:
      spoil_quantization(in, call.quantization);
      break;
    case 5:
      spoil_tensor(in, arena, call.scale);
      break;
    default:
      spoil_tensor(in, arena, call.tensors[in.ConsumeIntegralInRange(0, kTensors - 1)]);
      break;
  }
}

// Offsets in the arena of the first byte a tensor describes and of the one behind its last; equal if it is empty.
struct Extent {
  __int128 first = 0, last = 0;
  bool inside() const { return first >= 0 && last <= static_cast<__int128>(kArena); }
};

Extent extent(const octet_tensor& t, const unsigned char* arena) {
  const __int128 size = static_cast<__int128>(bytes_of(t.dtype));
  constexpr __int128 kFar = __int128{1} << 100;
  __int128 low = 0, high = 0;
  for (int i = 0; i < 4; ++i) {
    if (t.shape[i] <= 0) return {};
    const __int128 steps = static_cast<__int128>(t.shape[i] - 1) * t.stride[i];
    if (steps > kFar || steps < -kFar) return {-1, 0};  // outside; times the size it might overflow
    (steps < 0 ? low : high) += steps * size;
  }
  const __int128 base = reinterpret_cast<intptr_t>(t.data) - reinterpret_cast<intptr_t>(arena);
  return {base + low, base + high + size};
}

std::vector<const octet_tensor*> outputs_of(const octet_arguments& a) {
  std::vector<const octet_tensor*> out{a.dq, a.dk, a.dv, a.dsinks, a.dmask, a.to, a.tlse};
  if (a.pass != OCTET_BACKWARD) out.insert(out.end(), {a.o, a.o_residual, a.lse});
  std::erase(out, nullptr);
  return out;
}

bool worth_running(const Call& call, const unsigned char* arena) {
  for (const octet_tensor& t : call.tensors)
    if (!extent(t, arena).inside()) return false;
  if (!extent(call.scale, arena).inside() || call.attention.threads > 8) return false;
  const int64_t *q = call.arguments.q->shape, *v = call.arguments.v->shape;
  __int128 work = 1;
  // An empty tensor's other sizes may be any.
  for (const __int128 n : {__int128{q[0]}, __int128{q[1]}, __int128{q[2]}, __int128{v[2]}, __int128{q[3]} + v[3]})
    work = std::min<__int128>(work, kMostWork + 1) * std::max<__int128>(n, 1);
  return work <= kMostWork;
}

[[noreturn]] void report(const char* what) {
  std::fprintf(stderr, "%s; the last message: %s\n", what, octet_message());
  std::abort();
}

void run(const Call& call, unsigned char* arena, size_t bytes) {
  const std::vector<unsigned char> before(arena, arena + kArena);
  const std::unique_ptr<void, decltype(&std::free)> workspace(
      std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)), std::free);
  const octet_status status = octet_run(&call.attention, &call.arguments, workspace.get(), bytes, nullptr);
  if (status == OCTET_OK)
    for (const octet_tensor* t : outputs_of(call.arguments)) {
      const Extent x = extent(*t, arena);
      std::memcpy(arena + static_cast<size_t>(x.first), before.data() + static_cast<size_t>(x.first),
                  static_cast<size_t>(x.last - x.first));
    }
  if (std::memcmp(arena, before.data(), kArena) != 0)
    report(status == OCTET_OK ? "memory outside of the outputs was written" : "a rejected call has written");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider in(data, size);
  // The rest of the input, repeated, is what the tensors hold.
  const std::unique_ptr<unsigned char, decltype(&std::free)> memory(
      static_cast<unsigned char*>(std::aligned_alloc(64, kArena)), std::free);
  unsigned char* arena = memory.get();
  for (size_t i = 0; i < kArena; ++i) arena[i] = size ? data[i % size] : 0;

  Call call;
  draw(in, arena, call);
  // Boundaries of packed sequences that are right unless the tensors overwrite them.
  const int32_t bounds[2] = {0, static_cast<int32_t>(call.tensors[0].shape[2])};
  std::memcpy(call.tensors[4].data, bounds, sizeof bounds);
  for (int n = in.ConsumeIntegralInRange(0, 4); n > 0; --n) spoil(in, arena, call);

  size_t bytes = 0, length = 0;
  char text[512];
  const octet_status status = octet_workspace_size(&call.attention, &call.arguments, &bytes);
  const octet_status explained = octet_explain(&call.attention, &call.arguments, text, sizeof text, &length);
  if (status != OCTET_OK && !*octet_message()) report("a rejection without a message");
  if (status == OCTET_OK && explained != OCTET_OK) report("octet_explain rejects what octet_workspace_size accepts");
  if (worth_running(call, arena) && bytes <= size_t{1} << 26) run(call, arena, bytes);
  return 0;
}
