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

ffi::Error other_version() {
  return ffi::Error::InvalidArgument("octet: the Python package and liboctet_jax.so are not of one version");
}

// Tensors are the operands, then the results; offsets say where in a struct of arguments each belongs. Results beyond
// them are the caller's.
ffi::Error place(octet_device device, int32_t device_index, ffi::RemainingArgs operands, ffi::RemainingRets results,
                 Bytes tensor_bytes, ffi::Span<const int64_t> offsets, std::vector<octet_tensor>& tensors,
                 void* arguments) {
  const std::size_t count = offsets.size();
  if (tensor_bytes.size() != count * sizeof(octet_tensor) || count > operands.size() + results.size())
    return other_version();
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
    octet_tensor* at = &tensor;
    std::memcpy(static_cast<char*>(arguments) + offsets[i], &at, sizeof at);
  }
  return ffi::Error::Success();
}

// octet_attention may be followed by its octet_rounding. `allocate(bytes)` gives the workspace, or null.
template <class Allocate>
ffi::Error run(octet_device device, int32_t device_index, void* stream, Allocate&& allocate,
               ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes attention_bytes, Bytes arguments_bytes,
               Bytes tensor_bytes, ffi::Span<const int64_t> offsets, std::string_view backend_name,
               std::string_view tile_name) {
  const bool rounds = attention_bytes.size() == sizeof(octet_attention) + sizeof(octet_rounding);
  if ((!rounds && attention_bytes.size() != sizeof(octet_attention)) ||
      arguments_bytes.size() != sizeof(octet_arguments))
    return other_version();

  const std::string backend(backend_name), tile(tile_name);
  auto attention = read<octet_attention>(attention_bytes);
  attention.backend = backend.empty() ? nullptr : backend.c_str();
  attention.tile = tile.empty() ? nullptr : tile.c_str();
  octet_rounding rounding;
  if (rounds) std::memcpy(&rounding, attention_bytes.begin() + sizeof(octet_attention), sizeof rounding);
  attention.rounding = rounds ? &rounding : nullptr;
  auto arguments = read<octet_arguments>(arguments_bytes);
  std::vector<octet_tensor> tensors;
  if (const ffi::Error error =
          place(device, device_index, operands, results, tensor_bytes, offsets, tensors, &arguments);
      error.failure())
    return error;

  std::size_t bytes = 0;
  if (const octet_status status = octet_workspace_size(&attention, &arguments, &bytes); status != OCTET_OK)
    return failed(status);
  void* workspace = bytes ? allocate(bytes) : nullptr;
  if (bytes && !workspace)
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "octet: no workspace of " + std::to_string(bytes) + " bytes");
  const octet_status status = octet_run(&attention, &arguments, workspace, bytes, stream);
  return status == OCTET_OK ? ffi::Error::Success() : failed(status);
}

// Results that are caches lie where the operands of their names do. `rope_bytes`: an octet_rope, or nothing.
ffi::Error append(octet_device device, int32_t device_index, void* stream, ffi::RemainingArgs operands,
                  ffi::RemainingRets results, Bytes arguments_bytes, Bytes rope_bytes, Bytes tensor_bytes,
                  ffi::Span<const int64_t> offsets) {
  const bool turns = rope_bytes.size() == sizeof(octet_rope);
  if (arguments_bytes.size() != sizeof(octet_append_arguments) || (!turns && rope_bytes.size())) return other_version();
  auto arguments = read<octet_append_arguments>(arguments_bytes);
  octet_rope rope;
  if (turns) rope = read<octet_rope>(rope_bytes);
  arguments.rope = turns ? &rope : nullptr;
  std::vector<octet_tensor> tensors;
  if (const ffi::Error error =
          place(device, device_index, operands, results, tensor_bytes, offsets, tensors, &arguments);
      error.failure())
    return error;
  const octet_status status = octet_append(&arguments, stream);
  return status == OCTET_OK ? ffi::Error::Success() : failed(status);
}

ffi::Error append_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes arguments, Bytes rope,
                      Bytes tensors, ffi::Span<const int64_t> offsets) {
  return append(OCTET_CPU, 0, nullptr, operands, results, arguments, rope, tensors, offsets);
}

ffi::Error append_cuda(void* stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       Bytes arguments, Bytes rope, Bytes tensors, ffi::Span<const int64_t> offsets) {
  return append(OCTET_CUDA, device, stream, operands, results, arguments, rope, tensors, offsets);
}

// XLA has no scratch memory on the CPU.
ffi::Error run_cpu(ffi::RemainingArgs operands, ffi::RemainingRets results, Bytes attention, Bytes arguments,
                   Bytes tensors, ffi::Span<const int64_t> offsets, std::string_view backend, std::string_view tile) {
  std::unique_ptr<void, decltype(&std::free)> memory(nullptr, std::free);
  const auto allocate = [&](std::size_t bytes) {
    memory.reset(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    return memory.get();
  };
  return run(OCTET_CPU, 0, nullptr, allocate, operands, results, attention, arguments, tensors, offsets, backend, tile);
}

// The last result is the workspace, in bytes: a buffer of the program, which stays its own when XLA records the call in
// a CUDA graph; XLA's scratch memory is given back when the handler returns.
ffi::Error run_cuda(void* stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                    Bytes attention, Bytes arguments, Bytes tensors, ffi::Span<const int64_t> offsets,
                    std::string_view backend, std::string_view tile) {
  auto memory = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (memory.has_error()) return memory.error();
  const auto allocate = [&](std::size_t bytes) {
    void* at = (*memory)->untyped_data();
    std::size_t space = (*memory)->size_bytes();
    return std::align(kAlignment, bytes, at, space);
  };
  return run(OCTET_CUDA, device, stream, allocate, operands, results, attention, arguments, tensors, offsets, backend,
             tile);
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
                                  .Attr<std::string_view>("backend")
                                  .Attr<std::string_view>("tile"));

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
                                  .Attr<std::string_view>("backend")
                                  .Attr<std::string_view>("tile"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(octet_jax_append_cpu, append_cpu,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Bytes>("arguments")
                                  .Attr<Bytes>("rope")
                                  .Attr<Bytes>("tensors")
                                  .Attr<ffi::Span<const int64_t>>("offsets"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(octet_jax_append_cuda, append_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Bytes>("arguments")
                                  .Attr<Bytes>("rope")
                                  .Attr<Bytes>("tensors")
                                  .Attr<ffi::Span<const int64_t>>("offsets"),
                              {ffi::Traits::kCmdBufferCompatible});
