"""What was built: build_info, the size of the extension, the number of kernels in the binary."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from budget import BUDGET, cuda_tool, kernel_counts

import fused_norm
from fused_norm import _C

MAX_BYTES = 40_000_000

INFO = fused_norm.build_info()


def test_build_info():
    assert set(INFO) >= {"version", "torch", "cuda", "arch_list", "cxx"}
    assert INFO["version"] == fused_norm.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fused_norm.__version__)
    assert INFO["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert INFO["cxx"]
    if INFO["cuda"] is None:
        assert INFO["arch_list"] == []
    else:
        assert INFO["cuda"].split(".")[0] == torch.version.cuda.split(".")[0]
        assert INFO["arch_list"]
        assert all(re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", arch) for arch in INFO["arch_list"])


def test_stub_describes_the_extension():
    """_C.pyi has every name, and those of arguments where they can be passed by name."""
    tree = ast.parse(Path(fused_norm.__file__).with_name("_C.pyi").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    stub = {node.name: [argument.arg for argument in node.args.args] for node in functions}
    names = {name for name in {*stub, *classes} if not name.startswith("_")}
    assert names == {name for name in dir(_C) if not name.startswith("_")}
    for name, arguments in stub.items():
        # The first one, where there are several.
        signature = re.search(r"\w+\((.*)\) -> ", getattr(_C, name).__doc__).group(1)
        of_extension = re.findall(r"(\w+): ", signature)
        assert of_extension == arguments or "arg0" in of_extension, name


@pytest.mark.parametrize(
    ("extension", "words"),
    [(None, "is not compiled"), (b"of another torch", "install fused_norm again")],
)
def test_without_a_fitting_extension_the_import_says_what_to_do(extension, words, tmp_path):
    package = tmp_path / "fused_norm"
    shutil.copytree(Path(_C.__file__).parent, package, ignore=shutil.ignore_patterns("*.so"))
    if extension is not None:
        (package / Path(_C.__file__).name).write_bytes(extension)
    command = [sys.executable, "-c", "import fused_norm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


def test_extension_is_small():
    assert Path(_C.__file__).stat().st_size < MAX_BYTES


@pytest.mark.skipif(INFO["cuda"] is None, reason="a CPU-only build has no kernels")
def test_number_of_kernels():
    """It bounds the time of a build and the size of the extension."""
    if cuda_tool("cuobjdump") is None:
        pytest.skip("cuobjdump, which lists the kernels, is not installed")
    targets = kernel_counts(_C.__file__)
    assert targets
    for target, counts in targets.items():
        assert all(count <= BUDGET[kind][0] for kind, count in counts.items()), (target, counts)


@pytest.mark.skipif(not os.environ.get("CI"), reason="elsewhere what is missing is left out")
def test_ci_leaves_nothing_out_for_want_of_a_package():
    packages = ("hypothesis", "matplotlib", "rich", "tqdm", "transformers", "benchmarks")
    assert [name for name in packages if importlib.util.find_spec(name) is None] == []
    assert INFO["cuda"] is None or cuda_tool("cuobjdump") is not None


@pytest.mark.skipif(
    INFO["cuda"] is not None or not torch.cuda.is_available(),
    reason="needs a GPU and a CPU-only build",
)
def test_cpu_only_build_says_how_to_get_the_kernels():
    with pytest.raises(RuntimeError, match="FUSED_NORM_CUDA"):
        fused_norm.functional.layer_norm(torch.ones(2, 4, device="cuda"), [4])
