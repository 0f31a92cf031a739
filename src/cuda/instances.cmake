# The kernels, one source a list row: each compiles a while, and side by side they take less. octet_instance(PASS NAME
# HEADER DECLARATION) writes the source NAME.cu of a pass such as sm80/fwd, which instantiates what HEADER of its folder
# defines, and adds it to the sources of its backend.
function(octet_instance pass name header declaration)
  string(REPLACE "/" ";" folders ${pass})
  list(GET folders 0 backend)
  set(source ${generated}/cuda/${pass}/${name}.cu)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[#include "cuda/@pass@/@header@"

namespace octet::cuda::@backend@ {

template @declaration@;

}  // namespace octet::cuda::@backend@
]])
  target_sources(octet_cuda_${backend} PRIVATE ${source})
endfunction()

foreach(precision Bf16 F16 Bf16F16Compute Int8F16)
  octet_instance(sm90/fwd ${precision} kernel.h "Kernel forward_kernel<Precision${precision}>(int64_t, int64_t)")
endforeach()
foreach(precision Bf16 F16)
  octet_instance(sm90/fwd ${precision}_beta kernel.h
    "Kernel forward_kernel<WithBeta<Precision${precision}>>(int64_t, int64_t)")
endforeach()
foreach(precision Int8 Int8Fp8 Fp8 Fp8Prequantized Fp8Unscaled)
  octet_instance(sm90/fwd ${precision} kernel_8bit.h
    "Kernel forward_8bit_kernel<Precision${precision}>(int64_t, int64_t)")
endforeach()
octet_instance(sm90/bwd Bf16 instances.h "Kernel backward_kernel<Bf16, Parts::first>(int64_t, Sums)")
octet_instance(sm90/bwd F16 instances.h "Kernel backward_kernel<F16, Parts::first>(int64_t, Sums)")
octet_instance(sm90/bwd F16_further instances.h "Kernel backward_kernel<F16, Parts::further>(int64_t, Sums)")

foreach(precision Bf16 F16 F32 Bf16F16Compute)
  foreach(general false true)
    octet_instance(sm80/fwd ${precision}_general_${general} kernel.h
      "ForwardKernel forward_kernel_of<Precision${precision}, ${general}, false>(int64_t)")
    if(NOT precision STREQUAL Bf16F16Compute)
      octet_instance(sm80/fwd ${precision}_few_general_${general} kernel.h
        "ForwardKernel forward_kernel_of<Precision${precision}, ${general}, true>(int64_t)")
    endif()
  endforeach()
  if(NOT precision STREQUAL F32)
    octet_instance(sm80/fwd ${precision}_masked kernel.h
      "ForwardKernel masked_forward_kernel_of<Precision${precision}>(int64_t)")
  endif()
endforeach()
foreach(type Bf16 F16)
  foreach(kind small large masked general)
    octet_instance(sm80/bwd ${type}_${kind} kernel.h "BackwardKernel backward_kernel<${type}, BackwardKind::${kind}>(int)")
  endforeach()
  foreach(general false true)
    octet_instance(sm80/jvp ${type}_general_${general} kernel.h "JvpKernel jvp_kernel<${type}, ${general}>(int64_t)")
  endforeach()
endforeach()
foreach(general false true)
  octet_instance(sm80/bwd F32_general_${general} f32_entry.h
    "void launch_f32<${general}>(int, const F32Params&, int64_t, int64_t, cudaStream_t)")
endforeach()
