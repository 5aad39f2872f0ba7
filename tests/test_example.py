"""The examples as their user runs them; of train_gpt.py a few steps on the CPU, and every bad
option."""

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fused_norm

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"

for needed in ("matplotlib", "rich", "tqdm"):
    pytest.importorskip(needed)


def train_gpt(*arguments):
    package_root = Path(fused_norm.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(package_root)}
    return subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_three_runs_agree_and_save_the_predicted_memory(norm, tmp_path):
    done = train_gpt("--norm", norm, "--steps", 4, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("torch", "fused_norm", "memory_efficient", "tokens/s", "MiB"):
        assert words in done.stdout
    # Nine norms of 1024 rows of 128 fp32 numbers; LayerNorm also frees a mean a row.
    freed = 9 * 1024 * (128 if norm == "rms" else 129) * 4
    assert f"memory_efficient frees {freed:,} bytes a step; predicted: {freed:,}." in done.stdout
    plot = tmp_path / f"loss_{norm}.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_fused_attention_gives_the_same_losses(tmp_path):
    """Within what the script itself allows, or its exit code is 1."""
    done = train_gpt("--attention", "fused", "--steps", 4, "--out", tmp_path)
    assert done.returncode == 0, done.stderr


def test_one_step_on_a_folder_of_text(tmp_path):
    folder = tmp_path / "text"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("some text " * 20)
    (folder / "more" / "b.bin").write_bytes(bytes(range(256)))
    (folder / ".hidden").write_text("no text")
    done = train_gpt("--text", folder, "--steps", 1, "--seed", 7, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reading 456 bytes" in done.stdout


BAD_OPTIONS = {
    "no such file": ("--text {tmp}/none", "{tmp}/none does not exist"),
    "empty file": ("--text {tmp}/empty.txt", "has 0 bytes, but needs at least 129"),
    "short file": ("--text {tmp}/short.txt", "has 128 bytes, but needs at least 129"),
    "empty folder": ("--text {tmp}/folder", "has 0 bytes, but needs at least 129"),
    "preset": ("--preset huge", "invalid choice: 'huge'"),
    "norm": ("--norm batch", "invalid choice: 'batch'"),
    "attention": ("--attention none", "invalid choice: 'none'"),
    "no step": ("--steps 0", "--steps 0 is too few"),
    "no number": ("--steps many", "invalid int value: 'many'"),
    "large seed": (f"--seed {2**64}", f"--seed {2**64} does not fit into 64 bits"),
    "no device": ("--device toaster", "--device toaster is not a device"),
    "other device": ("--device meta", "--device meta is not supported"),
    "no such GPU": ("--device cuda:99", "--device cuda:99"),
    "out is a file": ("--out {tmp}/empty.txt", "{tmp}/empty.txt cannot be used: File exists"),
    "unknown option": ("--speed 9", "unrecognized arguments: --speed 9"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_end_with_one_sentence(case, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("x" * 128)
    options, words = (text.format(tmp=tmp_path) for text in BAD_OPTIONS[case])
    main = runpy.run_path(str(SCRIPT))["main"]  # in this process: a dozen starts of torch are slow
    try:
        code = main(["--device", "cpu", *options.split()])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    out, err = capsys.readouterr()
    assert err.startswith("train_gpt.py: ") and words in err
    assert len(err.splitlines()) == 1 and out == ""


def test_exit_code_of_a_bad_option(tmp_path):
    done = train_gpt("--text", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr == f"train_gpt.py: --text {tmp_path / 'none'} does not exist.\n"


WRONG = {
    "a loss": ("fused_norm", {"losses": [3.0, 2.0002]}, "fused_norm: a loss is 2.0e-04 off"),
    "a NaN": ("memory_efficient", {"losses": [3.0, math.nan]}, "a loss is nan off torch's"),
    "bytes": ("memory_efficient", {"saved_bytes": 1}, "frees 9,999,999 bytes, but"),
}


@pytest.mark.parametrize("case", [None, *WRONG])
def test_exit_code_of_runs_that_disagree(case, tmp_path, capsys):
    """The three runs are judged on a CPU in fp32: here they are not run but given."""
    main = runpy.run_path(str(SCRIPT))["main"]
    script = main.__globals__
    predicted = script["predicted_saving"](script["PRESETS"]["tiny"], "rms")

    def train(name, *_):
        values = {"losses": [3.0, 2.0], "saved_bytes": 10_000_000}
        if name == "memory_efficient":
            values["saved_bytes"] -= predicted
        if case is not None and name == WRONG[case][0]:
            values |= WRONG[case][1]
        return script["Result"](tokens_per_second=1.0, peak_bytes=None, **values)

    script["train"] = train
    code = main(["--device", "cpu", "--out", str(tmp_path)])
    errors = capsys.readouterr().err
    if case is None:
        assert code == 0 and errors == ""
    else:
        assert code == 1 and errors.startswith("FAILED: ") and WRONG[case][2] in errors


@pytest.mark.parametrize(
    "name, says",
    [
        ("norm.py", ["16,793,600", "16,384", "gradients with the flag differ by"]),
        ("attention.py", ["largest difference from torch's", "log-sum-exp (2, 8, 512)"]),
        ("hugging_face.py", ["5 x transformers.LlamaRMSNorm, memory_efficient", "loss"]),
    ],
)
def test_short_examples(name, says):
    environment = {"PYTHONPATH": str(Path(fused_norm.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        env=os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for words in says:
        assert words in done.stdout
    if "differ by" in done.stdout:
        assert float(re.search(r"differ by (\S+)", done.stdout)[1]) < 1e-5
    if "loss" in done.stdout:
        loss, first = map(float, re.findall(r"\d\.\d\d", done.stdout.splitlines()[-1]))
        assert loss < 0.7 * first
