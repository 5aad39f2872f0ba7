"""tests/sanitize.py with a stand-in for compute-sanitizer: what it takes for clean."""

import pytest
import sanitize


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    def says(words, code=0):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\necho $*\necho '========= {words}'\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return says


RACES = "RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)"


@pytest.mark.parametrize(
    ("tool", "words", "code", "clean"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors", 0, True),
        ("memcheck", "ERROR SUMMARY: 3 errors", 1, False),
        ("memcheck", "ERROR SUMMARY: 0 errors", 1, False),  # the calls themselves failed
        ("memcheck", "no such device", 0, False),
        ("racecheck", RACES.format(0, 0), 0, True),
        ("racecheck", RACES.format(2, 2), 0, False),
    ],
)
def test_what_is_clean(sanitizer, capsys, tool, words, code, clean):
    sanitizer(words, code)
    assert sanitize.main(["--tool", tool, "norm", "2/16"]) == (0 if clean else 1)
    printed = capsys.readouterr().out
    assert f"{int(clean)} of 1 clean under {tool}" in printed and words in printed
    assert clean or f"--tool {tool} --error-exitcode 1" in printed


def test_every_part_is_run(sanitizer, capsys):
    sanitizer("ERROR SUMMARY: 0 errors")
    assert sanitize.main(["--jobs", "4"]) == 0
    printed = capsys.readouterr().out
    assert "45 of 45 clean under memcheck" in printed
    assert "memcheck norm 16/16: " in printed and "memcheck softmax 1/6: " in printed
