"""The documentation: its Python examples run, one after the other as a reader would, and its links
lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

import fused_norm

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_examples_run(capsys):
    names = {}
    with fused_norm.config.patch(decompose=False):  # which an example changes
        for page in ("README.md", "docs/stacks.md"):
            blocks = code_of(page)
            assert blocks, page
            for block in blocks:
                exec(block, names)
    print(names["fn"].memory_report(names["model"], names["x"]))
    assert "flag" in capsys.readouterr().out


def anchors_of(text):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text()), link


def test_pictures_and_table_follow_the_results():
    for path, content in runpy.run_path(str(ROOT / "docs" / "draw.py"))["products"]().items():
        assert path.read_text() == content, f"{path.name}: run `python docs/draw.py`"
