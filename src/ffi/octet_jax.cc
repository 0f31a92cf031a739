// octet as a call of XLA: Python describes a call of octet_run in octet.h's own structs (python/octet/jax/_adapter.py),
// all but the addresses, the device and the workspace, which are known when XLA runs it, here.
#include <octet/octet.h>
#include <octet/octet_study.h>
#include <xla/ffi/api/ffi.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

namespace ffi = xla::ffi;

using Bytes = ffi::Span<const uint8_t>;

constexpr std::size_t kAlignment = 64;  // of a workspace

ffi::Error failed(octet_status status) {
  const ffi::ErrorCode code = status == OCTET_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument
                              : status == OCTET_UNSUPPORTED    ? ffi::ErrorCode::kUnimplemented
                                                               : ffi::ErrorCode::kInternal;
  return ffi::Error(code, std::string("octet: ") + octet_message());
}

template <class Struct>
Struct read(Bytes bytes, std::size_t index = 0) {
  Struct out;
  std::memcpy(&out, bytes.begin() + index * sizeof(Struct), sizeof(Struct));
  return out;
}

// octet_attention may be followed by its octet_rounding. Tensors are the operands, then the results; offsets say where
// in octet_arguments each belongs. Results beyond them are the caller's. `allocate(bytes)` gives the workspace, or
// null.
template <class Allocate>
ffi::Error run(octet_device device, int32_t device_index, void* stream, Allocate&& allocate,
               ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes attention_bytes, Bytes arguments_bytes,
               Bytes tensor_bytes, ffi::Span<const int64_t> offsets, std::string_view backend_name) {
  const std::size_t count = offsets.size();
  const bool rounds = attention_bytes.size() == sizeof(octet_attention) + sizeof(octet_rounding);
  if ((!rounds && attention_bytes.size() != sizeof(octet_attention)) ||
      arguments_bytes.size() != sizeof(octet_arguments) || tensor_bytes.size() != count * sizeof(octet_tensor) ||
      count > operands.size() + results.size())
    return ffi::Error::InvalidArgument("octet: the Python package and liboctet_jax.so are not of one version");

  const std::string backend(backend_name);
  auto attention = read<octet_attention>(attention_bytes);
  attention.backend = backend.empty() ? nullptr : backend.c_str();
  octet_rounding rounding;
  if (rounds) std::memcpy(&rounding, attention_bytes.begin() + sizeof(octet_attention), sizeof rounding);
  attention.rounding = rounds ? &rounding : nullptr;
  auto arguments = read<octet_arguments>(arguments_bytes);
  std::vector<octet_tensor> tensors;
  tensors.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    octet_tensor& tensor = tensors.emplace_back(read<octet_tensor>(tensor_bytes, i));
    if (i < operands.size()) {
      const auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      tensor.data = buffer->untyped_data();
    } else {
      auto buffer = results.get<ffi::AnyBuffer>(i - operands.size());
      if (buffer.has_error()) return buffer.error();
      tensor.data = (*buffer)->untyped_data();
    }
    tensor.device = device;
    tensor.device_index = device_index;
    octet_tensor* place = &tensor;
    std::memcpy(reinterpret_cast<char*>(&arguments) + offsets[i], &place, sizeof place);
  }

  std::size_t bytes = 0;
  if (const octet_status status = octet_workspace_size(&attention, &arguments, &bytes); status != OCTET_OK)
    return failed(status);
  void* workspace = bytes ? allocate(bytes) : nullptr;
  if (bytes && !workspace)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "octet: no workspace of " + std::to_string(bytes) + " bytes");
  const octet_status status = octet_run(&attention, &arguments, workspace, bytes, stream);
  return status == OCTET_OK ? ffi::Error::Success() : failed(status);
}

// XLA has no scratch memory on the CPU.
ffi::Error run_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes attention, Bytes arguments,
                   Bytes tensors, ffi::Span<const int64_t> offsets, std::string_view backend) {
  std::unique_ptr<void, decltype(&std::free)> memory(nullptr, std::free);
  const auto allocate = [&](std::size_t bytes) {
    memory.reset(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    return memory.get();
  };
  return run(OCTET_CPU, 0, nullptr, allocate, operands, results, attention, arguments, tensors, offsets, backend);
}

// The last result is the workspace, in bytes: a buffer of the program, which stays its own when XLA records the call in
// a CUDA graph; XLA's scratch memory is given back when the handler returns.
ffi::Error run_cuda(void* stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    Bytes attention, Bytes arguments, Bytes tensors, ffi::Span<const int64_t> offsets,
                    std::string_view backend) {
  auto memory = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (memory.has_error()) return memory.error();
  const auto allocate = [&](std::size_t bytes) {
    void* at = (*memory)->untyped_data();
    std::size_t space = (*memory)->size_bytes();
    return std::align(kAlignment, bytes, at, space);
  };
  return run(OCTET_CUDA, device, stream, allocate, operands, results, attention, arguments, tensors, offsets, backend);
}

}  // namespace

// The version of XLA's interface that the handlers need; XLA takes those of its own version and of earlier ones.
extern "C" const int32_t octet_jax_interface[2] = {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};

XLA_FFI_DEFINE_HANDLER_SYMBOL(octet_jax_cpu, run_cpu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Bytes>("attention")
                                  .Attr<Bytes>("arguments")
                                  .Attr<Bytes>("tensors")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<std::string_view>("backend"));

// octet neither waits nor allocates, so that XLA may record the call in a CUDA graph.
XLA_FFI_DEFINE_HANDLER_SYMBOL(octet_jax_cuda, run_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Bytes>("attention")
                                  .Attr<Bytes>("arguments")
                                  .Attr<Bytes>("tensors")
                                  .Attr<ffi::Span<const int64_t>>("offsets")
                                  .Attr<std::string_view>("backend"),
                              {ffi::Traits::kCmdBufferCompatible});
