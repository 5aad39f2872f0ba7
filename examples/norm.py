"""A norm with the flag: the same gradients, and the norm's input is not kept for backward."""

import torch

import fused_norm as fn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 1024),
    fn.RMSNorm(1024, eps=1e-6),  # a torch.nn.RMSNorm
    torch.nn.Linear(1024, 256),
).to(device)
torch.nn.init.normal_(model[1].weight, 1.0, 0.1)  # as training leaves it
x = torch.randn(4096, 256, device=device)
print(fn.memory_report(model, x))  # what it saves, and what it would save with the flag on

gradients = []
for memory_efficient in (False, True):
    model[1].memory_efficient = memory_efficient
    model.zero_grad()
    model(x).square().mean().backward()
    gradients.append(model[0].weight.grad.clone())

error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
print(f"gradients with the flag differ by {error:.0e} of their size")
