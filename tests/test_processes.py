"""The process around the library: threads, data loaders, default devices, deterministic mode, and
errors that must leave it usable."""

import concurrent.futures
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from harness import each_flag, each_kind, module_of, randn, same_bits
from torch.utils.data import DataLoader, Dataset

import fused_norm
import fused_norm.functional as fn

ROOT = Path(fused_norm.__file__).parents[1]


@each_flag
@each_kind
def test_threads(kind, memory_efficient, device, generator):
    """Eight threads, each with its own data and on a GPU its own stream, one module: the bits of
    one thread alone."""
    module = module_of(kind, 96, memory_efficient=memory_efficient, device=device)
    inputs = [randn(generator, 40 + i, 96) for i in range(8)]

    def step(x):
        x = x.clone().requires_grad_()
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])]

    expected = [step(x) for x in inputs]
    if device == "cuda":
        torch.cuda.synchronize()
    failures, start = [], threading.Barrier(len(inputs))

    def work(x, exact):
        try:
            start.wait()
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                for _ in range(20):
                    results = step(x)
                    if stream is not None:
                        stream.synchronize()
                    assert all(same_bits(a, b) for a, b in zip(results, exact, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=args) for args in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class NormalizedRows(Dataset):
    """Normalizes in the worker."""

    def __init__(self, kind):
        self.norm = module_of(kind, 64)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.full((16, 64), float(index)) + torch.arange(64)
        x.requires_grad_()
        y = self.norm(x)
        y.square().sum().backward()
        return y.detach(), x.grad


def check_workers(kind, method):
    data = NormalizedRows(kind)
    expected = [data[i] for i in range(len(data))]
    fn.layer_norm(torch.randn(2000, 512), (512,))  # starts the threads of the CPU path
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=method)
    for ours, exact in zip(loader, expected, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, exact, strict=True))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@each_kind
def test_data_loader_workers(kind, method):
    """Also where the parent has run norms, with all its threads, before it forks. It is a process
    of its own: where others have started threads of autograd, torch refuses backward in a fork."""
    context = torch.multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        pool.submit(check_workers, kind, method).result()


@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
@each_flag
@each_kind
def test_default_device(kind, memory_efficient, default):
    """Modules are made where torch says; tensors elsewhere are computed where they are."""
    x = torch.randn(4, 8).requires_grad_()
    module = module_of(kind, 8, memory_efficient=memory_efficient)
    expected = module(x)
    expected_dx = torch.autograd.grad(expected.sin().sum(), x)[0]
    torch.set_default_device(default)
    try:
        made = module_of(kind, 8, memory_efficient=memory_efficient)
        assert made.weight.device.type == default
        y = module(x)
        dx = torch.autograd.grad(y.sin().sum(), x)[0]
        assert made(torch.randn(4, 8)).device.type == default
    finally:
        torch.set_default_device(None)
    assert same_bits(y.detach(), expected.detach()) and same_bits(dx, expected_dx)


@each_flag
@each_kind
def test_deterministic_mode(kind, memory_efficient, device, generator, recwarn):
    module = module_of(kind, 96, memory_efficient=memory_efficient, device=device)
    x = randn(generator, 100, 96).requires_grad_()

    def step():
        y = module(x)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])]

    expected = step()
    torch.use_deterministic_algorithms(True)
    try:
        results = step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))
    assert not recwarn.list


def test_import_is_light():
    """What takes long to load, the compiler and DTensor, is left to those who use it."""
    code = "import sys, torch; before = set(sys.modules); import fused_norm\n"
    code += "print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.tensor"} & set(loaded)
    assert len([name for name in loaded if not name.startswith("fused_norm")]) < 20, loaded


@pytest.mark.cuda
@each_kind
def test_out_of_memory(kind, generator):
    """torch's own error, forward and backward, and the next call is right."""
    module = module_of(kind, 4096, device="cuda")
    small = randn(generator, 64, 4096)
    expected = module(small).detach()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    x = randn(generator, 2**14, 4096).requires_grad_()  # 256 MiB
    y = module(x)
    dy = torch.ones_like(y)
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + 2**26) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            module(x)
        with pytest.raises(torch.OutOfMemoryError):
            y.backward(dy)
        assert same_bits(module(small).detach(), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    module(x).backward(dy)
    assert x.grad.isfinite().all()
    assert same_bits(module(small).detach(), expected)


@pytest.mark.cuda
def test_failed_launch():
    """A launch that CUDA refuses, here into a capture that went wrong, is a torch error of that
    call, and the process goes on."""
    code = """
        import torch, fused_norm.functional as fn

        x = torch.randn(64, 256, device="cuda")
        weight = torch.ones(256, device="cuda", requires_grad=True)
        expected = fn.layer_norm(x, (256,), weight)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        failed = None
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                torch.cuda.synchronize()  # not allowed: spoils the capture
            except RuntimeError:
                pass
            try:
                fn.layer_norm(x, (256,), weight)
            except RuntimeError as error:
                failed = str(error)
            try:
                graph.capture_end()
            except RuntimeError:
                pass
        assert failed is not None and "captur" in failed, failed
        torch.cuda.synchronize()
        y = fn.layer_norm(x, (256,), weight)
        y.sum().backward()
        torch.cuda.synchronize()
        assert torch.equal(y, expected) and weight.grad.isfinite().all()
        print("usable")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "usable" in done.stdout, done.stdout + done.stderr
