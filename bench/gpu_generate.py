"""Times whole generate loops of transformers on this GPU, with octet beside sdpa: a model like Llama of 1.2 billion
random parameters in bf16, made from a configuration, greedy. Before it times, it states how far the logits of both are
from those of float32 after a prompt and some steps with a cache.

    bench/gpu_generate.py [--rounds N] [--loops NAME,...] [--batches N,...] [--layers N] [--output FILE]

A loop is timed with all new tokens and with one; the difference is what a step takes. octet is imported as a package.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
import transformers
from abi import load
from octet.integrations import transformers as integration
from peers import circumstances

NAMES = ["sdpa", "octet"]
PROMPT, NEW, VOCABULARY = 4096, 128, 128256
MODEL = {
    "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2 * PROMPT,
    "tie_word_embeddings": True, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
STATIC = {"cache_implementation": "static"}
LOOPS = {
    "dynamic cache": {},
    "padding on the left": {},
    "static cache": STATIC | {"disable_compile": True},
    "compiled static cache": STATIC,
    "paged cache": None,
}


def model_of(name, dtype=torch.bfloat16):
    """The same weights for each name."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**MODEL), attn_implementation=name, dtype=torch.bfloat16
        )
    return made.eval().to(dtype)


def prompts_of(batch, padded):
    """Tokens and mask; padded prompts have half of the tokens to all of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (batch, PROMPT), generator=generator)
    mask = torch.ones_like(tokens)
    if padded:
        for row in range(1, batch):
            mask[row, : PROMPT // 2 * row // (batch - 1)] = 0
    return (tokens * mask).cuda(), mask.cuda()


@torch.no_grad()
def logits_of(model, steps=8):
    """Logits of the last token of a prompt, and of tokens after it that are given one by one."""
    tokens = prompts_of(1, False)[0][:, : 1024 + steps]
    made = model(tokens[:, :1024], use_cache=True, logits_to_keep=1)
    logits = [made.logits]
    for i in range(steps):
        step = tokens[:, 1024 + i : 1025 + i]
        made = model(step, past_key_values=made.past_key_values, use_cache=True)
        logits.append(made.logits)
    return torch.cat(logits, 1).float()


def distances(models):
    """Relative L2 error of logits against those of float32, by name."""
    want = logits_of(model_of("sdpa", torch.float32))
    return {name: ((logits_of(m) - want).norm() / want.norm()).item() for name, m in models.items()}


def loop_of(model, loop, batch):
    """A function of the number of new tokens that runs the loop."""
    tokens, mask = prompts_of(batch, loop == "padding on the left")
    if loop != "paged cache":

        def generate(new):
            made = model.generate(
                tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **LOOPS[loop]
            )
            assert made.shape[1] == PROMPT + new

        return generate
    prompts = tokens.tolist()
    how = transformers.ContinuousBatchingConfig(max_memory_percent=0.3)
    if hasattr(how, "auto_switch_to_flash"):
        how.auto_switch_to_flash = False
    elif model.config._attn_implementation == "sdpa":  # an older one, which has a name for that
        model.set_attn_implementation("paged|sdpa")

    def in_pages(new):
        given = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found = model.generate_batch(
            prompts,
            generation_config=given,
            continuous_batching_config=how,
            progress_bar=False,
            persistent_manager=True,
        )
        assert len(found) == batch and all(len(x.generated_tokens) == new for x in found.values())

    return in_pages


def seconds(run, new):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run(new)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def row_of(models, loop, batch, rounds):
    runs, times = {}, {}
    for name, model in models.items():
        torch.compiler.reset()
        try:
            runs[name] = loop_of(model, loop, batch)
            runs[name](NEW)
        except Exception as error:  # one loop that does not run is no reason to lose the others
            print(f"{loop}, batch {batch}, {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            runs.pop(name, None)
    for i in range(rounds):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            times.setdefault(name, []).append((seconds(runs[name], 1), seconds(runs[name], NEW)))
    row = {"loop": loop, "batch": batch, "tokens_per_second": {}, "prompt_ms": {}, "step_ms": {}}
    for name in runs:
        first, whole = (statistics.median(x) for x in zip(*times[name], strict=True))
        row["tokens_per_second"][name] = batch * NEW / whole
        row["prompt_ms"][name] = 1000 * first
        row["step_ms"][name] = 1000 * (whole - first) / (NEW - 1)
    for model in models.values():
        model.destroy_cached_continuous_batching_manager()
        if model.config._attn_implementation == "paged|sdpa":
            model.set_attn_implementation("sdpa")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", type=lambda text: text.split(","), default=list(LOOPS))
    parser.add_argument("--batches", type=lambda text: [int(x) for x in text.split(",")], default=[1, 16])
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    options = parser.parse_args()
    MODEL["num_hidden_layers"] = options.layers
    integration.register()
    models = {name: model_of(name) for name in NAMES}
    errors = distances(models)
    print("errors of logits:", errors, flush=True)
    if not errors["octet"] < 2 * errors["sdpa"]:
        raise RuntimeError(
            f"logits of octet are {errors['octet']:.3g} from float32, those of sdpa {errors['sdpa']:.3g}"
        )
    rows = []

    def write():
        from octet import _library

        library = load(pathlib.Path(_library.lib._name))
        what = {"torch": torch.__version__, "transformers": transformers.__version__, "prompt": PROMPT, "new": NEW}
        what["layers"] = options.layers
        result = circumstances(library, options.rounds) | what | {"logits_errors": errors, "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")

    for batch in options.batches:
        for loop in options.loops:
            if loop == "padding on the left" and batch == 1:
                continue
            rows.append(row_of(models, loop, batch, options.rounds))
            print(json.dumps(rows[-1]), flush=True)
            if options.output:
                write()


main()
