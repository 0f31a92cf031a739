// octet for C++20: header-only, on top of octet.h. Functions throw octet::Error where the C functions return a
// status; everything else is said in octet.h.
//
//   std::vector<float> q(n), k(n), v(n), o(n);
//   octet::Shape shape{1, 8, 2048, 128};  // batch, heads, tokens, dim
//   octet::Forward call;
//   call.q = {q.data(), shape};
//   call.k = {k.data(), shape};
//   call.v = {v.data(), shape};
//   call.o = {o.data(), shape};
//   octet::run({.precision = octet::Precision::f32, .causal = true}, call);
#pragma once
#include <octet/octet.h>

#include <array>
#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

namespace octet {

class Error : public std::runtime_error {
 public:
  Error(octet_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  octet_status status() const { return status_; }

 private:
  octet_status status_;
};

// Throws Error with octet_message() unless `status` is OCTET_OK.
inline void check(octet_status status) {
  if (status != OCTET_OK) throw Error(status, octet_message());
}

enum class DType : uint32_t {
  none = OCTET_DTYPE_NONE,
  f64 = OCTET_F64,
  f32 = OCTET_F32,
  f16 = OCTET_F16,
  bf16 = OCTET_BF16,
  e4m3 = OCTET_E4M3,
  e5m2 = OCTET_E5M2,
  i8 = OCTET_I8,
  u8 = OCTET_U8,
  i4 = OCTET_I4,
  i32 = OCTET_I32,
  boolean = OCTET_BOOL
};
enum class Device : uint32_t { cpu = OCTET_CPU, cuda = OCTET_CUDA };
enum class Precision : uint32_t {
  none = OCTET_PRECISION_NONE,
  f64 = OCTET_PRECISION_F64,
  f32 = OCTET_PRECISION_F32,
  f16 = OCTET_PRECISION_F16,
  bf16 = OCTET_PRECISION_BF16,
  int8 = OCTET_PRECISION_INT8,
  int8_f16 = OCTET_PRECISION_INT8_F16,
  int8_fp8 = OCTET_PRECISION_INT8_FP8,
  fp8 = OCTET_PRECISION_FP8,
  fp8_raw = OCTET_PRECISION_FP8_RAW,
  sagebwd = OCTET_PRECISION_SAGEBWD
};

// A name, as messages, the command and Python spell it.
template <class Value>
struct Name {
  const char* text;
  Value value;
};
inline constexpr Name<Precision> kPrecisions[] = {{"f64", Precision::f64},           {"f32", Precision::f32},
                                                  {"f16", Precision::f16},           {"bf16", Precision::bf16},
                                                  {"int8", Precision::int8},         {"int8_f16", Precision::int8_f16},
                                                  {"int8_fp8", Precision::int8_fp8}, {"fp8", Precision::fp8},
                                                  {"fp8_raw", Precision::fp8_raw},   {"sagebwd", Precision::sagebwd}};

enum class Alignment : uint32_t {
  unspecified = OCTET_ALIGNMENT_NONE,
  top_left = OCTET_ALIGNMENT_TOP_LEFT,
  bottom_right = OCTET_ALIGNMENT_BOTTOM_RIGHT
};
enum class BiasCorrection : uint32_t {
  f16 = OCTET_BIAS_CORRECTION_F16,
  none = OCTET_BIAS_CORRECTION_NONE,
  beta = OCTET_BIAS_CORRECTION_BETA,
  exact_delta = OCTET_BIAS_CORRECTION_EXACT_DELTA,
  gproj = OCTET_BIAS_CORRECTION_GPROJ
};
enum class Switch : uint32_t { automatic = OCTET_AUTO, on = OCTET_ON, off = OCTET_OFF };

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, double>)
    return DType::f64;
  else if constexpr (std::is_same_v<T, float>)
    return DType::f32;
  else if constexpr (std::is_same_v<T, int8_t>)
    return DType::i8;
  else if constexpr (std::is_same_v<T, uint8_t>)
    return DType::u8;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::i32;
  else if constexpr (std::is_same_v<T, bool>)
    return DType::boolean;
  else
    static_assert(sizeof(T) == 0, "give the dtype of 16- and 8-bit floats by name");
}

using Shape = std::array<int64_t, 4>;  // batch, head, token, dim

constexpr Shape contiguous_strides(const Shape& s) { return {s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}; }

// A view of the caller's memory [batch, head, token, dim]; default-constructed: absent.
struct Tensor : octet_tensor {
  Tensor() : octet_tensor OCTET_TENSOR_INIT {}

  Tensor(void* data, DType dtype, const Shape& shape, const Shape& stride, Device device = Device::cpu,
         int32_t device_index = 0)
      : Tensor() {
    this->data = data;
    this->dtype = static_cast<uint32_t>(dtype);
    for (int i = 0; i < 4; ++i) this->shape[i] = shape[i], this->stride[i] = stride[i];
    this->device = static_cast<uint32_t>(device);
    this->device_index = device_index;
  }

  Tensor(void* data, DType dtype, const Shape& shape) : Tensor(data, dtype, shape, contiguous_strides(shape)) {}

  template <class T>
  Tensor(T* data, const Shape& shape)
      : Tensor(const_cast<std::remove_const_t<T>*>(data), dtype_of<std::remove_const_t<T>>(), shape) {}

  bool present() const { return dtype != OCTET_DTYPE_NONE; }
};

// The options of a call, apart from its data; see octet_attention.
struct Attention {
  Precision precision = Precision::none;
  std::optional<float> scale{};  // empty: 1 / sqrt(dim)
  bool causal = false;
  Alignment alignment = Alignment::unspecified;
  std::optional<std::array<int64_t, 2>> window{};  // keys left and right of the diagonal, -1: all
  BiasCorrection bias_correction = BiasCorrection::f16;
  float beta = 0;
  float softcap = 0;  // logits become softcap * tanh(logit / softcap); 0: none
  Switch hadamard = Switch::automatic;
  Switch smooth_q = Switch::automatic;
  bool deterministic = false;
  uint32_t threads = 0;
  const char* backend = nullptr;
  const octet_rounding* rounding = nullptr;
  double dropout_p = 0;  // with Extras::dropout_seed
  const char* tile = nullptr;

  octet_attention c() const {
    octet_attention a = OCTET_ATTENTION_INIT;
    if (scale && *scale == 0.f)
      throw Error(
          OCTET_INVALID_ARGUMENT,
          "scale: found 0, allowed: positive and finite, 1.17549e-38 to 3.40282e+38, or nothing for 1/sqrt(dim)");
    a.precision = static_cast<uint32_t>(precision);
    a.scale = scale.value_or(0.f);
    a.mask = (causal ? OCTET_MASK_CAUSAL : 0) | (window ? OCTET_MASK_WINDOW : 0);
    a.alignment = static_cast<uint32_t>(alignment);
    if (window) a.window_left = (*window)[0], a.window_right = (*window)[1];
    a.bias_correction = static_cast<uint32_t>(bias_correction);
    a.beta = beta;
    a.softcap = softcap;
    a.hadamard = static_cast<uint32_t>(hadamard);
    a.smooth_q = static_cast<uint32_t>(smooth_q);
    a.deterministic = deterministic;
    a.threads = threads;
    a.backend = backend;
    a.rounding = rounding;
    a.dropout_p = dropout_p;
    a.tile = tile;
    return a;
  }
};

// Optional inputs of every pass; see octet_arguments.
struct Extras {
  Tensor mask{};
  Tensor sinks{};         // [1 h 1 1] or [b h 1 1]
  Tensor alibi_slopes{};  // likewise, or of each packed sequence [s h 1 1]
  Tensor dropout_seed{};  // i32 [1 1 1 4], [b 1 1 4] or [s 1 1 4]
  Tensor cu_seqlens_q{}, cu_seqlens_k{};
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  Tensor seqused_k{};    // of KV caches, in forward passes: i32 [1 1 1 s]
  Tensor block_table{};  // with it: i32 [s 1 1 columns]
};

// o = softmax(softcap(scale q k^T) + mask + ALiBi) v
struct Forward {
  Tensor q, k, v;       // in
  Tensor o;             // out
  Tensor lse{};         // out, optional
  Tensor o_residual{};  // out, optional: i8, or of o's type
  Extras extras{};
};

// Gradients of a forward call.
struct Backward {
  Tensor q, k, v, o, lse, do_;  // in
  Tensor dq, dk, dv;            // out
  Tensor o_residual{};          // in, optional: i8, or of o's type
  Tensor dlse{};                // in, optional
  Tensor dsinks{};              // out, optional
  Tensor dmask{};               // out, optional, of the shape of the mask
  Extras extras{};
};

// A forward call and its derivative along the tangents of q, k, v.
struct Jvp {
  Tensor q, k, v, tq, tk, tv;  // in
  Tensor o, to;                // out
  Tensor lse{};                // out, optional
  Tensor tsinks{};             // in, optional
  Tensor tlse{};               // out, optional
  Extras extras{};
};

namespace detail {

// octet_arguments points at tensors; this copy of a call owns what it points at.
template <class Call>
class Arguments {
 public:
  explicit Arguments(const Call& call) : call_(call) {
    auto& c = call_;
    args_.q = pointer(c.q), args_.k = pointer(c.k), args_.v = pointer(c.v);
    args_.mask = pointer(c.extras.mask), args_.sinks = pointer(c.extras.sinks);
    args_.alibi_slopes = pointer(c.extras.alibi_slopes), args_.dropout_seed = pointer(c.extras.dropout_seed);
    args_.cu_seqlens_q = pointer(c.extras.cu_seqlens_q), args_.cu_seqlens_k = pointer(c.extras.cu_seqlens_k);
    args_.max_seqlen_q = c.extras.max_seqlen_q, args_.max_seqlen_k = c.extras.max_seqlen_k;
    args_.seqused_k = pointer(c.extras.seqused_k), args_.block_table = pointer(c.extras.block_table);
    args_.o = pointer(c.o), args_.lse = pointer(c.lse);
    if constexpr (std::is_same_v<Call, Forward>) {
      args_.pass = OCTET_FORWARD;
      args_.o_residual = pointer(c.o_residual);
    } else if constexpr (std::is_same_v<Call, Backward>) {
      args_.pass = OCTET_BACKWARD;
      args_.o_residual = pointer(c.o_residual);
      args_.do_ = pointer(c.do_), args_.dq = pointer(c.dq), args_.dk = pointer(c.dk), args_.dv = pointer(c.dv);
      args_.dlse = pointer(c.dlse), args_.dsinks = pointer(c.dsinks), args_.dmask = pointer(c.dmask);
    } else {
      args_.pass = OCTET_JVP;
      args_.tq = pointer(c.tq), args_.tk = pointer(c.tk), args_.tv = pointer(c.tv), args_.to = pointer(c.to);
      args_.tsinks = pointer(c.tsinks), args_.tlse = pointer(c.tlse);
    }
  }
  Arguments(const Arguments&) = delete;
  const octet_arguments* c() const { return &args_; }

 private:
  static octet_tensor* pointer(Tensor& t) { return t.present() ? &t : nullptr; }

  Call call_;
  octet_arguments args_ = OCTET_ARGUMENTS_INIT;
};

struct Workspace {
  explicit Workspace(size_t bytes) : data(bytes ? ::operator new (bytes, std::align_val_t{64}) : nullptr) {}
  ~Workspace() {
    if (data) ::operator delete (data, std::align_val_t{64});
  }
  Workspace(const Workspace&) = delete;
  void* data;
};

}  // namespace detail

template <class Call>
size_t workspace_size(const Attention& attention, const Call& call) {
  const octet_attention a = attention.c();
  const detail::Arguments<Call> args(call);
  size_t bytes = 0;
  check(octet_workspace_size(&a, args.c(), &bytes));
  return bytes;
}

// Runs a Forward, Backward or Jvp with the caller's workspace.
template <class Call>
void run(const Attention& attention, const Call& call, void* workspace, size_t bytes, void* stream = nullptr) {
  const octet_attention a = attention.c();
  const detail::Arguments<Call> args(call);
  check(octet_run(&a, args.c(), workspace, bytes, stream));
}

// CPU tensors only: the same with a workspace from the heap.
template <class Call>
void run(const Attention& attention, const Call& call) {
  const size_t bytes = workspace_size(attention, call);
  const detail::Workspace workspace(bytes);
  run(attention, call, workspace.data, bytes);
}

// Which backend and kernel would run, and why each better one would not.
template <class Call>
std::string explain(const Attention& attention, const Call& call) {
  const octet_attention a = attention.c();
  const detail::Arguments<Call> args(call);
  size_t length = 0;
  check(octet_explain(&a, args.c(), nullptr, 0, &length));
  std::string text(length + 1, '\0');
  check(octet_explain(&a, args.c(), text.data(), text.size(), &length));
  text.resize(length);
  return text;
}

// The kernels that can run a call, by the names of their tiles, as JSON; see octet_tiles.
template <class Call>
std::string tiles(const Attention& attention, const Call& call) {
  const octet_attention a = attention.c();
  const detail::Arguments<Call> args(call);
  size_t length = 0;
  check(octet_tiles(&a, args.c(), nullptr, 0, &length));
  std::string text(length + 1, '\0');
  check(octet_tiles(&a, args.c(), text.data(), text.size(), &length));
  text.resize(length);
  return text;
}

// The machine and the build as JSON.
inline std::string info() {
  size_t length = 0;
  check(octet_info(nullptr, 0, &length));
  std::string text(length + 1, '\0');
  check(octet_info(text.data(), text.size(), &length));
  text.resize(length);
  return text;
}

}  // namespace octet
