"""`python -m benchmarks attention`: the FLOPs it counts, and its files and tables."""

import dataclasses

import pytest
import torch

from benchmarks import attention, attention_report, result_files
from benchmarks.__main__ import main
from benchmarks.attention_report import OURS, Record


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
        ]
    for cell in cells:
        x = attention.Inputs(cell, "cpu")
        out = attention.ours(cell, x)()
        grads = torch.autograd.grad(out, x.leaves, x.dout)
        found = attention.errors(cell, attention.reference(cell, x), out, grads)
        assert all(error <= 1 for error in found.values()), (cell.name, found)


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
