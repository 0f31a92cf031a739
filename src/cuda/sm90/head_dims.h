// The head dims of the kernels of sm90.
#pragma once

namespace octet::cuda::sm90 {

// The head dims of a kernel: it multiplies as many channels of q and k, and of v. Smaller tensors are padded with
// zeros.
template <int Dim_, int DimV_ = Dim_>
struct HeadDims {
  static constexpr int kDim = Dim_, kDimV = DimV_;
};
using Dims64 = HeadDims<64>;
using Dims80 = HeadDims<80>;
using Dims96 = HeadDims<96>;
using Dims128 = HeadDims<128>;
using Dims160 = HeadDims<160>;
using Dims192x128 = HeadDims<192, 128>;
using Dims192 = HeadDims<192>;
using Dims256 = HeadDims<256>;
constexpr int kMostDim = 256;

// Head dims that kernels are built for. A call takes the first that are not below its own.
template <class... Dims>
struct DimsList {};

// What a kernel of 16 bits has beside products and a softmax, and the head dims of those that have it. The numbers of a
// mask tensor are bf16 (`mask`) or f16; a forward kernel has those of its q and k.
enum class Extra { none, alibi, dropout, mask, f16_mask };
constexpr bool has_mask(Extra extra) { return extra == Extra::mask || extra == Extra::f16_mask; }
using ExtraDims = DimsList<Dims64, Dims128>;
constexpr int kMaxExtraDim = 128;
constexpr int kMaxBackwardMaskDim = 64;

}  // namespace octet::cuda::sm90
