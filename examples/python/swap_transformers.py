"""A transformers model with octet's attention in the place of its own, and what that changes in its logits.

    python examples/python/swap_transformers.py

The weights are random, so that nothing is downloaded; for a real model, give from_pretrained the same
attn_implementation.
"""

import torch
from octet.integrations.transformers import register
from transformers import LlamaConfig, LlamaForCausalLM

register()
torch.manual_seed(0)
config = LlamaConfig(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                     num_attention_heads=8, num_key_value_heads=2)  # fmt: skip
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(1, 1000, (2, 64))
tokens[0, :20] = 0  # padded on the left
mask = (tokens > 0).long()

with torch.no_grad():
    want = model(tokens, attention_mask=mask).logits[mask.bool()]
    for name in ("octet", "octet_bf16", "octet_int8", "octet_fp8"):
        model.set_attn_implementation(name)
        got = model(tokens, attention_mask=mask).logits[mask.bool()]
        print(f"{name:>10}: logits differ from sdpa by {((got - want).norm() / want.norm()).item():.1e}, relative L2")

model.set_attn_implementation("octet_int8")
text = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
print("generated:", text[:, 64:].tolist())
