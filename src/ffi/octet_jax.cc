// octet as calls of XLA: Python describes each in octet.h's own structs (python/octet/jax/_adapter.py), all but the
// addresses, the device and the workspace, which are known when XLA runs it, here.
#include <octet/octet.h>
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

namespace ffi = xla::ffi;

using Bytes = ffi::Span<const uint8_t>;
using Offsets = ffi::Span<const int64_t>;

constexpr std::size_t kAlignment = 64;  // of a workspace

// A call as the program has it. `structs` holds the structs of a function's arguments one behind the other, without
// addresses, and the rest says where in it things are: the tensors, first those of the operands and then those of the
// results; of each pointer but theirs its own place and that of what it points to; and the function's arguments, -1
// for one that is null. Results beyond the tensors are the caller's.
struct Call {
  octet_device device;
  int32_t device_index;
  void* stream;
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;
  Bytes structs;
  Offsets tensors, pointers, arguments;
};

ffi::Error error_of(octet_status status) {
  if (status == OCTET_OK) return ffi::Error::Success();
  const ffi::ErrorCode code = status == OCTET_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == OCTET_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                               : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string("octet: ") + octet_message());
}

// The arguments of a function, which lie in memory of this call.
class Arguments {
 public:
  // Copies the structs and fills in what only XLA knows.
  ffi::Error fill(const Call& call) {
    memory_.resize(call.structs.size() / sizeof(uint64_t) + 1);
    std::memcpy(memory_.data(), call.structs.begin(), call.structs.size());
    const std::size_t inputs = call.operands.size();
    if (call.tensors.size() < inputs || call.tensors.size() > inputs + call.results.size())
      return ffi::Error::InvalidArgument("octet: the Python package and liboctet_jax.so are not of one version");
    for (std::size_t i = 0; i < call.tensors.size(); ++i) {
      auto& tensor = *at<octet_tensor>(call.tensors[i]);
      if (i < inputs) {
        const auto buffer = call.operands.get<ffi::AnyBuffer>(i);
        if (buffer.has_error()) return buffer.error();
        tensor.data = buffer->untyped_data();
      } else {
        auto buffer = call.results.get<ffi::AnyBuffer>(i - inputs);
        if (buffer.has_error()) return buffer.error();
        tensor.data = (*buffer)->untyped_data();
      }
      tensor.device = call.device;
      tensor.device_index = call.device_index;
    }
    for (std::size_t i = 0; i + 1 < call.pointers.size(); i += 2)
      *at<void*>(call.pointers[i]) = at(call.pointers[i + 1]);
    for (const int64_t offset : call.arguments) arguments_.push_back(at(offset));
    return ffi::Error::Success();
  }

  template <class Struct>
  Struct* get(std::size_t i) const {
    return static_cast<Struct*>(arguments_.at(i));
  }

 private:
  template <class T = void>
  T* at(int64_t offset) {
    if (offset < 0) return nullptr;
    return static_cast<T*>(static_cast<void*>(reinterpret_cast<char*>(memory_.data()) + offset));
  }

  std::vector<uint64_t> memory_;
  std::vector<void*> arguments_;
};

// XLA has no scratch memory on the CPU. On a GPU the last result is the workspace, in bytes: a buffer of the program,
// which stays its own when XLA records the call in a CUDA graph; XLA's scratch memory is given back when the handler
// returns.
ffi::Error run(const Call& call, const Arguments& arguments) {
  const auto* attention = arguments.get<octet_attention>(0);
  const auto* operands = arguments.get<octet_arguments>(1);
  std::size_t bytes = 0;
  if (const octet_status status = octet_workspace_size(attention, operands, &bytes); status != OCTET_OK)
    return error_of(status);
  std::unique_ptr<void, decltype(&std::free)> memory(nullptr, std::free);
  void* workspace = nullptr;
  if (bytes && call.device == OCTET_CPU) {
    memory.reset(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    workspace = memory.get();
  } else if (bytes) {
    auto buffer = call.results.get<ffi::AnyBuffer>(call.results.size() - 1);
    if (buffer.has_error()) return buffer.error();
    workspace = (*buffer)->untyped_data();
    std::size_t space = (*buffer)->size_bytes();
    workspace = std::align(kAlignment, bytes, workspace, space);
  }
  if (bytes && !workspace)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "octet: no workspace of " + std::to_string(bytes) + " bytes");
  return error_of(octet_run(attention, operands, workspace, bytes, call.stream));
}

// Results that are caches lie where the operands of their names do.
ffi::Error append(const Call& call, const Arguments& arguments) {
  return error_of(octet_append(arguments.get<octet_append_arguments>(0), call.stream));
}

ffi::Error quantize(const Call& call, const Arguments& arguments) {
  return error_of(octet_quantize(arguments.get<octet_tensor>(0), arguments.get<octet_rope>(1),
                                 arguments.get<octet_tensor>(2), arguments.get<octet_tensor>(3), call.stream));
}

ffi::Error dequantize(const Call& call, const Arguments& arguments) {
  return error_of(octet_dequantize(arguments.get<octet_tensor>(0), arguments.get<octet_tensor>(1), call.stream));
}

template <auto function>
ffi::Error answered(const Call& call) {
  Arguments arguments;
  if (const ffi::Error error = arguments.fill(call); error.failure()) return error;
  return function(call, arguments);
}

template <auto function>
ffi::Error on_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes structs, Offsets tensors,
                  Offsets pointers, Offsets arguments) {
  return answered<function>({OCTET_CPU, 0, nullptr, operands, results, structs, tensors, pointers, arguments});
}

template <auto function>
ffi::Error on_cuda(void* stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes structs,
                   Offsets tensors, Offsets pointers, Offsets arguments) {
  return answered<function>({OCTET_CUDA, device, stream, operands, results, structs, tensors, pointers, arguments});
}

template <class Binding>
auto with_call(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Bytes>("structs")
      .template Attr<Offsets>("tensors")
      .template Attr<Offsets>("pointers")
      .template Attr<Offsets>("arguments");
}

auto binding_cpu() { return with_call(ffi::Ffi::Bind()); }
auto binding_cuda() { return with_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()); }

}  // namespace

// The version of XLA's interface that the handlers need; XLA takes those of its own version and of earlier ones.
extern "C" const int32_t octet_jax_interface[2] = {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};

// octet neither waits nor allocates on a GPU, so that XLA may record the call in a CUDA graph.
#define OCTET_HANDLERS(name, function)                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##_cpu, on_cpu<function>, binding_cpu()); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##_cuda, on_cuda<function>, binding_cuda(), {ffi::Traits::kCmdBufferCompatible})

OCTET_HANDLERS(octet_jax, run);
OCTET_HANDLERS(octet_jax_append, append);
OCTET_HANDLERS(octet_jax_quantize, quantize);
OCTET_HANDLERS(octet_jax_dequantize, dequantize);
