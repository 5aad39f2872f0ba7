"""From source distribution to wheel to a clean environment, and an import that does not fit."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import fused_norm
from fused_norm import _load

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(fused_norm.__file__).parent
ADDRESS = "https://example.org/fused_norm"
NOT_SHIPPED = (".ci/", ".gitignore", ".git")

needs_tree = pytest.mark.skipif(
    not (ROOT / "setup.py").exists(), reason="needs the source tree with its setup.py"
)


def run(*command, cwd, **environment):
    # The tree must not serve what is to be found in an environment.
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    # A copy: making it leaves files in the tree.
    copy = folder / "tree"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*cache"
    )
    shutil.copytree(ROOT, copy, ignore=ignore)
    run("git", "init", "-q", cwd=copy)
    run("git", "remote", "add", "origin", f"{ADDRESS}.git", cwd=copy)
    run(sys.executable, "setup.py", "sdist", "--dist-dir", folder / "dist", cwd=copy)
    [archive] = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [unpacked] = folder.glob("fused_norm-*")
    return unpacked


@needs_tree
def test_source_distribution_is_complete(source):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to compare with")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    shipped = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    missing = [name for name in tracked if name not in shipped and (ROOT / name).exists()]
    assert [name for name in missing if not name.startswith(NOT_SHIPPED)] == []
    assert not [name for name in shipped if name.endswith((".so", ".pyc"))]


@needs_tree
def test_wheel_installs_into_a_clean_environment(source, tmp_path):
    """The wheel is built from the source distribution alone. Torch is the one installed here: a
    second copy of it would only test the index."""
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", tmp_path, "."),
        cwd=source,
        FUSED_NORM_CUDA="0",
    )
    [wheel] = tmp_path.glob("*.whl")
    environment = tmp_path / "env"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    site = Path(torch.__file__).parents[1]
    (Path(packages.strip()) / "torch_of_this_test.pth").write_text(f"{site}\n")
    code = (
        "import torch, fused_norm as fn; x = torch.randn(3, 8, requires_grad=True);"
        "m = fn.LayerNorm(8, memory_efficient=True); m(x).sum().backward();"
        "torch.testing.assert_close(m(x), torch.nn.LayerNorm(8)(x));"
        "import os; assert os.path.exists(os.path.dirname(fn.__file__) + '/py.typed');"
        "print(fn.__file__, fn.build_info()['cuda'])"
    )
    file, cuda = run(python, "-c", code, cwd=tmp_path).split()
    assert str(environment) in file and cuda == "None"
    code = "import importlib.metadata as m; print(m.requires('fused_norm')[0])"
    needed = run(python, "-c", code, cwd=tmp_path).strip()
    assert needed == f"torch=={torch.__version__.split('+')[0]}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    for line in (
        "Description-Content-Type: text/markdown",
        "License-Expression: BSD-3-Clause",
        "Classifier: Typing :: Typed",
        f"Project-URL: Source, {ADDRESS}",
    ):
        assert line in metadata.splitlines()
    assert (ROOT / "README.md").read_text() in metadata
    modules = [path.relative_to(ROOT) for path in PACKAGE.rglob("*.py*") if path.suffix != ".pyc"]
    assert {str(module) for module in modules} <= set(names)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0a0", "2.12.0.dev20260105", "2.12.0rc1"])
def test_loader_reads_the_whole_version(version):
    """That of torch's nightly builds, and of those in NVIDIA's containers, is longer than the three
    numbers of torch's header."""
    binary = b"\x00fused_norm was built with torch " + version.encode() + b"\x00more"
    assert _load._torch_of(binary) == version


def error_of_import(package, cwd):
    done = subprocess.run(
        [sys.executable, "-c", "import fused_norm"],
        env=os.environ | {"PYTHONPATH": str(package)},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fused_norm"), done.stderr
    return last


def test_import_beside_another_torch(tmp_path):
    """One sentence with both versions and the command, before anything is loaded."""
    copy = tmp_path / "fused_norm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    [extension] = [
        f for f in PACKAGE.glob("_C.*.so") if f.name == Path(fused_norm._C.__file__).name
    ]
    ours = torch.__version__.split("+")[0]
    other = re.sub(r"\d$", lambda digit: str((int(digit[0]) + 1) % 10), ours)
    binary = extension.read_bytes()
    marker = b"fused_norm was built with torch "
    assert binary.count(marker + ours.encode()) == 1
    patched = binary.replace(marker + ours.encode(), marker + other.encode())
    (copy / extension.name).write_bytes(patched)
    message = error_of_import(tmp_path, tmp_path)
    assert f"built with torch {other}, but torch {torch.__version__} is installed" in message
    assert f"pip install torch=={other}" in message
    assert "pip install --no-build-isolation" in message

    # Not loadable at all, as where symbols are missing.
    (copy / extension.name).write_bytes(b"\x7fELF" + b"\0" * 64)
    assert "pip install --no-build-isolation" in error_of_import(tmp_path, tmp_path)

    (copy / extension.name).unlink()
    assert "is not compiled for this Python" in error_of_import(tmp_path, tmp_path)
