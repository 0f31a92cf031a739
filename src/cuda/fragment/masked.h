// A precision with a mask tensor: numbers of 16 bits that are added to logits.
#pragma once
#include "cuda/fragment/precision.h"

namespace octet::cuda {

template <class Precision>
struct WithMask : Precision {};
template <class Precision>
constexpr bool kHasMask = false;
template <class Precision>
constexpr bool kHasMask<WithMask<Precision>> = true;
template <class Precision>
constexpr bool kCompensated<WithMask<Precision>> = kCompensated<Precision>;

// The maximum that rows start from where a mask tensor may hide all keys of a tile, in base 2: exponentials over it of
// keys that are not hidden do not fit, and those of hidden ones are 0.
constexpr float kLeastMax = -0x1p100f;

}  // namespace octet::cuda
