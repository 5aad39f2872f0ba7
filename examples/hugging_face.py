"""A Hugging Face model with this library's norms and attention, compiled, with the flag on.

Needs `pip install transformers`. The model is a small LLaMA of random weights; in its place take
AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_norm").
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fused_norm as fn
from fused_norm.integrations import transformers as fused

fused.register()  # attn_implementation="fused_norm"
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="fused_norm",
)
model = LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")
print(fn.convert(model, memory_efficient=True))

step = torch.compile(model, options=fn.compile_options())  # additions go into the norms
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
tokens = torch.arange(256, device=model.device).view(4, 64)  # to count is what it learns
for _ in range(20):
    loss = step(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.2f}, at first {torch.tensor(256.0).log().item():.2f}")
