"""What the compiler made of the Hopper kernels: nothing is spilled, no matrix product is waited for
alone, and registers are moved between warpgroups."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

import fused_norm
from fused_norm import _C

ARCHS = fused_norm.build_info()["arch_list"]
pytestmark = pytest.mark.skipif(
    not any(arch.startswith("9.0") for arch in ARCHS), reason="not built for compute capability 9.0"
)


def cuobjdump(*arguments):
    """The tool, of the CUDA toolkit or of triton, on the extension."""
    folders = [Path(cpp_extension.CUDA_HOME or "/usr/local/cuda", "bin")]
    if triton := importlib.util.find_spec("triton"):
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    tool = next((str(f / "cuobjdump") for f in folders if (f / "cuobjdump").exists()), None)
    if tool is None and (tool := shutil.which("cuobjdump")) is None:
        pytest.skip("cuobjdump, which shows the kernels, is not installed")
    command = [tool, *arguments, "--gpu-architecture", "sm_90a", _C.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    if "nvdisasm" in done.stderr and not done.stdout:
        pytest.skip("nvdisasm, which cuobjdump needs, is not installed")
    return done.stdout


def test_nothing_is_spilled():
    usage = re.findall(r"Function (\S*hopper\S*):\s*REG:\d+ STACK:(\d+)", cuobjdump("-res-usage"))
    assert usage
    assert {name: int(bytes_) for name, bytes_ in usage if bytes_ != "0"} == {}


def test_products_run_in_batches():
    """ptxas that finds a product's registers in use waits after each one and says so in a remark
    only (C7510 and its like); where it ignores setmaxnreg (C7508), the instruction is missing."""
    bodies = re.split(r"\n\s*Function : ", cuobjdump("-sass"))[1:]
    kernels = {body.split()[0]: body for body in bodies if "ward_hopper" in body.split()[0]}
    assert any("forward" in name for name in kernels) and any(
        "backward" in name for name in kernels
    )
    for name, body in kernels.items():
        products = len(re.findall(r"\bHGMMA\b", body))
        waits = len(re.findall(r"\bWARPGROUP\.DEPBAR\b", body))
        assert products >= 8, name  # two products of 64 columns
        assert waits <= products / 4, name
        assert len(re.findall(r"\bUSETMAXREG\b", body)) == 2, name
