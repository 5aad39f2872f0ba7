"""The benchmarks' studies, parts, merged and compared files, and peers: without a GPU."""

import sys
import types

import pytest
import torch

pytest.importorskip("benchmarks.norm", reason="the benchmarks need the repository and rich")

from benchmark_harness import measured, result  # noqa: E402

from benchmarks import (  # noqa: E402
    __main__,
    commandline,
    limits,
    measure,
    norm,
    overhead,
    peers,
    results,
    softmax,
    studies,
    sweep,
)
from benchmarks.peers import compiled, eager, ours  # noqa: E402


def over_columns(fractions):
    """Results of one series: {N: part of the copy bandwidth}."""
    return [
        result("fused_norm", 9e-6 / fraction, cols=cols, study="columns")
        for cols, fraction in fractions.items()
    ]


def cliff_verdict(fractions):
    _, (row,) = studies.cliff_table(over_columns(fractions))
    return row[-2], row[-1]


@pytest.mark.parametrize(
    ("fractions", "below", "verdict"),
    [
        ({64: 0.9, 128: 0.9, 256: 0.8}, "none", "no cliff"),
        ({64: 0.9, 72: 0.77, 128: 0.8}, "none", "no cliff"),
        ({64: 0.9, 72: 0.76, 128: 0.8}, "72: 0.84", "cliff"),  # of the better neighbour
        ({64: 0.8, 72: 0.76, 128: 0.9}, "72: 0.84", "cliff"),
        ({64: 0.9, 65: 0.73, 128: 0.9}, "none", "no cliff"),  # odd rows may be slower
        ({64: 0.9, 65: 0.71, 128: 0.9}, "65: 0.79", "cliff"),
        ({64: 0.9, 128: 0.7, 256: 0.9}, "128: 0.78", "cliff"),  # so may no power of two
        ({64: 0.9}, "none", "-"),
    ],
)
def test_no_cliff_rule(fractions, below, verdict):
    assert cliff_verdict(fractions) == (below, verdict)


@pytest.mark.parametrize(
    ("cols", "neighbours"), [(64, (32, 128)), (65, (64, 128)), (127, (64, 128))]
)
def test_neighbours(cols, neighbours):
    assert studies.power_neighbours(cols) == neighbours


def growth_row(times):
    points = [
        result("fused_norm", seconds, rows=rows, study="rows") for rows, seconds in times.items()
    ]
    _, (row,) = studies.growth_table(points)
    return row


def test_even_growth_is_a_line():
    row = growth_row({rows: 2e-6 + 3e-9 * rows for rows in (100, 1000, 5000, 20000)})
    assert row[4:] == ["2.00", "3.000", "0.0%", "even"]


def test_a_step_is_uneven_growth():
    times = {rows: 2e-6 + 3e-9 * rows for rows in (100, 1000, 5000, 20000)} | {10000: 40e-6}
    assert growth_row(times)[-1] == "uneven"


def test_sweep_has_the_sizes_of_its_rule():
    sizes = sweep.column_sizes()
    assert sizes[0] == 64 and sizes[-1] == 131072
    expected = {65, 72, 96, 97, 127, 192, 4095, 4096, 4097, 4104, 4224, 12287, 12288, 12289, 98304}
    assert expected <= set(sizes) and 131071 in sizes


def test_random_shapes_follow_the_seed():
    shapes = sweep.random_shapes(40, 7)
    assert shapes == sweep.random_shapes(40, 7) != sweep.random_shapes(40, 8)
    assert len(shapes) == 40
    assert all(sum(shape[:2] == kind for shape in shapes) == 10 for kind in sweep.OPERATIONS)
    for _, _, rows, cols, _ in shapes:
        assert 2**19 < rows * cols <= 2**27 and 64 <= cols <= 131072


@pytest.mark.parametrize("stride", [False, True])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_parts_make_the_whole(n, stride):
    items = list(range(23))
    parts = [commandline.Part(k, n).of(items, stride) for k in range(1, n + 1)]
    assert sorted(sum(parts, [])) == items


class Unable:
    name = "unable"

    def forward(self, *arguments):
        raise AssertionError("\x1b[91mWeights must be fp32\x1b[0m\nand more")


class InPlace(ours.Norm):
    """Writes dx over dy."""

    name = "in place"

    def overwrites_dy(self, case):
        return True

    def backward(self, case, dy, *rest):
        dx, *others = super().backward(case, dy, *rest)
        return dy.copy_(dx), *others


def test_a_peer_that_fails_is_noted_and_others_go_on():
    case = norm.Case(False, 8, 32, "fp32", "forward")
    mine, unable, other = measured(case, ours.Norm(), Unable(), eager.Norm())
    assert unable.seconds is None and unable.note == "Weights must be fp32"
    assert mine.correct and other.correct


def test_our_own_failure_is_an_error():
    class Broken(ours.Norm):
        def forward(self, *arguments):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measured(norm.Case(False, 8, 32, "fp32", "forward"), Broken())


def test_a_peer_that_overwrites_dy_spoils_nothing():
    case = norm.Case(False, 8, 32, "fp32", "backward")
    in_place, mine = measured(case, InPlace(), ours.Norm())
    assert in_place.correct and mine.correct


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "case",
    [norm.Case(False, 16, 64, "fp32", ""), softmax.Case(True, 16, 64, "fp32", "")],
    ids=["norm", "softmax"],
)
def test_compiled_peer(case, direction):
    make = compiled.Norm if isinstance(case, norm.Case) else compiled.Softmax
    fields = {**vars(case), "direction": direction}
    (only,) = measured(type(case)(**fields), make())
    assert only.correct and not only.note, only


def test_no_peer_is_always_measured_first():
    job = measure.Job(None, ("a", "b", "c"))
    orders = [measure.turned(job, index).peers for index in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
def test_statistics_for_peers_without_an_operator_of_their_own(rms):
    """Of any pair of dtypes, those of the other norms."""
    case = norm.Case(rms, 16, 257, "bf16-fp32w", "backward")
    x, weight = torch.randn(16, 257).bfloat16() + 2, torch.ones(257)
    saved = peers.saved_by_plain_torch(case, x)
    expected = [t for t in ours.Norm().saved(case, x, weight, None) if t is not None]
    assert saved[0] is x and len(saved) == (2 if rms else 3)
    for a, b in zip(saved, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_absent_peers_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    module = types.ModuleType("benchmarks.peers.liger")
    module.VERSION, module.LACKS = "1", {"Softmax": "has none"}
    monkeypatch.setitem(sys.modules, "benchmarks.peers.liger", module)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.apex", raising=False)
    present, absent = peers.load("Softmax", ("torch", "liger", "apex"))
    assert list(present) == ["torch"]
    assert [name for name, _ in absent] == ["liger", "apex"]
    facts = dict(peers.facts(present, absent))
    assert facts["peers"] == f"torch {torch.__version__}"
    assert facts["absent"].startswith("liger (has none), apex (not importable: ")


def run(*arguments):
    return __main__.main([str(argument) for argument in arguments])


def write_part(path, measured_results, **facts):
    results.write(path, [("suite", "sweep"), *facts.items()], measured_results)
    return path


def test_merge_makes_tables_and_plots(tmp_path, capsys):
    columns = over_columns({64: 0.9, 72: 0.5, 128: 0.9, 256: 0.9})
    rows = [result("fused_norm", 2e-6 + 3e-9 * m, rows=m, study="rows") for m in (100, 1000, 10000)]
    random = [result("fused_norm", 9e-6, study="random"), result("quack", 8e-6, study="random")]
    first = write_part(tmp_path / "sweep-1of2.csv", columns, GPU="one", date="1")
    second = write_part(tmp_path / "sweep-2of2.csv", rows + random, GPU="one", date="2")
    assert run("merge", first, second, "--out", tmp_path / "merged") == 0
    markdown = (tmp_path / "merged" / "sweep.md").read_text()
    assert "- GPU: one\n" in markdown and "- date: 1; 2\n" in markdown
    assert "| 72: 0.56 | cliff |" in markdown and "| even |" in markdown
    assert "quack ahead by 12%" in markdown
    for name in ("sweep-columns", "sweep-rows", "sweep-random"):
        assert f"![{name}]({name}.png)" in markdown
        assert (tmp_path / "merged" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "a peer is ahead in 1 of the 1 where one was measured" in printed
    assert "; no peer was measured" in printed
    _, merged = results.read(tmp_path / "merged" / "sweep.csv")
    assert len(merged) == len(columns + rows + random)


def test_merge_refuses_the_same_part_twice(tmp_path, capsys):
    part = write_part(tmp_path / "part.csv", over_columns({64: 0.9}))
    assert run("merge", part, part, "--out", tmp_path) == 2
    assert "is in two of the files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "code", "words"),
    [(10.1e-6, 0, "+1.0%"), (9.9e-6, 0, "-1.0%"), (10.3e-6, 1, "10.00 us, then 10.30 us (+3.0%)")],
)
def test_compare(tmp_path, capsys, seconds, code, words):
    first = write_part(tmp_path / "a.csv", [result("fused_norm", 10e-6)])
    second = write_part(tmp_path / "b.csv", [result("fused_norm", seconds)])
    assert run("compare", first, second) == code
    printed = capsys.readouterr().out
    assert words in printed
    assert ("met, then 3% over" in printed) == (code == 1)


def test_compare_tolerates_peers_that_change(tmp_path):
    mine = result("fused_norm", 10e-6)
    first = write_part(tmp_path / "a.csv", [mine, result("torch", 10e-6)])
    second = write_part(tmp_path / "b.csv", [mine, result("torch", 11e-6)])
    assert run("compare", first, second) == 0


def test_host_times_are_held_to_torch(tmp_path):
    subjects = [
        overhead.Subject("softmax", "fused_norm", None, ()),
        overhead.Subject("softmax", "torch", None, ()),
    ]
    times = {(0, "forward"): 14e-6, (1, "forward"): 10e-6}
    times |= {(0, "backward"): 11e-6, (1, "backward"): 10e-6}
    right = dict.fromkeys(times, 0.5)
    judged = results.by_case(overhead.judge(subjects, times, {}, right))
    assert [results.verdict(of_case) for of_case in judged.values()] == ["met", "10% over"]


@pytest.mark.parametrize(("scale", "right"), [(1.0, True), (1.001, False)])
@pytest.mark.parametrize("operation", overhead.OPERATIONS)
def test_host_times_of_wrong_results_do_not_count(operation, scale, right):
    both = {"fused_norm": ours.functions(), "torch": eager.functions()}
    found = [s for s in overhead.subjects(both, "cpu") if s.operation == operation]
    call = found[0].call
    found[0].call = lambda: call() * scale
    worst = overhead.errors(found, {})
    assert [worst[0, d] <= 1 for d in ("forward", "backward")] == [right, right]
    times = dict.fromkeys(worst, 1e-5)
    words = results.verdict(overhead.judge(found, times, {}, worst)[::2])
    assert words == ("met" if right else "WRONG")


def test_overhead_runs_on_a_cpu(tmp_path):
    arguments = ["--device", "cpu", "--calls", 3, "--rounds", 2, "--peers", "torch"]
    assert run("overhead", *arguments, "--out", tmp_path) == 0
    markdown = (tmp_path / "overhead.md").read_text()
    assert "- note: on a CPU" in markdown and "quack (not asked for)" in markdown
    assert markdown.count("layer_norm module") >= 2
    assert (tmp_path / "overhead.png").exists()


def test_what_was_measured_is_written_when_a_run_breaks(tmp_path, monkeypatch):
    case = norm.Case(False, 8, 32, "fp32", "forward")

    def one_then_break(job, *arguments):
        if job.study == "broken":
            raise RuntimeError("the GPU is gone")
        return [result("fused_norm", 9e-6)]

    options = types.SimpleNamespace(
        part=commandline.Part(), compile_only=None, jobs=0, quick=True, out=tmp_path
    )
    monkeypatch.setattr(measure, "measure", one_then_break)
    monkeypatch.setattr(measure, "budget", lambda quick: None)
    monkeypatch.setattr(measure.timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(measure.environment, "facts", lambda bandwidth: [])
    jobs = [measure.Job(case, (ours.Norm(),)), measure.Job(case, (ours.Norm(),), "broken")]
    with pytest.raises(RuntimeError, match="gone"):
        measure.run("norm", jobs, options, [])
    assert len(results.read(tmp_path / "norm.csv")[1]) == 1


def test_limits_are_read_from_ncus_table():
    cases = limits.cases(quick=True)
    number, (_, case) = next((n, of) for n, of in enumerate(cases) if of[0] is softmax)
    counted = dict.fromkeys(limits.METRICS.values(), "0")
    counted[limits.METRICS["nanoseconds"]] = "48,352"
    counted[limits.METRICS["issue"]] = "0.72"
    counted |= {
        limits.METRICS["load_sectors"]: "3,200",
        limits.METRICS["load_requests"]: "200",
        limits.STALL.format("wait"): "1.5",
        limits.STALL.format("long_scoreboard"): "2.25",
    }
    stalls = {limits.STALL.format(name): "0" for name in limits.STALLS}
    columns = {
        "ID": "0",
        "thread Domain:Push/Pop_Range:PL_Type": f'1 ""<default domain>:case {number}:none"" ',
        "Kernel Name": "void softmax_forward_warp<PlainLoad<__half>, 2>(T1, T2, bool)",
        **(stalls | counted),
    }
    line = ",".join
    lines = [
        "==PROF== Connected to process 1",
        line(f'"{name}"' for name in columns),
        line('"ns"' for _ in columns),
        line(f'"{value}"' for value in columns.values()),
    ]
    (found,) = limits.parse(lines, cases)
    row = dict(zip(limits.HEADER, found.row(), strict=True))
    assert row["operation"] == f"{case.operation} {case.direction}"
    assert row["M x N"] == f"{case.rows} x {case.cols}"
    assert row["kernel"] == "softmax_forward_warp"
    assert (row["us"], row["issue"], row["sectors"]) == ("48.4", "72", "16.0 / -")
    assert row["stalls"].startswith("long scoreboard 2.2, wait 1.5, ")


def test_verdict_on_the_second_stage():
    def limit(kernel, nanoseconds, cols=8192):
        zeros = dict.fromkeys([*limits.METRICS], 0.0) | {"nanoseconds": nanoseconds}
        case = ("LayerNorm", "backward", 8192, cols, "bf16", kernel)
        return limits.Limit(*case, **zeros, stalls="")

    first, second = limit("norm_backward_ring", 96.0), limit("sum_partials", 4.0)
    text = limits.text([first, second])
    assert "- LayerNorm 8192 x 8192 bf16: 4.0%" in text and "(0 of 1 met;" in text
    assert "(1 of 1 met;" in limits.text([first, limit("sum_partials", 2.0)])
    # Too long a row, a kernel that does all: no part is held to anything.
    assert limits.text([limit("norm_backward_few", 5.0)]) == limits.TEXT
    longer = [limit(name, 50.0, cols=32768) for name in ("norm_backward_ring", "sum_partials")]
    assert limits.text(longer) == limits.TEXT
