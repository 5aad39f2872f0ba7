"""`python -m benchmarks model`: its blocks, and what it makes of times and of kernels."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("benchmarks.model", reason="the benchmarks need the repository and rich")

from benchmarks import __main__ as entry_point  # noqa: E402
from benchmarks import model, model_steps, result_files, sensors, timing  # noqa: E402
from benchmarks.model_steps import Case, Kernel, Record  # noqa: E402

ROOT = Path(__file__).parent.parent
OURS = ("torch", "fused", "fused, flag", "fused, residual inside")


@pytest.fixture(scope="module", params=["LayerNorm", "RMSNorm"])
def bench(request):
    return model_steps.Bench(Case(request.param, 256, 128), OURS, device="cpu")


@pytest.mark.parametrize("variant", OURS)
def test_variants_compute_the_same(bench, variant):
    bench.check(variant)
    bench.step(bench.blocks[variant])
    assert all(parameter.grad is None for parameter in bench.parameters)


def test_other_results_are_found(bench):
    norm = bench.blocks["fused"].norm2.norm
    before = norm.weight.detach().clone()
    with torch.no_grad():
        norm.weight.mul_(1.1)
    with pytest.raises(ValueError, match="results are off by"):
        bench.check("fused")
    with torch.no_grad():
        norm.weight.copy_(before)


def test_variants_differ_in_the_norms_alone(bench):
    first, *others = bench.blocks.values()
    for block in others:
        assert block.mlp is first.mlp and block.attention is first.attention
        for name, parameter in first.norm1.named_parameters():
            assert torch.equal(parameter, dict(block.norm1.named_parameters())[name])


def test_a_norm_alone_has_the_gradients_of_the_one_in_the_block(bench):
    for block in bench.blocks.values():
        leaves = [t.clone().requires_grad_() for t in bench.inputs]
        outputs, inputs = block.norm1.alone(*leaves)
        assert outputs[0].shape == leaves[0].shape
        torch.autograd.grad(outputs, [*inputs, *block.norm1.parameters()], [*outputs])


def test_compiled_variants(bench, monkeypatch):
    """Each is compiled as it says, checked, and called; one that does not compile is named, and
    takes no other with it."""
    compile, compiled_with = torch.compile, []

    def without_code(block, options, **others):
        compiled_with.append(bool(options))
        if len(compiled_with) == 2:
            raise RuntimeError("no such compiler\nand more")
        return compile(block, backend="aot_eager", **others)

    monkeypatch.setattr(torch, "compile", without_code)
    for variant in ("fused", "fused, flag", "fused, pass"):
        bench.blocks.setdefault(variant, bench.blocks["fused"])
        bench.prepare(variant, "compiled", None)
    assert compiled_with == [False, False, True]
    assert bench.absent == {"fused, flag, compiled": "no such compiler"}
    assert list(bench.calls["compiled"]) == ["fused", "fused, pass"]
    for call in bench.calls["compiled"].values():
        call()


def kernels(*named):
    return [Kernel(name, seconds, 0.5) for name, seconds in named]


def test_kernels_by_kind():
    """The reduction behind a norm's backward kernel is a part of it only in that place."""
    step = kernels(
        ("add", 1), ("norm_fwd", 2), ("nvjet_1", 10), ("reduce", 3), ("flash_fwd", 20),
        ("norm_bwd", 4), ("reduce", 5), ("add", 6), ("norm_fwd", 2), ("add", 1),
    )  # fmt: skip
    patterns = {
        "forward": kernels(("norm_fwd", 1)),
        "backward": kernels(("norm_bwd", 1), ("reduce", 1)),
    }
    assert model_steps.by_kind(step, patterns) == {
        "forward": 4, "backward": 9, "matmul": 30, "others": 11, "behind": 17, "gaps": 4.5,
    }  # fmt: skip
    assert len(model_steps.places(step, patterns["forward"])) == 2
    assert model_steps.places(step, []) == []


def test_kernels_of_equal_calls_are_averaged():
    calls = kernels(("a", 1), ("b", 5), ("a", 3), ("b", 7), ("a", 2), ("b", 6))
    assert model_steps.averaged(calls, 3) == kernels(("a", 2), ("b", 6))
    with pytest.raises(ValueError, match="6 kernels are not those of 2 equal calls"):
        model_steps.averaged(calls, 2)
    with pytest.raises(ValueError, match="0 kernels are not those"):  # the profiler lost them
        model_steps.averaged([], 3)


def test_launches_are_told_apart_by_a_kernel():
    """Whatever the pauses between kernels, as of a GPU that other processes have too."""
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [(0, 1, "warm"), (2, 3, spin), (4, 5, "a"), (90, 91, "b"), (92, 93, spin)]
    assert model_steps.divided(events[::-1]) == [[(4, 5, "a"), (90, 91, "b")], []]
    assert model_steps.of_group([]) == []


def test_medians_of_what_the_driver_tells():
    samples = [(1500, None, 50), (1700, None, 54), (1600, 650.0, 52)]
    assert sensors.medians(samples) == {"MHz": 1600, "watts": 650.0, "degrees": 52}
    assert sensors.medians([(None, None, None)]) == {}


def test_turns(monkeypatch):
    """Each call's turn is as long as the others', whatever it takes, and none is always first."""
    seconds, turns = {"torch": 2e-3, "fused": 1e-3}, []

    def turn(call, count, *_):
        turns.append((call, count))
        return seconds[call], 1e-4

    monkeypatch.setattr(timing, "turn", turn)
    found = timing.in_turns({name: name for name in seconds}, 4, 0.05, None)
    assert turns[:3] == [("torch", 3), ("fused", 3), ("torch", 50)]  # the last warms, for 0.1 s
    a, b = ("torch", 25), ("fused", 50)
    assert turns[3:] == [a, b, b, a, b, a, a, b]
    assert found["fused"]["change"] == -0.5
    assert found["torch"]["seconds"] == 2e-3
    orders = [tuple(timing.order([1, 2, 3], number)) for number in range(6)]
    assert len(set(orders)) == 6 and {first for first, *_ in orders[:3]} == {1, 2, 3}


CASE = Case("RMSNorm", 2048, 16384)


def records(changes, flags, mode="replayed"):
    """Of so many processes: what ours, and the flag, take more than torch's norms."""
    made = []
    for process, (change, flag) in enumerate(zip(changes, flags, strict=True), 1):
        for variant, more in (("torch", 0.0), ("fused", change), ("fused, flag", flag)):
            for quantity, value in (("seconds", 5e-3 * (1 + more)), ("change", more)):
                identity = dataclasses.astuple(CASE)
                made.append(Record(process, *identity, mode, variant, quantity, value))
    return made


@pytest.mark.parametrize(
    ("changes", "mode", "verdict"),
    [
        ([-0.02, -0.011, 0.3], "replayed", "-1.0%: met"),  # the median decides
        ([-0.02, -0.009, 0.3], "replayed", "-1.0%: missed"),
        ([0.009], "compiled", "+1.0%: met"),
        ([-0.02], "zeros", "-"),
    ],
)
def test_step_table(changes, mode, verdict):
    numbers = model.Numbers(records(changes, changes, mode))
    header, [row] = model.step_table(numbers)
    assert len(row) == len(header)
    assert row[:3] == ["RMSNorm:2048x16384", mode, "5.000"]
    assert row[-1] == verdict


def test_files_are_merged(tmp_path, monkeypatch, capsys):
    """Processes of two runs are counted one by one, and the flag's limit gives the exit code."""
    for name, changes in (("a", [-0.03, -0.02]), ("b", [-0.01])):
        flags = [change + 0.02 for change in changes]
        facts = [("suite", "model"), ("GPU", f"GPU {name}")]
        result_files.write_csv(tmp_path / f"{name}.csv", facts, Record, records(changes, flags))
    files = [str(tmp_path / f"{name}.csv") for name in "ab"]
    assert entry_point.main(["merge", *files, "--out", str(tmp_path)]) == 0
    assert "the flag adds +2.0%" in capsys.readouterr().out
    facts, merged = result_files.read_csv(tmp_path / "model.csv", Record)
    assert dict(facts)["GPU"] == "GPU a; GPU b"
    assert sorted({r.process for r in merged}) == [1, 2, 3]
    markdown = (tmp_path / "model.md").read_text()
    assert "| RMSNorm:2048x16384 | replayed | 5.000 | -2.0% (-2.5, -1.5) |" in markdown
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text() + "1,RMSNorm,many\n")
    assert entry_point.main(["merge", *files, "--out", str(tmp_path)]) == 2
    assert "a.csv has a broken line" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["RMSNorm", "GroupNorm:64x64", "RMSNorm:100x64", "RMSNorm:2048"])
def test_what_is_no_block_is_one_sentence(text, capsys):
    with pytest.raises(SystemExit) as stop:
        entry_point.main(["model", "--blocks", text])
    assert stop.value.code == 2
    assert f"{text!r} is not a block" in capsys.readouterr().err


@pytest.mark.cuda
def test_a_small_run(tmp_path):
    """Two processes, all modes, with the kernels; zeros in the first process alone."""
    words = ["model", "--blocks", "LayerNorm:256x512", "--processes", "2", "--rounds", "2"]
    words += ["--seconds", "0.005", "--variants", *OURS[:3], "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr  # so small a step tells nothing of the flag
    _, found = result_files.read_csv(tmp_path / "model.csv", Record)
    steps = [r for r in found if r.quantity == "seconds"]
    assert len(steps) == 5 * 3 and all(r.value > 0 for r in steps)
    markdown = (tmp_path / "model.md").read_text()
    assert markdown.count("\n## ") == 4
