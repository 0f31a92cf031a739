// The C ABI: every function validates, selects, runs, and turns exceptions into a status and a message.
#include <octet/octet.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "core/append.h"
#include "core/backend.h"
#include "core/error.h"
#include "core/float_environment.h"
#include "core/info.h"
#include "core/names.h"
#include "core/quantization.h"
#include "core/tuning.h"
#include "core/validate.h"

namespace {

using namespace octet;

thread_local std::string last_message;

void remember(const char* message) noexcept {
  try {
    last_message = message;
  } catch (const std::bad_alloc&) {
    last_message.clear();
  }
}

template <class Body>
octet_status guarded(Body&& body) noexcept {
  [[maybe_unused]] const DefaultFloatEnvironment defaults;
  try {
    body();
    return OCTET_OK;
  } catch (const Failure& failure) {
    remember(failure.what());
    return failure.status();
  } catch (const std::bad_alloc&) {
    remember("out of host memory");
  } catch (const std::exception& error) {
    remember(error.what());
  }
  return OCTET_FAILURE;
}

void copy_out(const std::string& from, char* text, size_t capacity, size_t* length) {
  if (!length) invalid("length: NULL");
  if (!text && capacity) invalid("text: NULL with capacity ", capacity);
  *length = from.size();
  if (!capacity) return;
  const size_t n = std::min(capacity - 1, from.size());
  std::memcpy(text, from.data(), n);
  text[n] = 0;
}

}  // namespace

extern "C" {

const char* octet_message(void) { return last_message.c_str(); }

const char* octet_version(void) { return OCTET_VERSION; }

octet_status octet_workspace_size(const octet_attention* attention, const octet_arguments* arguments, size_t* bytes) {
  return guarded([&] {
    if (!bytes) invalid("bytes: NULL");
    Problem problem = validate(attention, arguments);
    find_tile(problem);
    *bytes = select(problem, attention->backend, nullptr).workspace;
  });
}

octet_status octet_run(const octet_attention* attention, const octet_arguments* arguments, void* workspace,
                       size_t bytes, void* stream) {
  return guarded([&] {
    Problem problem = validate(attention, arguments);
    find_tile(problem);
    const bool aligned = reinterpret_cast<uintptr_t>(workspace) % 64 == 0;
    const Plan plan = select(problem, attention->backend, aligned ? workspace : nullptr);
    if (stream && problem.device == OCTET_CPU) invalid("stream: given with CPU tensors; pass NULL");
    const size_t needed = plan.workspace;
    if (bytes < needed)
      throw Failure(OCTET_WORKSPACE_TOO_SMALL,
                    text("workspace: ", bytes, " bytes, needed: ", needed, " (octet_workspace_size)"));
    if (needed && !workspace) invalid("workspace: NULL, needed: ", needed, " bytes");
    if (!aligned) invalid("workspace: not aligned to 64 bytes");
    expect_workspace_apart(problem, workspace, needed);
    plan.run(stream);
  });
}

octet_status octet_explain(const octet_attention* attention, const octet_arguments* arguments, char* out,
                           size_t capacity, size_t* length) {
  return guarded([&] {
    Problem problem = validate(attention, arguments);
    find_tile(problem);
    copy_out(explain(problem, attention->backend), out, capacity, length);
  });
}

octet_status octet_tiles(const octet_attention* attention, const octet_arguments* arguments, char* out, size_t capacity,
                         size_t* length) {
  return guarded([&] {
    const Problem problem = validate(attention, arguments);
    if (attention->tile) invalid("tile: found ", quoted(attention->tile), ", allowed: NULL, as all tiles are listed");
    copy_out(tiles_json(problem, attention->backend), out, capacity, length);
  });
}

octet_status octet_info(char* out, size_t capacity, size_t* length) {
  return guarded([&] { copy_out(info_json(), out, capacity, length); });
}

octet_status octet_quantize(const octet_tensor* x, const octet_rope* rope, octet_tensor* codes,
                            octet_tensor* statistics, void* stream) {
  return guarded([&] { quantize(x, rope, codes, statistics, stream); });
}

octet_status octet_dequantize(const octet_tensor* codes, octet_tensor* x, void* stream) {
  return guarded([&] { dequantize(codes, x, stream); });
}

octet_status octet_apply_rope(const octet_rope* rope, const octet_tensor* x, uint32_t inverse, octet_tensor* y,
                              void* stream) {
  return guarded([&] { apply_rope(rope, x, inverse, y, stream); });
}

octet_status octet_append(const octet_append_arguments* arguments, void* stream) {
  return guarded([&] { append(arguments, stream); });
}

octet_status octet_scale_groups(uint32_t operand, uint32_t granularity, int64_t block, int64_t tokens,
                                int64_t* groups) {
  return guarded([&] {
    if (!groups) invalid("groups: NULL");
    *groups = scale_groups(operand, granularity, block, tokens);
  });
}

octet_status octet_logit_error(const octet_tensor* q_statistics, const octet_tensor* k_statistics, float scale,
                               octet_tensor* error, void* stream) {
  return guarded([&] { logit_error(q_statistics, k_statistics, scale, error, stream); });
}

}  // extern "C"
