"""Decoding of many sequences that begin with the same prompt: attention over the prompt is computed once for all, and
merged with attention over what follows by the log-sum-exp of both (cascade attention).

    examples/python/shared_prefix.py [--prompt TOKENS] [--steps N]
"""

import argparse
import time

import octet
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BATCH, HEADS, KV_HEADS, DIM, PAGE = 16, 8, 2, 64, 16


def merged(first, second):
    """(o, lse) of attention over two sets of keys, from (o, lse) over each. Where a query sees none, lse is -inf."""
    (o1, lse1), (o2, lse2) = first, second
    lse = torch.logaddexp(lse1, lse2)
    o = o1.float() * (lse1 - lse).exp()[..., None] + o2.float() * (lse2 - lse).exp()[..., None]
    return o.to(o1.dtype), lse


def seconds(call, times=10):
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048, help="a multiple of the page size, 16")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    shared, own = options.prompt // PAGE, -(-options.steps // PAGE)
    pages = [torch.zeros(shared + BATCH * own, KV_HEADS, PAGE, DIM, device=DEVICE, dtype=TYPE) for _ in "kv"]
    numbers = torch.arange(len(pages[0]), dtype=torch.int32, device=DEVICE)
    prompt_table, own_table = numbers[:shared], numbers[shared:].view(BATCH, own)
    table = torch.cat([prompt_table.expand(BATCH, shared), own_table], 1)  # sequences may share pages

    def draw(batch, heads, tokens):
        return torch.randn(batch, heads, tokens, DIM, device=DEVICE).to(TYPE)

    def lengths(batch, keys):
        return torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)

    new = draw(1, KV_HEADS, options.prompt), draw(1, KV_HEADS, options.prompt)
    octet.append(*pages, *new, lengths(1, 0), block_table=prompt_table[None])
    error = 0.0
    with torch.no_grad():
        for step in range(options.steps):
            q = draw(BATCH, HEADS, 1)
            octet.append(*pages, draw(BATCH, KV_HEADS, 1), draw(BATCH, KV_HEADS, 1), lengths(BATCH, step),
                         block_table=own_table)  # fmt: skip

            def directly(q=q, keys=options.prompt + step + 1):
                return octet.attention_cached(q, *pages, lengths(BATCH, keys), block_table=table, return_lse=True)

            def in_two_parts(q=q, keys=step + 1):
                one = q.permute(2, 1, 0, 3)  # the queries of all sequences are those of one, over the prompt
                o, lse = octet.attention_cached(
                    one, *pages, lengths(1, options.prompt), block_table=prompt_table[None], return_lse=True
                )
                first = o.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
                second = octet.attention_cached(
                    q, *pages, lengths(BATCH, keys), block_table=own_table, return_lse=True
                )  # fmt: skip
                return merged(first, second)

            for found, want in zip(in_two_parts(), directly(), strict=True):
                error = max(error, ((found - want).norm() / want.norm()).item())
    print(f"{BATCH} sequences, a prompt of {options.prompt} tokens, {options.steps} steps in {DEVICE} {TYPE}")
    print(f"largest relative difference of o and lse in two parts: {error:.1e}")
    with torch.no_grad():
        print(f"a step: {1e3 * seconds(directly):.3f} ms directly, {1e3 * seconds(in_two_parts):.3f} ms in two parts")
    if not error < (1e-5 if TYPE is torch.float32 else 1e-2):
        raise SystemExit("the parts do not add up")


main()
