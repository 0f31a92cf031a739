// This class sets how the processor computes with floats during a call, whatever the caller has set.
#pragma once
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace octet {

// While it lives, this thread and the threads that it starts round to nearest, keep subnormal numbers and raise no
// signal. XLA calls with subnormal operands read as 0, and so does torch after torch.set_flush_denormal(True): f16 and
// e4m3 tensors hold such numbers, and reading them passes through such floats.
class DefaultFloatEnvironment {
 public:
#ifdef __x86_64__
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;

 private:
  unsigned saved_;
#endif
};

}  // namespace octet
