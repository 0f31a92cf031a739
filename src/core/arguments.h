// Shared by the functions of octet.h beside attention: each of their tensors is validated, and so is the device that
// they are on.
#pragma once
#include <octet/octet.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "core/quantization.h"

namespace octet {

View view_of(const octet_tensor* t, const char* label, bool output);

// A tensor whose elements are the numbers themselves.
View plain(const octet_tensor* t, const char* label, bool output);

// A part of a quantization, which lies where the codes do.
View part_of(const octet_tensor& codes, const octet_tensor* t, const char* label, bool output);

// "cuda:0"
std::string device_of(const octet_tensor& t);

// Rejects a tensor that is not on the device of another, `others`: "x is".
void expect_beside(const octet_tensor& t, const char* label, const octet_tensor& other, const char* others);

// Returns the GPU and the stream that a call works on, or nothing where it works on the CPU.
std::optional<cuda::Place> place_of(const octet_tensor& t, const char* label, void* stream);

using Labelled = std::pair<const View*, const char*>;

void expect_memory_of_their_own(std::initializer_list<Labelled> outputs, std::initializer_list<Labelled> inputs);

}  // namespace octet
