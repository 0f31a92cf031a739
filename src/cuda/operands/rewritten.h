// Plans of problems that are solved in another form: operands are rewritten in the workspace before a pass runs.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "core/backend.h"

namespace octet::cuda {

// Returns the answer to a problem from that to its other form. `workspace` is that of `rewritten`, which has the other
// problem(), the bytes() that it takes of the workspace, a note() for the kernel's name, and writes what that problem
// reads by preprocess(stream) and the results of the given one by deliver(stream).
template <class Rewritten, class PlanOf>
Answer plan_of_rewritten(std::shared_ptr<const Rewritten> rewritten, void* workspace, const PlanOf& plan_of) {
  Answer answer =
      plan_of(rewritten->problem(), workspace ? static_cast<unsigned char*>(workspace) + rewritten->bytes() : nullptr);
  if (!answer.plan) return answer;
  const std::size_t bytes = rewritten->bytes() + answer.plan->workspace;
  auto name = [rewritten, kernel = std::move(answer.plan->kernel)] { return kernel() + rewritten->note(); };
  return Plan{bytes, std::move(name),
              [rewritten, run = std::move(answer.plan->run)](void* stream) {
                rewritten->preprocess(static_cast<cudaStream_t>(stream));
                run(stream);
                rewritten->deliver(static_cast<cudaStream_t>(stream));
              },
              std::move(answer.plan->tiles)};
}

}  // namespace octet::cuda
