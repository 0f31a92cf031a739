/* Attention of one query over two keys, from C: o must be the weighted mean of the two values. */
#include <math.h>
#include <octet/octet.h>
#include <stdio.h>
#include <stdlib.h>

enum { kDim = 8, kKeys = 2 };

static octet_tensor tensor(float* data, int64_t tokens, int64_t dim) {
  octet_tensor t = OCTET_TENSOR_INIT;
  t.dtype = OCTET_F32;
  t.data = data;
  t.shape[0] = t.shape[1] = 1;
  t.shape[2] = tokens;
  t.shape[3] = dim;
  t.stride[0] = t.stride[1] = tokens * dim;
  t.stride[2] = dim;
  t.stride[3] = 1;
  return t;
}

int main(void) {
  float q[kDim] = {1}, k[kKeys * kDim] = {2}, v[kKeys * kDim], o[kDim], lse[1];
  for (int c = 0; c < kDim; ++c) v[c] = 1.f, v[kDim + c] = -1.f;
  octet_tensor tq = tensor(q, 1, kDim), tk = tensor(k, kKeys, kDim), tv = tensor(v, kKeys, kDim);
  octet_tensor to = tensor(o, 1, kDim), tl = tensor(lse, 1, 1);
  octet_attention attention = OCTET_ATTENTION_INIT;
  octet_arguments arguments = OCTET_ARGUMENTS_INIT;
  attention.precision = OCTET_PRECISION_F32;
  attention.scale = 1.f;
  arguments.q = &tq, arguments.k = &tk, arguments.v = &tv, arguments.o = &to, arguments.lse = &tl;

  size_t bytes = 0;
  octet_status status = octet_workspace_size(&attention, &arguments, &bytes);
  void* workspace = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
  if (status == OCTET_OK) status = octet_run(&attention, &arguments, workspace, bytes, NULL);
  free(workspace);
  if (status != OCTET_OK) {
    fprintf(stderr, "octet: %s\n", octet_message());
    return 1;
  }
  /* Logits 2 and 0: o = tanh(1), lse = log(e^2 + 1). */
  const double o_error = fabs(o[0] - tanh(1.0)), lse_error = fabs(lse[0] - log(exp(2.0) + 1.0));
  printf("octet %s from C: o %.6f, lse %.6f\n", octet_version(), o[0], lse[0]);
  return o_error < 1e-5 && lse_error < 1e-5 ? 0 : 1;
}
