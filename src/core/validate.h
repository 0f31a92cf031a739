// From the arguments of a call to its problem: the only place that validates shapes, dtypes, strides and options.
#pragma once
#include <octet/octet.h>

#include <cstddef>

#include "core/problem.h"

namespace octet {

// Validates the arguments. Throws Failure naming the value found and the values allowed.
Problem validate(const octet_attention* attention, const octet_arguments* arguments);

// Rejects a workspace that lies in the memory of a tensor of the call.
void expect_workspace_apart(const Problem& problem, const void* workspace, std::size_t bytes);

}  // namespace octet
