"""The benchmarks without a GPU: targets, checks against fp64, tables, and the command line."""

import csv
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

norm = pytest.importorskip("benchmarks.norm", reason="the benchmarks need the repository and rich")
softmax = pytest.importorskip("benchmarks.softmax")
memory = pytest.importorskip("benchmarks.memory")
backward_ladder = pytest.importorskip("benchmarks.backward_ladder")

from benchmark_harness import measured, result  # noqa: E402

from benchmarks import __main__ as entry_point  # noqa: E402
from benchmarks import cpu, environment, flag, report, result_files, results, targets  # noqa: E402
from benchmarks.peers import eager, ours  # noqa: E402


def measured_alone(peer, case):
    (only,) = measured(case, peer)
    return only


@pytest.mark.parametrize("dtype", norm.DTYPES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize(
    "peer", [ours.Norm(), ours.NormMemoryEfficient(), eager.Norm()], ids=lambda p: p.name
)
def test_right_results_pass_the_check(peer, rms, direction, dtype):
    if peer.name.endswith("efficient") and direction == "forward":
        pytest.skip("the same operator as without memory_efficient")
    if peer.name == "torch" and direction == "backward" and (rms or dtype != "fp32"):
        pytest.skip("torch's CPU operators sum 16-bit gradients in 16 bit and lack RMSNorm's")
    result = measured_alone(peer, norm.Case(rms, 300, 257, dtype, direction))
    assert result.correct, result


class Wrong(ours.Norm):
    """One element of one result is off by 3 %: more than any rounding."""

    def __init__(self, which):
        self.which = which

    def spoil(self, results):
        flat = results[self.which].view(-1)
        flat[flat.abs().argmax()] *= 1.03
        return results

    def forward(self, *args):
        return self.spoil(super().forward(*args))

    def backward(self, *args):
        return self.spoil(super().backward(*args))

    def saved(self, *args):
        y, mean, rstd = ours.Norm().forward(*args)
        return args[1], mean, rstd


@pytest.mark.parametrize(
    ("direction", "which"), [("forward", 0), ("backward", 0), ("backward", 1), ("backward", 2)]
)
def test_wrong_results_are_found(direction, which):
    case = norm.Case(False, 64, 257, "bf16", direction)
    wrong = measured_alone(Wrong(which), case)
    assert not wrong.correct
    assert results.verdict([wrong]) == "WRONG"
    assert "WRONG" in report.cell(wrong)


def rounded_sum(terms, rows_at_a_time):
    """Sums over the rows to fp32, rounded to bf16 after so many rows: once for each such group, as
    torch's CUDA operator does with many rows."""
    groups = terms.view(-1, rows_at_a_time, terms.shape[-1]).sum(1)
    return groups.bfloat16().double().sum(0).bfloat16()


def running_sum(terms):
    """Sums over the rows in bf16."""
    total = torch.zeros(terms.shape[-1], dtype=torch.bfloat16)
    for row in terms:
        total = (total + row).bfloat16()
    return total


@pytest.mark.parametrize(
    ("sum_rows", "correct"),
    [
        (lambda terms: rounded_sum(terms, 32), True),
        (lambda terms: rounded_sum(terms, 1024), True),
        (running_sum, False),
        (lambda terms: rounded_sum(terms[32:], 32), False),
    ],
    ids=["groups of 32 rows", "groups of 1024 rows", "running in bf16", "rows left out"],
)
def test_how_exactly_rows_must_be_summed(sum_rows, correct):
    case = norm.Case(False, 4096, 128, "bf16", "backward")
    torch.manual_seed(0)
    x, dy = torch.randn(2, case.rows, case.cols).bfloat16()
    weight, bias = torch.ones(2, case.cols).bfloat16()
    saved = ours.Norm().saved(case, x, weight, bias)
    dx, _, dbias = ours.Norm().backward(case, dy, saved, weight, bias)
    x64 = x.double()
    xhat = (x64 - x64.mean(1, keepdim=True)) * saved[2].double()
    gradients = dx, sum_rows(dy.double() * xhat), dbias
    error = norm.reference.backward_error(case, x, weight, bias, dy, gradients)
    assert (error <= 1) == correct, error


@pytest.mark.parametrize(
    ("direction", "cols", "dtype", "e", "c"),
    [
        ("forward", 768, torch.bfloat16, 0.97, 1.3e-6),
        ("forward", 4096, torch.float32, 0.99, 1.3e-6),
        ("forward", 32768, torch.bfloat16, 0.97, 1.3e-6),
        ("forward", 50000, torch.bfloat16, 0.94, 1.3e-6),
        ("forward", 3333, torch.bfloat16, 0.90, 1.3e-6),
        ("backward", 128, torch.bfloat16, 0.90, 2.5e-6),
        ("backward", 768, torch.bfloat16, 0.96, 2.5e-6),
        ("backward", 4096, torch.float32, 0.98, 2.5e-6),
        ("backward", 50000, torch.bfloat16, 0.92, 2.5e-6),
        ("backward", 3333, torch.bfloat16, 0.85, 2.5e-6),
    ],
)
def test_targets(direction, cols, dtype, e, c):
    assert targets.norm_target(direction, cols, dtype) == (e, c)


# torch's CPU operator sums 16-bit logarithms in 16 bit.
SOFTMAX_PEERS = [(ours.Softmax(), dtype) for dtype in softmax.DTYPES]
SOFTMAX_PEERS += [(eager.Softmax(), "fp32"), (eager.Softmax(), "bf16-fp32")]


@pytest.mark.parametrize(
    ("peer", "dtype"), SOFTMAX_PEERS, ids=lambda p: p if isinstance(p, str) else p.name
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_right_softmax_results_pass_the_check(log, direction, peer, dtype):
    case = softmax.Case(log, 300, 257, dtype, direction)
    result = measured_alone(peer, case)
    assert result.correct, result


class WrongSoftmax(ours.Softmax):
    """One element is off by 3 %."""

    def spoil(self, result):
        flat = result.view(-1)
        flat[flat.abs().argmax()] *= 1.03
        return result

    def forward(self, *args):
        return self.spoil(super().forward(*args))

    def backward(self, *args):
        return self.spoil(super().backward(*args))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_wrong_softmax_results_are_found(log, direction):
    case = softmax.Case(log, 64, 257, "bf16", direction)
    wrong = measured_alone(WrongSoftmax(), case)
    assert not wrong.correct


@pytest.mark.parametrize(
    ("direction", "cols", "dtype", "e"),
    [
        ("forward", 1024, torch.bfloat16, 0.97),
        ("backward", 1024, torch.bfloat16, 1.0),
        ("forward", 777, torch.bfloat16, 0.93),
        ("backward", 777, torch.bfloat16, 0.95),
        ("forward", 100352, torch.bfloat16, 0.94),
        ("backward", 100352, torch.bfloat16, 0.94),
        ("forward", 8192, torch.float32, 0.97),
    ],
)
def test_softmax_targets(direction, cols, dtype, e):
    assert targets.softmax_target(direction, cols, dtype) == (e, 1.3e-6)


@pytest.mark.parametrize(
    ("ours", "torch_seconds", "verdict"),
    [
        (9.9e-6, 20e-6, "met"),
        (12e-6, 20e-6, "20% over"),
        (10.01e-6, 20e-6, "<1% over"),
        (9.9e-6, 9.8e-6, "met"),
        (9.9e-6, 9.0e-6, "met, torch ahead by 10%"),
    ],
)
def test_verdict(ours, torch_seconds, verdict):
    both = [result("fused_norm", ours), result("torch", torch_seconds)]
    assert results.verdict(both) == verdict


def test_a_wrong_peer_is_never_ahead():
    wrong = result("torch", 1e-6, error=2.0)
    assert results.verdict([result("fused_norm", 9.9e-6), wrong]) == "met"
    assert report.cell(wrong) == "1.0 (9.00) WRONG (2 x bound)"  # told, but it does not count


def test_tables(tmp_path, capsys):
    both = [
        result("fused_norm", 9.5e-6),
        result("torch", None, error=None, note="no such dtype"),
    ]
    facts = [("GPU", "none"), ("absent", "apex (not importable: no apex)")]
    report.write("norm", both, facts, tmp_path)
    printed = capsys.readouterr().out
    assert "9.5 (0.95)" in printed and "no such dtype" in printed
    assert "absent: apex (not importable: no apex)" in printed
    markdown = (tmp_path / "norm.md").read_text()
    assert "- GPU: none" in markdown and "| 9.5 (0.95) | - | met |" in markdown
    assert (
        "- absent: apex (not importable: no apex)" in markdown and "![norm](norm.png)" in markdown
    )
    assert (tmp_path / "norm.png").read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "norm.csv").read_text().splitlines()
    assert lines[:2] == ["# GPU: none", "# absent: apex (not importable: no apex)"]
    mine, other = csv.DictReader(lines[2:])
    assert mine["microseconds"] == "9.500" and mine["fraction"] == "0.9474"
    assert other["microseconds"] == "" and other["note"] == "no such dtype"


def test_what_was_written_is_read_again(tmp_path):
    facts = [("suite", "norm"), ("GPU", "a: b")]
    both = [result("fused_norm", 9.5e-6), result("torch", None, error=None, note="a, b")]
    results.write(tmp_path / "norm.csv", facts, both)
    read_facts, read_results = results.read(tmp_path / "norm.csv")
    assert read_facts == facts
    assert [r.case for r in read_results] == [r.case for r in both]
    assert read_results[0].seconds == pytest.approx(9.5e-6) and read_results[1].note == "a, b"
    results.write(tmp_path / "again.csv", read_facts, read_results)
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "norm.csv").read_bytes()


@pytest.mark.cuda
def test_results_say_what_they_were_measured_on():
    facts = dict(environment.facts(4e12))
    assert torch.cuda.get_device_name(0) in facts["GPU"]
    assert facts["command"].startswith("python -m benchmarks")
    assert torch.__version__ in facts["versions"]
    for name in ("driver version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit"):
        assert re.match(r"\d+", facts[name]), facts


def test_results_say_of_which_sources_they_are(tmp_path):
    """By git's own hash, whether or not there is a repository."""
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for name, text in (("a.h", "1"), ("a/run", "2"), ("a/deep/x.cu", "3\n"), ("a-b", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "a" / "run").chmod(0o755)

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    expected = environment.git_hash(tmp_path).hex()
    git("init", "--quiet")
    git("add", "--all")
    assert git("write-tree") == expected
    assert f"csrc is git tree {environment.git_hash(ROOT / 'csrc').hex()[:12]}" in str(
        environment.versions()
    )


def test_where_results_go_is_no_part_of_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", "norm", "--out", "somewhere", "--quick"])
    assert dict(environment.command())["command"] == "python -m benchmarks norm --quick"


def command_line(*arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def lines_of(path):
    return list(csv.DictReader(result_files.split(path.read_text().splitlines())[1]))


def test_memory_of_small_transformers(tmp_path):
    """On a CPU: what the flag frees is what was predicted, to the byte; tables and plot."""
    done = command_line("memory", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "memory.md").read_text()
    assert markdown.count("100.00%") == 2
    lines = lines_of(tmp_path / "memory.csv")
    assert [line["variant"] for line in lines] == [*memory.VARIANTS] * 2
    for preset in ("llama-tiny", "gpt2-tiny"):
        torch_norms, fused, efficient, attention = (
            {key: int(line[key]) for key in (*memory.KINDS, "saved_bytes")}
            for line in lines
            if line["preset"] == preset
        )
        assert all(d["saved_bytes"] == sum(d[k] for k in memory.KINDS) for d in (fused, efficient))
        # Only the norms' share changes: rstd alone is left of it.
        assert {k for k in memory.KINDS if fused[k] != efficient[k]} == {"norms"}
        sizes = memory.PRESETS[preset]
        assert efficient["norms"] == sizes.norms * sizes.rows * 4
        assert torch_norms["norms"] >= fused["norms"]
        assert attention["norms"] == efficient["norms"]


def test_memory_of_so_many_layers(tmp_path):
    words = ["--device", "cpu", "--preset", "llama-tiny", "--layers", "1", "--rounds", "1"]
    done = command_line("memory", *words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "memory.csv")
    assert {line["preset"] for line in lines} == {"llama-tiny, 1 layer"}
    sizes = memory.PRESETS["llama-tiny"]
    assert int(lines[2]["norms"]) == 3 * sizes.rows * 4


def test_padded_sequences_in_a_transformer():
    """Padding sees itself alone, a token no padding; our attention gives torch's loss."""
    torch.manual_seed(0)
    preset = dataclasses.replace(memory.PRESETS["llama-tiny"], padded=True)
    mask = memory.padded_causal(preset)
    padding = preset.context * 3 // 8  # of the first sequence
    seen = mask.sum(-1)[:, 0]
    assert seen[0].tolist() == [1] * padding + list(range(1, preset.context - padding + 1))
    assert seen[1].tolist() == list(range(1, preset.context + 1))
    model = memory.Transformer(preset, torch.nn.RMSNorm)
    tokens = torch.randint(preset.vocabulary, (2, preset.batch, preset.context))
    losses = [
        memory.variant_of(model, v)(*tokens) for v in (memory.VARIANTS[0], memory.VARIANTS[3])
    ]
    torch.testing.assert_close(*losses)


def test_norms_on_a_cpu_beside_torchs(tmp_path):
    """One round. Its times mean little, but the verdict and the exit code follow from them."""
    done = command_line("cpu", "--rounds", "1", "--threads", "1", "--out", str(tmp_path))
    lines = lines_of(tmp_path / "cpu.csv")
    cases = [(line["norm"], line["dtype"], line["memory_efficient"]) for line in lines]
    assert cases == list(itertools.product(cpu.NORMS, cpu.DTYPES, cpu.LIMITS))
    missed = [
        float(line["seconds"]) > cpu.LIMITS[line["memory_efficient"]] * float(line["seconds_torch"])
        for line in lines
    ]
    assert done.returncode == (1 if any(missed) else 0), done.stderr
    markdown = (tmp_path / "cpu.md").read_text()
    assert markdown.count("missed") == sum(missed)
    assert "- CPU: " in markdown and "- threads: 1\n" in markdown


def test_limits_on_a_cpu(tmp_path, capsys):
    costs = [cpu.Cost("RMSNorm", "bf16", on, 2e-3, 3.2e-3) for on in ("off", "on")]
    cpu.write(costs, [("threads", 2)], tmp_path)
    assert [c.missed for c in costs] == [True, False]
    markdown = (tmp_path / "cpu.md").read_text()
    assert "| RMSNorm | bf16 | off | 2.00 | 3.20 | 1.60 | 1.5, missed |" in markdown
    assert "| RMSNorm | bf16 | on | 2.00 | 3.20 | 1.60 | 3.0 |" in markdown
    assert "1.5, missed" in capsys.readouterr().out


def test_modes_of_flag_are_merged(tmp_path, capsys):
    costs = [
        flag.Record("RMSNorm", 64, 256, mode, "forward", 1e-4, 1.01e-4, 1.3e-4, 0.5)
        for mode in ("captured", "eager")
    ]
    for cost in costs:
        result_files.write_csv(tmp_path / f"{cost.mode}.csv", [("GPU", "a")], flag.Record, [cost])
    files = [str(tmp_path / f"{cost.mode}.csv") for cost in costs]
    assert entry_point.main(["merge", *files, "--out", str(tmp_path)]) == 0
    assert result_files.read_csv(tmp_path / "flag.csv", flag.Record) == ([("GPU", "a")], costs)
    row = "| RMSNorm | 64 x 256 | eager | forward | 100.0 | 101.0 | 130.0 | met | 18.0 us over |"
    assert row in (tmp_path / "flag.md").read_text()
    capsys.readouterr()


LADDER_COLUMNS = (
    "date,gpu,driver_cuda,runtime_cuda,rows,cols,buffers,step,how,microseconds,clock_mhz,cycles,"
    "terabytes_per_second,error_over_bound"
)


def test_ladder_of_measured_steps(tmp_path):
    """Table and chart from the program's file; a wrong result is called so."""
    lines = [LADDER_COLUMNS]
    for buffers in ("cached", "rotating"):
        for step, us, error in (("v1", 5000, 0.25), ("v5", 20, 3.5), ("fused_norm", 8, 0.5)):
            of_step = f"{buffers},{step},how,{us}.000,1980,{us * 1980},0.0050,{error}"
            lines.append(f"2026-01-02 03:04,some GPU,13.0,13.0,1024,2048,{of_step}")
    (tmp_path / "backward_ladder.csv").write_text("\n".join(lines))
    done = command_line("ladder", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "backward_ladder.png").read_bytes().startswith(b"\x89PNG")
    markdown = (tmp_path / "backward_ladder.md").read_text()
    assert "- GPU: some GPU\n- SM clock: 1980 MHz" in markdown
    assert "## 1024 x 2048, in the L2 cache" in markdown
    assert "## 1024 x 2048, out of the L2 cache" in markdown
    assert "| v1 | how | 5000.0 | 9 900 000 | 0.01 | 1.0 | 0.25 |" in markdown
    assert "| v5 | how | 20.0 | 39 600 | 0.01 | 250.0 | WRONG: 3.5 |" in markdown
    assert "| fused_norm | how | 8.0 | 15 840 | 0.01 | 625.0 | 0.5 |" in markdown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "a CUDA GPU is needed"), (["12by7"], "'12by7' is neither"), (["8x5000"], "4096 columns")],
)
def test_ladder_program_says_what_it_cannot_do(arguments, words):
    program = ROOT / "build" / "core" / "backward_ladder"
    if not program.exists():
        pytest.skip("compiled by `make core` alone")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert LADDER_COLUMNS.encode() in program.read_bytes()


@pytest.mark.parametrize("command", [None, *entry_point.COMMANDS])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        entry_point.main([*([command] if command else []), "--help"])
    assert stop.value.code == 0
    assert "usage: python -m benchmarks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["norm"], "a CUDA GPU is needed"),
        (["memory", "--device", "cuda"], "a CUDA GPU is needed"),
        (["memory", "--preset", "huge"], "invalid choice: 'huge'"),
        (["norm", "--shapes", "12by7"], "'12by7' is not a shape"),
        (["softmax"], "a CUDA GPU is needed"),
        (["softmax", "--tier", "fast"], "invalid choice: 'fast'"),
        (["ladder", "--program", "no/such"], "--program no/such cannot be run: No such file"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["all", "--part", "3/2"], "'3/2' is not a part"),
        (["sweep", "--random", "few"], "'few' is not a count"),
        (["overhead", "--calls", "0"], "'0' is not a positive count"),
        (["norm", "--peers", "tensorrt"], "invalid choice: 'tensorrt'"),
        (["merge", "no.csv"], "no.csv cannot be read: No such file"),
        (["compare", "pyproject.toml", "no.csv"], "pyproject.toml is no file of results"),
    ],
)
def test_what_cannot_run_is_one_sentence(arguments, words):
    done = command_line(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
