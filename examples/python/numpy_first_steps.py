"""Forward, backward and derivative of attention with numpy alone, and what a precision costs on the data at hand.

python examples/python/numpy_first_steps.py
"""

import numpy as np
import octet

random = np.random.default_rng(0)
q, do = (random.standard_normal((1, 8, 512, 64)).astype(np.float32) for _ in range(2))
k, v = (random.standard_normal((1, 2, 512, 64)).astype(np.float32) for _ in range(2))  # a head of k serves four of q

o, lse = octet.attention(q, k, v, precision="int8", causal=True, return_lse=True)
dq, dk, dv = octet.attention_vjp(q, k, v, do, precision="int8", causal=True)
o, to = octet.attention_jvp(q, k, v, tq=q, tk=k, tv=v, causal=True)

for precision in ("bf16", "int8", "fp8"):
    errors = octet.check(q, k, v, do=do, precision=precision, causal=True)
    print(f"{precision:>5}:", ", ".join(f"{name} {error.rel_l2:.4f}" for name, error in errors.items()))

print(octet.explain(q, k, v, precision="int8", causal=True))
try:
    octet.attention(q, k[:, :, :500], v[:, :, :500], causal=True)
except octet.InvalidArgument as rejection:
    print("rejected:", rejection)
