"""Writes wgmma.h: one function per warpgroup matrix instruction (PTX ISA, 9.7.15 wgmma.mma_async).

Only the lists of registers differ from one size to the next, so a program writes them. Usage: wgmma.py OUTPUT
"""

import pathlib
import sys

# Columns of the accumulator that the tiles of sm90/config.h need.
SIZES = [32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256]
TYPES = {"Bf16": "bf16", "F16": "f16"}
# 8-bit operands: of a and b, the accumulator in C++ and in PTX, sizes.
TYPES_8BIT = {
    "S8, S8": ("s8", "s8", "int", "s32", [64, 80, 96, 112, 128, 160, 192, 256]),
    "U8, S8": ("u8", "s8", "int", "s32", [64, 128]),
    "E4m3, E4m3": ("e4m3", "e4m3", "float", "f32", [64, 72, 96, 128, 136, 160, 192, 256]),
}

HEAD = """// Written by src/cuda/ptx/wgmma.py; do not edit.
//
// Wgmma: d[64 x N] (+)= a[64 x 16] b[16 x N], float32 accumulators. ss: a and b in shared memory, given by descriptors;
// rs: a in registers. TransposeA/B: 0 where the operand's rows run along the index of summation, 1 where they run
// across it. Wgmma8Bit: the same with 8-bit operands, 32 deep, whose rows run along the index of summation.
// `accumulate` false starts from zero. Asynchronous: see wgmma_commit and wgmma_wait in ptx/warpgroup.h.
#pragma once
#include <cstdint>

#include "cuda/ptx/types.h"

namespace octet::cuda::ptx {

template <class Operand, int N>
struct Wgmma;
template <class A, class B, int N>
struct Wgmma8Bit;
"""

FUNCTIONS = """
template <>
struct Wgmma<{tag}, {n}> {{
  template <int TransposeA, int TransposeB>
  static __device__ void ss(float (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after_ss}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{a_ss}, %{b_ss}, p, 1, 1, %{ta_ss}, %{tb_ss};\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(TransposeA), "n"(TransposeB));
  }}
  template <int TransposeB>
  static __device__ void rs(float (&d)[{count}], const uint32_t* a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after_rs}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, {{{a_rs}}}, %{b_rs}, p, 1, 1, %{tb_rs};\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(TransposeB));
  }}
}};
"""

FUNCTIONS_8BIT = """
template <>
struct Wgmma8Bit<{tags}, {n}> {{
  using Sum = {sum};
  static __device__ void ss({sum} (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after_ss}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.{type} {{{d}}}, %{a_ss}, %{b_ss}, p{signs};\\n}}\\n"
        : {outputs}
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
  static __device__ void rs({sum} (&d)[{count}], const uint32_t* a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after_rs}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k32.{type} {{{d}}}, {{{a_rs}}}, %{b_rs}, p{signs};\\n}}\\n"
        : {outputs}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }}
}};
"""


def functions(tag, type_name, n):
    count = n // 2
    return FUNCTIONS.format(
        tag=tag, type=type_name, n=n, count=count,
        d=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        a_ss=count, b_ss=count + 1, after_ss=count + 2, ta_ss=count + 3, tb_ss=count + 4,
        a_rs=", ".join(f"%{count + i}" for i in range(4)), b_rs=count + 4, after_rs=count + 5, tb_rs=count + 6)


def functions_8bit(tags, a, b, sum_type, sum_name, n):
    count = n // 2
    return FUNCTIONS_8BIT.format(
        tags=tags, type=f"{sum_name}.{a}.{b}", sum=sum_type, n=n, count=count,
        signs=", 1, 1" if sum_type == "float" else "",
        d=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+{"f" if sum_type == "float" else "r"}"(d[{i}])' for i in range(count)),
        a_ss=count, b_ss=count + 1, after_ss=count + 2,
        a_rs=", ".join(f"%{count + i}" for i in range(4)), b_rs=count + 4, after_rs=count + 5)


def main():
    body = "".join(functions(tag, name, n) for tag, name in TYPES.items() for n in SIZES)
    body += "".join(functions_8bit(tags, *names, n) for tags, (*names, sizes) in TYPES_8BIT.items() for n in sizes)
    pathlib.Path(sys.argv[1]).write_text(HEAD + body + "\n}  // namespace octet::cuda::ptx\n")


main()
