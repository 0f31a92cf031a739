/* octet.h and octet_study.h are C11: every struct can be made from its macro, as a C program would. */
#include <octet/octet.h>
#include <octet/octet_study.h>

int main(void) {
  octet_tensor tensor = OCTET_TENSOR_INIT;
  octet_attention attention = OCTET_ATTENTION_INIT;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  octet_rounding rounding = OCTET_ROUNDING_INIT;
  octet_quantization quantization = OCTET_QUANTIZATION_INIT;
  octet_rope rope = OCTET_ROPE_INIT;
  size_t bytes = 0;
  tensor.quantization = &quantization;
  quantization.scale = &tensor;
  attention.rounding = &rounding;
  arguments.q = &tensor;
  return (int)octet_workspace_size(&attention, &arguments, &bytes) + (int)rope.size;
}
