"""`python -m benchmarks attention`: the FLOPs it counts, and its files and tables."""

import dataclasses
import functools
import sys
import types

import pytest
import torch

from benchmarks import attention, attention_report, environment, result_files, timing
from benchmarks.__main__ import main
from benchmarks.attention_report import OURS, Record
from fused_norm import flash_attn


def record(peer, seconds, *, cell="64 x 512 full", group="lengths", error=0.2, **others):
    fields = dict.fromkeys(("tflops", "mhz", "watts"), 1.0) | {"peak_bytes": 2**20} | others
    return Record(group, cell, 64, 512, "full", "forward", peer, seconds, error=error, **fields)


FACTS = [("suite", "attention"), ("GPU", "a chip: large")]


@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("lengths", [(), (5, 1, 9, 9)])
def test_flops_are_those_of_the_pairs_seen(window, lengths):
    cell = attention.Cell("", 64, 12, True, window, lengths=lengths, tokens=24)
    pairs = 0
    for n in lengths or (12, 12):
        i, j = torch.arange(n)[:, None], torch.arange(n)
        pairs += int(((j <= i) & (j >= i - (n if window is None else window))).sum())
    assert cell.flops("forward") == 4 * pairs * 32 * 64
    assert cell.flops("backward") == 2.5 * cell.flops("forward")
    full = attention.Cell("", 64, 12, tokens=24)
    assert full.flops("forward") == 4 * 2 * 144 * 32 * 64
    cross = attention.Cell("", 64, 12, tokens=24, keys=5, value_dim=32)
    assert cross.flops("forward") == 2 * (64 + 32) * 2 * 12 * 5 * 32
    assert cross.flops("backward") == 2 * (3 * 64 + 2 * 32) * 2 * 12 * 5 * 32


def test_shapes_of_models():
    cells = {cell.name: cell for cell in attention.of_models()}
    assert len(cells) == len(attention.MODELS)
    text = cells["Stable Diffusion 1.5, text: 8 x 8 x 4096 (77 keys) D 40"]
    x = attention.Inputs(dataclasses.replace(text, tokens=4096), "meta")
    assert [t.shape for t in x.qkv] == [(1, 8, 4096, 40), (1, 8, 77, 40), (1, 8, 77, 40)]
    name = "DeepSeek-V3, 16 heads: 1 x 16 x 4096 D 192 (128) causal"
    assert cells[name].value_dim == 128 and cells[name].heads == 16


def test_masks_are_booleans():
    """torch takes no int for `is_causal`."""
    assert all(type(cell.causal) is bool for cell in attention.cells(False))


@pytest.mark.parametrize("option", attention.OPTIONS)
def test_ours_is_within_the_bound_of_the_reference(option):
    """Of small cells on a CPU."""
    size = {"tokens": 256, "width": 128}
    cells = [attention.Cell("options", 32, 128, option=option, **size)]
    if option == "none":
        cells += [
            attention.Cell("windows", 32, 128, True, window=7, group_size=2, **size),
            attention.Cell("packed", 32, 128, True, lengths=(128, 64, 32, 32), **size),
            attention.Cell("models", 32, 128, model="a", keys=77, value_dim=16, **size),
        ]
    for cell in cells:
        x = attention.Inputs(cell, "cpu")
        out = attention.ours(cell, x)()
        grads = torch.autograd.grad(out, x.leaves, x.dout)
        found = attention.errors(cell, attention.reference(cell, x), out, grads)
        assert all(error <= 1 for error in found.values()), (cell.name, found)


def test_a_run_on_a_cpu(tmp_path, monkeypatch, capsys):
    """With a clock that stands in for the GPU's, this library in the place of flash-attn 3 and 4,
    and a peer that fails."""
    pytest.importorskip("matplotlib")
    size = {"tokens": 64, "width": 64}
    cells = [
        attention.Cell("lengths", 32, 32, True, **size),
        attention.Cell("windows", 32, 32, True, window=7, **size),
        attention.Cell("packed", 32, 32, True, lengths=(32, 16, 16), **size),
        attention.Cell("host", 32, 16, tokens=16, width=64),
    ]
    third = types.SimpleNamespace(
        flash_attn_func=lambda *qkv, deterministic, **options: (
            flash_attn.flash_attn_func(*qkv, **options),
            None,
        ),
        flash_attn_varlen_func=lambda *qkv, deterministic, **options: (
            flash_attn.flash_attn_varlen_func(*qkv, **options)
        ),
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(attention, "cells", lambda quick: cells)
    monkeypatch.setattr(
        attention, "Inputs", functools.partial(attention.Inputs, device=torch.device("cpu"))
    )
    monkeypatch.setattr(environment, "facts", lambda: [("GPU", "none")])
    monkeypatch.setattr(timing, "turn", lambda call, *_: (call() is not None and 1e-3, 1e-3))
    monkeypatch.setattr(timing, "captured", lambda call: (call, 1))
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(attention, "Sensors", lambda: None)
    options = types.SimpleNamespace(
        peers=["flash-attn 3", "flash-attn 4"], groups=None, dims=[32], lengths=[32, 48],
        part=attention.commandline.Part(), rounds=2, milliseconds=1, quick=False, out=tmp_path,
    )  # fmt: skip
    assert attention.run(options) == 0
    _, records = result_files.read_csv(tmp_path / "attention.csv", Record)
    timed = [r for r in records if r.direction]
    assert [r.cell for r in timed if r.peer == OURS] == [
        cell.name for cell in cells[:3] for _ in attention.DIRECTIONS
    ]
    assert len(timed) == 2 * 2 * 3 and all(r.error <= 1 and r.seconds == 1e-3 for r in timed)
    assert {r.peer for r in records if r.note} == {"flash-attn 4"}
    capsys.readouterr()


def test_files_and_merge(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first = [
        record(OURS, 1e-3),
        record("torch FLASH", 2e-3),
        record("flash-attn 4", 0.0, note="no"),
    ]
    second = [
        record(OURS, 3e-3, cell="64 x 512 causal"),
        record("torch FLASH", 2e-3, error=7.0, cell="64 x 512 causal"),
    ]
    for name, records in (("one", first), ("two", second)):
        attention_report.write(FACTS, records, tmp_path, name)
        assert result_files.read_csv(tmp_path / f"{name}.csv", Record) == (FACTS, records)
    (tmp_path / "other.csv").write_text("# suite: norm\nstudy,operation\n")
    assert result_files.read_csv(tmp_path / "other.csv", Record) is None
    out = tmp_path / "out"
    assert (
        main(["merge", str(tmp_path / "one.csv"), str(tmp_path / "two.csv"), "--out", str(out)])
        == 0
    )
    assert result_files.read_csv(out / "attention.csv", Record) == (FACTS, first + second)
    text = (out / "attention.md").read_text()
    assert "flash-attn 4: no" in text and "WRONG (7 x bound)" in text
    assert (out / "attention.png").exists()
    capsys.readouterr()


def test_lead():
    ours, rival = record(OURS, 1e-3), record("torch FLASH", 2e-3)
    assert attention_report.lead({OURS: ours, rival.peer: rival}) == 2
    wrong = dataclasses.replace(rival, error=1.5)
    assert attention_report.lead({OURS: ours, rival.peer: wrong}) is None
