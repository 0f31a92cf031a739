#include "core/error.h"
#include "core/names.h"
#include "core/validate_parts.h"

namespace octet {

void expect_cu_seqlens(const View& cu_seqlens, const char* label) {
  expect_dtype(cu_seqlens, label, {OCTET_I32});
  const int64_t n = cu_seqlens.shape[3];
  if (n < 2 || cu_seqlens.elements() != n || cu_seqlens.stride[3] != 1)
    invalid(label, ": shape ", shape_text(cu_seqlens.shape), " and last stride ", cu_seqlens.stride[3],
            ", expected [1, 1, 1, sequences + 1], contiguous");
}

void expect_ascending(const View& cu_seqlens, const char* label, int64_t tokens, const char* of) {
  const int64_t count = cu_seqlens.shape[3] - 1;
  const auto* const cu = static_cast<const int32_t*>(cu_seqlens.data);
  if (cu[0] != 0 || cu[count] != tokens)
    invalid(label, ": runs from ", cu[0], " to ", cu[count], ", expected 0 to the ", tokens, " tokens of ", of);
  for (int64_t s = 0; s < count; ++s)
    if (cu[s + 1] < cu[s])
      invalid(label, ": falls from ", cu[s], " to ", cu[s + 1], " at sequence ", s, "; must ascend");
}

}  // namespace octet
