// The memory of a GPU as a place where the cases run: each buffer of the host is copied there with its guards, and
// back.
#pragma once
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/cases.h"

namespace octet::test {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// The backend that the tests name: OCTET_BACKEND, or the first one of a GPU.
inline const char* gpu_backend() {
  const char* const wanted = std::getenv("OCTET_BACKEND");
  return wanted && *wanted ? wanted : "sm90";
}
inline bool tests_sm80() { return std::string(gpu_backend()) == "sm80"; }

// Whether this backend has a pass of a precision.
inline bool gpu_computes(Pass pass, Precision precision) {
  const bool sixteen_bits = precision == Precision::bf16 || precision == Precision::f16;
  if (tests_sm80())
    return sixteen_bits || precision == Precision::f32 || (pass == Pass::forward && precision != Precision::f64) ||
           ((precision == Precision::int8 || precision == Precision::sagebwd) && pass == Pass::backward);
  return precision != Precision::f32 && precision != Precision::sagebwd && (pass == Pass::forward || sixteen_bits);
}
// The largest head dim for which the backend has a pass of a precision.
inline int64_t gpu_most_dim(Precision precision, Pass pass = Pass::forward) {
  const bool wide = precision == Precision::f32 || precision == Precision::bf16 || precision == Precision::f16 ||
                    precision == Precision::int8_f16;
  if (tests_sm80() && pass != Pass::jvp && (precision == Precision::bf16 || precision == Precision::f16)) return 512;
  return tests_sm80() || (wide && pass != Pass::jvp) ? 256 : 128;
}
// Whether the backend computes softcap and mask tensors of every kind, and these with ALiBi.
inline bool gpu_has_general_logits() { return tests_sm80(); }
// Whether the backend computes a case whose mask tensor has this type and shape, if it computes ALiBi in the call. Each
// computes key masks, bool tensors that are the same for all heads and queries, if no window, slope or sink belongs to
// a place or to a batch element. Of other masks sm90 takes, without dropout, bool ones, and in 16 bits those of the
// type of q, or in the backward pass of any type of 16 bits; its jvp takes none.
inline bool gpu_takes_logits(const Case& c, Pass pass, const Attention& attention, DType mask, const Shape& shape) {
  if (gpu_has_general_logits()) return true;
  if (c.softcap != 0) return false;
  if (mask == DType::none) return true;
  if (c.alibi != Alibi::none) return false;
  const bool of_keys = mask == DType::boolean && shape[1] == 1 && shape[2] == 1;
  if (of_keys && !c.causal && !c.window && (c.sinks != Sinks::of_batch || c.batch == 1)) return true;
  if (pass == Pass::jvp || c.dropout_p != 0) return false;
  const bool forward = pass == Pass::forward, f16 = attention.precision == Precision::f16;
  if (!f16 && attention.precision != Precision::bf16) return false;
  if (forward ? attention.bias_correction == BiasCorrection::beta : attention.deterministic) return false;
  if (std::max(c.dim, c.dim_v) > (forward ? 128 : 64)) return false;
  if (mask == DType::boolean) return true;
  return forward ? mask == (f16 ? DType::f16 : DType::bf16) : mask != DType::f32;
}
// Whether the backend computes ALiBi in a call for heads of up to `dim` channels.
inline bool gpu_takes_alibi(Pass pass, const Attention& attention, int64_t dim) {
  if (tests_sm80()) return true;
  const bool sixteen_bits = attention.precision == Precision::bf16 || attention.precision == Precision::f16;
  const bool beta = pass == Pass::forward && attention.bias_correction == BiasCorrection::beta;
  return sixteen_bits && !beta && dim <= 128 && pass != Pass::jvp &&
         !(pass == Pass::backward && attention.deterministic);
}
// Whether the backend has dropout in a pass of a precision, in some calls.
inline bool gpu_has_dropout(Precision precision, Pass pass = Pass::forward) {
  if (!tests_sm80() && pass == Pass::jvp) return false;
  const bool sixteen_bits = precision == Precision::f16 || precision == Precision::bf16;
  return sixteen_bits || (tests_sm80() && (precision == Precision::f32 || precision == Precision::int8_f16));
}
// Whether the backend computes the ALiBi and the dropout of a case in a call.
inline bool gpu_takes_extras(const Case& c, Pass pass, const Attention& attention) {
  const bool alibi = c.alibi != Alibi::none, drops = c.dropout_p != 0;
  if (drops && !gpu_has_dropout(attention.precision, pass)) return false;
  return !(alibi || drops) || tests_sm80() ||
         (!(alibi && drops) && gpu_takes_alibi(pass, attention, std::max(c.dim, c.dim_v)));
}
// Whether the backend gives the gradient of a mask that is added to the logits.
inline bool gpu_gives_dmask(Precision precision) {
  return tests_sm80() && (precision == Precision::f32 || precision == Precision::f16 || precision == Precision::bf16);
}
// Whether 16-bit precisions take inputs of e4m3.
inline bool gpu_takes_e4m3_as_numbers() { return tests_sm80(); }

// What the name of a test tells of a bias correction.
inline std::string suffix_of(BiasCorrection bias_correction) {
  static const char* const kNames[] = {"", "_none", "_beta", "_exact_delta", "_gproj"};  // in octet.h's order
  return kNames[static_cast<int>(bias_correction)];
}

// Those of a list of kinds, each with a precision, that it computes.
template <class Kind>
std::vector<Kind> gpu_kinds(Pass pass, std::initializer_list<Kind> kinds) {
  std::vector<Kind> list;
  for (const Kind& kind : kinds)
    if (gpu_computes(pass, kind.precision)) list.push_back(kind);
  return list;
}

class GpuPlace : public Place {
 public:
  explicit GpuPlace(int device = 0) : device_(device) {
    check_cuda(cudaSetDevice(device));
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~GpuPlace() override {
    for (const auto& [host, copy] : copies_) cudaFree(copy);
    cudaFree(workspace_);
    cudaStreamDestroy(stream_);
  }

  Tensor tensor(const Buffer& buffer) override {
    Memory* memory = buffer.memory();
    unsigned char*& copy = copies_[memory];
    auto& bytes = memory->bytes();
    if (!copy) {
      check_cuda(cudaMalloc(reinterpret_cast<void**>(&copy), bytes.size()));
      check_cuda(cudaMemcpy(copy, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    Tensor t = buffer.view();
    t.data = copy + (static_cast<unsigned char*>(t.data) - bytes.data());
    t.device = OCTET_CUDA;
    t.device_index = device_;
    return t;
  }

  void* workspace(size_t bytes) override {
    cudaFree(workspace_);
    bytes_ = bytes;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&workspace_), bytes + 2 * kGuard));
    check_cuda(cudaMemset(workspace_, kPattern, bytes + 2 * kGuard));
    check_cuda(cudaMemset(workspace_ + kGuard, 0xff, bytes));
    check_cuda(cudaDeviceSynchronize());
    return workspace_ + kGuard;
  }

  void* stream() override { return stream_; }

  bool finish() override {
    check_cuda(cudaStreamSynchronize(stream_));
    for (const auto& [host, copy] : copies_)
      check_cuda(cudaMemcpy(host->bytes().data(), copy, host->bytes().size(), cudaMemcpyDeviceToHost));
    std::vector<unsigned char> all(bytes_ + 2 * kGuard);
    check_cuda(cudaMemcpy(all.data(), workspace_, all.size(), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kGuard; ++i)
      if (all[i] != kPattern || all[kGuard + bytes_ + i] != kPattern) return true;
    return false;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr unsigned char kPattern = 0x5a;
  int device_;
  cudaStream_t stream_ = nullptr;
  std::map<Memory*, unsigned char*> copies_;
  unsigned char* workspace_ = nullptr;
  size_t bytes_ = 0;
};

// Runs a pass whose tensors lie in a place.
template <class Call>
void call(const Attention& attention, const Call& arguments, GpuPlace& place) {
  const size_t bytes = workspace_size(attention, arguments);
  octet::run(attention, arguments, place.workspace(bytes), bytes, place.stream());
  EXPECT_FALSE(place.finish()) << "wrote beyond its workspace";
}

}  // namespace octet::test
