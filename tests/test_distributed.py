"""Two processes, on CPUs with gloo and on two GPUs with NCCL: DTensor's rules, FSDP2, tensor
parallelism, DDP. The cases themselves are in distributed_worker.py."""

import pytest
import torch
import torch.distributed as dist
from harness import each_flag, each_kind

import fused_norm.functional as fn

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from distributed_worker import Pair
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def pair(request, tmp_path_factory):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    processes = Pair(request.param, tmp_path_factory.mktemp("store"))
    yield processes
    processes.close()


@each_flag
def test_rows_stay_local_and_weight_gradients_are_partial_sums(pair, memory_efficient):
    pair.run("placements", memory_efficient=memory_efficient)


@each_flag
def test_added_residual(pair, memory_efficient):
    pair.run("added_residual", memory_efficient=memory_efficient)


def test_sharded_parameters_and_no_parameters(pair):
    pair.run("sharded_parameters_and_no_parameters")


def test_gated(pair):
    pair.run("gated")


def test_softmaxes(pair):
    pair.run("softmaxes")


def test_attention(pair):
    pair.run("attention")


@each_flag
@each_kind
def test_ddp(pair, kind, memory_efficient):
    pair.run("ddp", kind=kind, memory_efficient=memory_efficient)


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpointed"])
@each_flag
@each_kind
def test_fsdp2(pair, kind, memory_efficient, checkpoints):
    pair.run("fsdp2", kind=kind, memory_efficient=memory_efficient, checkpoints=checkpoints)


@each_kind
def test_fsdp2_with_weights_zeroed_in_mid_training(pair, kind):
    pair.run("fsdp2_zeroed", kind=kind)


@pytest.mark.parametrize("mixed_precision", [False, True], ids=["", "mixed precision"])
@each_kind
def test_fsdp2_saves_the_output_with_memory_efficient(pair, kind, mixed_precision):
    pair.run("fsdp2_memory", kind=kind, mixed_precision=mixed_precision)


@each_kind
def test_memory_report(pair, kind):
    pair.run("memory_report", kind=kind)


def test_fsdp2_of_a_converted_model(pair):
    pair.run("fsdp2_of_converted_model")


@each_flag
@each_kind
def test_sequence_parallel(pair, kind, memory_efficient):
    pair.run("sequence_parallel", kind=kind, memory_efficient=memory_efficient)


def test_dtensors_save_the_input():
    """memory_efficient or not: a group of one process tells."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(torch.ones(8), mesh, [Replicate()]).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = fn.rms_norm(x, [8], weight, memory_efficient=True)
        assert [t.shape for t in saved if t is not weight] == [x.shape, (4, 1)]
        assert saved[0] is x and y.grad_fn is not None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("key_heads, stays", [(4, True), (2, True), (1, False)])
def test_attention_on_a_mesh_of_two_dimensions(key_heads, stays):
    """Sequences along one, heads along the other, where key heads divide by that one; shapes alone:
    the processes do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, places = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, key_heads, 5, 8)
        q = distribute_tensor(q, mesh, places).requires_grad_()
        of_keys = places if key_heads > 1 else [Shard(0), Replicate()]
        k = distribute_tensor(k, mesh, of_keys).requires_grad_()
        y = fn.flash_attention(q, k, k)
        assert y.shape == q.shape and (list(y.placements) == places) == stays
        if stays:
            assert y.to_local().shape == (1, 2, 5, 8)
        dq, dk = torch.autograd.grad(y.sum(), (q, k))
        assert dq.shape == q.shape and dk.shape == k.shape
    finally:
        dist.destroy_process_group()


@each_flag
def test_compiled_dtensor(pair, memory_efficient):
    pair.run("compiled_dtensor", memory_efficient=memory_efficient)
