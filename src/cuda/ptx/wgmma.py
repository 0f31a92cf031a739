"""Writes wgmma.h: one function per warpgroup matrix instruction (PTX ISA, 9.7.15 wgmma.mma_async).

Only the lists of registers differ from one size to the next, so a program writes them. Usage: wgmma.py OUTPUT
"""

import pathlib
import sys

# Columns of the accumulator that the tiles of sm90/config.h need.
SIZES = [64, 80, 96, 112, 128, 144, 160, 176, 192, 256]
TYPES = {"Bf16": "bf16", "F16": "f16"}

HEAD = """// Written by src/cuda/ptx/wgmma.py; do not edit.
//
// d[64 x N] (+)= a[64 x 16] b[16 x N], float32 accumulators. ss: a and b in shared memory, given by descriptors; rs: a
// in registers. TransposeA/B: 0 where the operand's rows run along the index of summation, 1 where they run across it.
// `accumulate` false starts from zero. Asynchronous: see wgmma_commit and wgmma_wait in ptx/warpgroup.h.
#pragma once
#include <cstdint>

#include "cuda/ptx/types.h"

namespace octet::cuda::ptx {

template <class Operand, int N>
struct Wgmma;
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


def functions(tag, type_name, n):
    count = n // 2
    return FUNCTIONS.format(
        tag=tag, type=type_name, n=n, count=count,
        d=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
        a_ss=count, b_ss=count + 1, after_ss=count + 2, ta_ss=count + 3, tb_ss=count + 4,
        a_rs=", ".join(f"%{count + i}" for i in range(4)), b_rs=count + 4, after_rs=count + 5, tb_rs=count + 6)


def main():
    body = "".join(functions(tag, name, n) for tag, name in TYPES.items() for n in SIZES)
    pathlib.Path(sys.argv[1]).write_text(HEAD + body + "\n}  // namespace octet::cuda::ptx\n")


main()
