# The kernels, in sources of one to five: side by side they take less time, and each source reads its headers for itself,
# which takes half as long as a kernel of sm90. octet_instance(PASS NAME HEADER DECLARATION) adds a kernel that HEADER
# defines to the source NAME.cu of a pass such as sm80/fwd; octet_write_instances() writes the sources, for the backend or
# for the TARGET that follows a declaration.
function(octet_instance pass name header declaration)
  get_property(sources DIRECTORY PROPERTY octet_instances)
  if(NOT ${pass}/${name} IN_LIST sources)
    set_property(DIRECTORY APPEND PROPERTY octet_instances ${pass}/${name})
    set_property(DIRECTORY PROPERTY octet_header_of_${pass}/${name} ${pass}/${header})
    string(REGEX REPLACE "/.*" "" backend ${pass})
    set(target octet_cuda_${backend} ${ARGN})
    list(GET target -1 target)
    set_property(DIRECTORY PROPERTY octet_target_of_${pass}/${name} ${target})
  endif()
  set_property(DIRECTORY APPEND_STRING PROPERTY octet_instances_of_${pass}/${name} "template ${declaration};\n")
endfunction()

function(octet_write_instances)
  get_property(sources DIRECTORY PROPERTY octet_instances)
  foreach(name ${sources})
    string(REGEX REPLACE "/.*" "" backend ${name})
    get_property(header DIRECTORY PROPERTY octet_header_of_${name})
    get_property(instances DIRECTORY PROPERTY octet_instances_of_${name})
    set(source ${generated}/cuda/${name}.cu)
    file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[#include "cuda/@header@"

namespace octet::cuda::@backend@ {

@instances@
}  // namespace octet::cuda::@backend@
]])
    get_property(target DIRECTORY PROPERTY octet_target_of_${name})
    target_sources(${target} PRIVATE ${source})
  endforeach()
endfunction()

foreach(precision Bf16 F16 Bf16F16Compute Int8F16)
  octet_instance(sm90/fwd ${precision} kernel.h "Kernel forward_kernel<Precision${precision}>(int64_t, int64_t)")
endforeach()
foreach(precision Bf16 F16 Bf16F16Compute)
  foreach(extra Alibi Dropout Mask)
    octet_instance(sm90/fwd ${precision}_with kernel.h
      "Kernel forward_kernel<With${extra}<Precision${precision}>>(int64_t, int64_t)")
  endforeach()
endforeach()
foreach(precision Bf16 F16)
  octet_instance(sm90/fwd ${precision}_with kernel.h
    "Kernel forward_kernel<WithBeta<Precision${precision}>>(int64_t, int64_t)")
  octet_instance(sm90/fwd ${precision}_with kernel.h
    "Kernel forward_kernel<WithFewKeys<Precision${precision}>>(int64_t, int64_t)")
endforeach()
foreach(precision Int8 Int8Fp8 Fp8 Fp8Prequantized Fp8Unscaled)
  string(REGEX MATCH "^(Int8|Fp8)" qk ${precision})
  octet_instance(sm90/fwd ${qk} kernel_8bit.h
    "Kernel forward_8bit_kernel<Precision${precision}>(int64_t, int64_t)")
endforeach()
octet_instance(sm90/bwd Bf16 instances.h "Kernel backward_kernel<Bf16, Bins::first>(int64_t, int64_t, Sums)")
octet_instance(sm90/bwd F16 instances.h "Kernel backward_kernel<F16, Bins::first>(int64_t, int64_t, Sums)")
octet_instance(sm90/bwd F16_further instances.h "Kernel backward_kernel<F16, Bins::further>(int64_t, int64_t, Sums)")
foreach(instance "Bf16;first" "F16;first" "F16;further")
  list(GET instance 0 type)
  list(GET instance 1 bins)
  foreach(extra alibi dropout mask f16_mask)
    octet_instance(sm90/bwd ${type}_${bins}_with instances.h
      "Kernel backward_kernel_with<${type}, Bins::${bins}, Extra::${extra}>(int64_t, int64_t)")
  endforeach()
endforeach()
foreach(type Bf16 F16)
  octet_instance(sm90/jvp ${type} kernel.h "Kernel jvp_kernel<${type}>(int64_t, int64_t)")
endforeach()

# sm80: which kernels there are is said in sm80/kinds.h and by the choose.cu of each pass.
foreach(precision Bf16 F16 F32 Bf16F16Compute Int8F16 Int8Training Int8 Int8Fp8InF16 Fp8InF16 Fp8RawInF16)
  foreach(logits plain masked general)
    foreach(rows queries pairs pages)
      if(NOT "${precision}_${logits}" MATCHES "^(F32|Int8|.*Fp8.*)_masked$" AND NOT "${logits}_${rows}" MATCHES "^masked_pa" AND
         NOT "${precision}_${rows}" MATCHES "^(F32|Int8F16)_pages$" AND NOT "${precision}_${rows}" MATCHES "^(Bf16F16Compute|Int8Training|Int8|.*Fp8.*)_pa.*$")
        octet_instance(sm80/fwd ${precision}_${rows} kernel.h
          "ForwardKernel forward_kernel_of<Precision${precision}, Logits::${logits}, TileRows::${rows}>(int64_t)")
      endif()
    endforeach()
  endforeach()
endforeach()
foreach(precision Int8Fp8InE4m3 Fp8InE4m3 Fp8RawInE4m3)
  foreach(logits plain general)
    octet_instance(sm80/fwd ${precision}_queries kernel.h
      "ForwardKernel forward_kernel_of<Precision${precision}, Logits::${logits}, TileRows::queries>(int64_t)"
      octet_cuda_sm80_e4m3)
  endforeach()
endforeach()
octet_instance(sm80/fwd Int8F16_doubled kernel.h
  "ForwardKernel forward_kernel_of<PrecisionInt8F16, Logits::plain, TileRows::doubled>(int64_t)")
octet_instance(sm80/fwd Int8F16Sums_queries kernel.h
  "ForwardKernel forward_kernel_of<PrecisionInt8F16Sums, Logits::plain, TileRows::queries>(int64_t)")
foreach(precision Bf16 F16)
  octet_instance(sm80/fwd ${precision}_half_queries kernel.h
    "ForwardKernel forward_kernel_of<Precision${precision}, Logits::plain, TileRows::half_queries>(int64_t)")
  foreach(logits plain general)
    foreach(rows few_pairs few_pages)
      octet_instance(sm80/fwd ${precision}_${rows} kernel.h
        "ForwardKernel forward_kernel_of<Precision${precision}, Logits::${logits}, TileRows::${rows}>(int64_t)")
    endforeach()
  endforeach()
endforeach()
foreach(logits plain general)
  octet_instance(sm80/fwd Codes_pages kernel.h
    "ForwardKernel forward_kernel_of<PrecisionCodes, Logits::${logits}, TileRows::pages>(int64_t)")
endforeach()
foreach(type Bf16 F16)
  foreach(logits plain masked general)
    foreach(memory small large)
      if(NOT "${logits}_${memory}" STREQUAL general_large)
        octet_instance(sm80/bwd ${type}_${memory} kernel.h
          "BackwardKernel backward_kernel<${type}, Logits::${logits}, SharedMemory::${memory}>(int)")
      endif()
    endforeach()
  endforeach()
  foreach(logits masked general)
    octet_instance(sm80/bwd Dmask_${type} dmask_kernel.h
      "DmaskKernel dmask_kernel<${type}, Logits::${logits}>(int)")
  endforeach()
endforeach()
octet_instance(sm80/bwd Int8 kernel.h
  "BackwardKernel int8_backward_kernel<Logits::plain, SharedMemory::large>(int)")
foreach(logits plain general)
  octet_instance(sm80/bwd Blocks kernel.h
    "BackwardKernel block_backward_kernel<Logits::${logits}>(int)")
  octet_instance(sm80/bwd Int8 kernel.h
    "BackwardKernel int8_backward_kernel<Logits::${logits}, SharedMemory::small>(int)")
  foreach(instance "Bf16;all" "Bf16;some" "F16;all" "F16;some" "float;some")
    list(GET instance 0 type)
    list(GET instance 1 tangents)
    octet_instance(sm80/jvp ${type}_${tangents} kernel.h
      "JvpKernel jvp_kernel<${type}, Logits::${logits}, Tangents::${tangents}>(int64_t)")
  endforeach()
  octet_instance(sm80/bwd F32_${logits} f32_entry.h
    "void launch_f32<Logits::${logits}>(int, const F32Params&, int64_t, int64_t, cudaStream_t)")
endforeach()

octet_write_instances()
