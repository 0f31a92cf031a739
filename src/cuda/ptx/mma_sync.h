// Matrix products of one warp (mma.sync) and loads of their operands from shared memory (ldmatrix), on every GPU since
// compute capability 8.0. Operands and sums have the layouts of fragment/accumulator.h.
#pragma once
#include <cstdint>

#include "cuda/ptx/types.h"

namespace octet::cuda::ptx {

// mma.sync.aligned.m16n8k16.row.col.f32: d += a b, with a of 16 x 16, b of 16 x 8 and d of 16 x 8. PTX ISA, 9.7.14.5.8.
template <class T>
__device__ void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b);
template <>
__device__ inline void mma_m16n8k16<F16>(float* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void mma_m16n8k16<Bf16>(float* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.sync.aligned.m16n8k16.row.col.f16: d = a b + c in f16, which is rounded once. A register has two sums of a row.
__device__ inline void mma_m16n8k16_f16(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same for c = 0: no register of d has to be set before.
__device__ inline void mma_m16n8k16_f16_from_zero(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %8};"
      : "=r"(d[0]), "=r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
}

// mma.sync.aligned.m16n8k32.row.col.s32: d += a b, with a of 16 x 32 and b of 32 x 8 bytes, and d of 16 x 8. A fragment
// of bytes has four in each register where one of 16 bits has two. PTX ISA, 9.7.14.5.10.
template <class A, class B>
__device__ void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b);
template <>
__device__ inline void mma_m16n8k32<S8, S8>(int* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ inline void mma_m16n8k32<U8, S8>(int* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same for d = a b + begin: no register of d has to be set before.
template <class A, class B>
__device__ void mma_m16n8k32(int* d, const uint32_t* a, const uint32_t* b, int begin);
template <>
__device__ inline void mma_m16n8k32<S8, S8>(int* d, const uint32_t* a, const uint32_t* b, int begin) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(begin));
}
template <>
__device__ inline void mma_m16n8k32<U8, S8>(int* d, const uint32_t* a, const uint32_t* b, int begin) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(begin));
}

// mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32: the same with sums in float32. Since compute capability 8.9;
// tensor cores have it on 8.9 and 12.0, and elsewhere the operands are converted to f16 first. PTX ISA, 9.7.14.5.10.
__device__ inline void mma_m16n8k32_e4m3(float* d, const uint32_t* a, const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix.m8n8.x4: a warp loads four 8 x 8 matrices of 16 bits, matrix i into x[i]. Lane l gives the shared address of
// row l mod 8 of matrix l / 8. Thread t gets elements 2 (t mod 4) and the next of row t / 4. PTX ISA, 9.7.14.5.15.
__device__ inline void ldmatrix(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// The same with each matrix transposed: thread t gets elements t / 4 of rows 2 (t mod 4) and the next.
__device__ inline void ldmatrix_trans(uint32_t (&x)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

}  // namespace octet::cuda::ptx
