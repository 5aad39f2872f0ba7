"""Marks, the seeded generator, and the skipping of tests that need hardware this machine lacks."""

import functools
import os
import tempfile
import zlib
from pathlib import Path

# How often OpenMP's threads look for work before they sleep; read when torch loads, here and in the
# processes that tests start. By default they spin so long that a test run is several times slower
# where other programs use the same cores; without spinning it is twice as slow where none do.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# `pytest -n` runs several tests at a time, which share the cores: threads that wait for each other
# while others run took 3.5 times as long. Tests of what several threads do say how many.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    threads = len(os.sched_getaffinity(0)) // int(workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
# Inductor compiles within the test process: its pool of processes has been seen to hang at exit.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from filelock import FileLock  # torch needs it too

import fused_norm

NEEDS = {
    "cuda": "needs a CUDA device and a build with CUDA",
    "multi_gpu": "needs two CUDA devices and a build with CUDA",
}


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="seed of the random inputs (default 0)")


def pytest_configure(config):
    for mark, meaning in NEEDS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")


def pytest_report_header(config):
    return f"fused_norm: {fused_norm.build_info()}, seed {config.getoption('seed')}"


@functools.cache
def missing_hardware():
    """Marks whose tests cannot run here."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if fused_norm.build_info()["cuda"] is None:
        devices = 0
    return {mark for mark, count in {"cuda": 1, "multi_gpu": 2}.items() if devices < count}


def pytest_runtest_setup(item):
    # Skipped here and not by a mark: pytest folds skips of one source line into one line that
    # counts them.
    for mark in ("multi_gpu", "cuda"):
        if item.get_closest_marker(mark) and mark in missing_hardware():
            pytest.skip(NEEDS[mark])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """What `-n auto` means: a process for each core, and of a GPU 10 GB for each."""
    cores = len(os.sched_getaffinity(0))
    if "cuda" in missing_hardware():
        return cores
    return max(1, min(cores, torch.cuda.get_device_properties(0).total_memory // 10**10))


@pytest.fixture(autouse=True)
def alone_on_several_gpus(request, tmp_path_factory):
    """Under `pytest -n`, tests that take several GPUs wait for each other."""
    if request.node.get_closest_marker("multi_gpu") is None:
        yield
        return
    with FileLock(tmp_path_factory.getbasetemp().parent / "multi_gpu.lock"):
        yield


@pytest.fixture
def seed(request):
    """A seed of the test's own, moved by --seed."""
    return request.config.getoption("seed") * 1_000_003 + zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def generator(request, seed):
    """Random numbers on the test's device: where it names none, CUDA if it is marked so."""
    device = "cuda" if request.node.get_closest_marker("cuda") else "cpu"
    if "device" in request.fixturenames:
        device = request.getfixturevalue("device")
    return torch.Generator(device).manual_seed(seed)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture
def give_memory_back():
    """After the test, to the other processes that share the GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_memory():
    """For tests of up to 90 GiB: one at a time, also when several processes share the tests."""
    if torch.cuda.get_device_properties(0).total_memory < 120 * 2**30:
        pytest.skip("needs 120 GiB of GPU memory")
    torch.cuda.empty_cache()
    with FileLock(Path(tempfile.gettempdir(), "fused_norm_large_tests.lock")):
        yield
        torch.cuda.empty_cache()
