"""Attention: torch's function under this library's name, and what torch's does not have."""

import torch

import fused_norm as fn

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
torch.manual_seed(0)
# Batch, heads, rows, head dimension. Four query heads share one of the two key heads.
q = torch.randn(2, 8, 512, 64, device=device, dtype=dtype, requires_grad=True)
k, v = torch.randn(2, 2, 2, 512, 64, device=device, dtype=dtype)

arguments = {"is_causal": True, "enable_gqa": True}
ours = fn.functional.scaled_dot_product_attention(q, k, v, **arguments)
torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
print(f"largest difference from torch's: {(ours - torchs).abs().max():.0e}")

# The last 128 keys of each query, scores capped at 30, a sink a head, and the log-sum-exp.
sink = torch.zeros(8, device=device, requires_grad=True)
out, lse = fn.functional.flash_attention(
    q, k, v, causal=True, window=(127, 0), softcap=30.0, sink=sink, return_lse=True
)
(out.float().square().mean() + lse.mean()).backward()
print(f"output {tuple(out.shape)}, log-sum-exp {tuple(lse.shape)}")
print(f"gradient of the sinks: {[round(g, 4) for g in sink.grad.tolist()]}")
