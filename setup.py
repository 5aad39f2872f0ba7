"""Builds the extension fused_norm._C; everything else about the package is in pyproject.toml.

Environment variables:
  FUSED_NORM_CUDA       1: fail rather than build without CUDA; 0: build for the CPU only.
  TORCH_CUDA_ARCH_LIST  compute capabilities to compile for, such as "8.0;9.0+PTX".
  MAX_JOBS              compilations at a time (default: the number of cores).
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import setuptools

INSTALL_COMMANDS = "\n  pip install torch\n  pip install --no-build-isolation ."
DEFAULT_ARCH_LIST = "9.0+PTX"
MIN_CAPABILITY = (8, 0)
HOPPER_SOURCES = "csrc/core/attention/hopper_*.cu"
HOPPER_FLAGS = ["-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-warn-spills"]


def fail(message):
    sys.exit(f"\nfused_norm: {message}\n")


def toolkit_version(home):
    """Version of the CUDA toolkit in the folder `home`, such as "13.0"; None without an nvcc."""
    nvcc = Path(home or "/nonexistent", "bin", "nvcc")
    if not nvcc.exists():
        return None
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\d+\.\d+)", output).group(1)


def why_not_cuda(torch, cuda_home):
    """Says what keeps the CUDA sources from being compiled; None if nothing does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    toolkit = toolkit_version(cuda_home)
    if toolkit is None:
        return "no CUDA toolkit was found (put nvcc on PATH or set CUDA_HOME)"
    if toolkit.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"the CUDA toolkit in {cuda_home} has version {toolkit} and torch was built with CUDA "
            f"{torch.version.cuda}: the major versions must be equal (CUDA_HOME names the toolkit)"
        )
    return None


def choose_cuda(torch, cuda_home):
    """Whether to compile the CUDA sources. Never leaves them out unasked where a GPU is."""
    wish = os.environ.get("FUSED_NORM_CUDA", "")
    if wish not in ("", "0", "1"):
        fail(f"FUSED_NORM_CUDA is {wish!r}; it must be 0, 1 or unset")
    reason = "FUSED_NORM_CUDA=0 asks for it" if wish == "0" else why_not_cuda(torch, cuda_home)
    if reason is None:
        return True
    if wish == "1":
        fail(f"FUSED_NORM_CUDA=1, but {reason}")
    if wish != "0" and torch.cuda.is_available():
        fail(f"a GPU is visible, but {reason}. FUSED_NORM_CUDA=0 builds for the CPU only.")
    print(f"fused_norm: CPU-only build, as {reason}", flush=True)
    return False


def choose_arch_list(torch):
    """What to compile for: the capabilities asked for, else the visible GPUs', else 9.0+PTX."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(" ", ";").strip(";")
    if asked in ("", "native"):
        gpus = range(torch.cuda.device_count())
        capabilities = sorted({torch.cuda.get_device_capability(gpu) for gpu in gpus})
        asked = ";".join(f"{major}.{minor}" for major, minor in capabilities)

    def too_old(arch):
        number = re.match(r"(\d+)\.(\d+)", arch)
        return number is not None and tuple(map(int, number.groups())) < MIN_CAPABILITY

    archs = [arch for arch in asked.split(";") if arch and not too_old(arch)]
    dropped = [arch for arch in asked.split(";") if arch and too_old(arch)]
    if dropped and not archs:
        fail(f"compute capability 8.0 or later is needed, not {' '.join(dropped)}")
    if dropped:
        print(f"fused_norm: left out, below compute capability 8.0: {' '.join(dropped)}")
    return ";".join(archs) or DEFAULT_ARCH_LIST


def project_urls():
    """Where the sources are: what the clone came from, if that is a public address; what an sdist
    was made from."""
    if Path("PKG-INFO").exists():
        lines = Path("PKG-INFO").read_text().splitlines()
        urls = [
            line.removeprefix("Project-URL: ") for line in lines if line.startswith("Project-URL: ")
        ]
        return dict(url.split(", ", 1) for url in urls)
    if not Path(".git").exists() or shutil.which("git") is None:
        return {}
    command = ["git", "config", "remote.origin.url"]
    url = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"Source": url.removesuffix(".git")} if re.match(r"https://[^@]+$", url) else {}


def sources(*patterns):
    return sorted(path for pattern in patterns for path in glob(pattern, recursive=True))


def hopper_build(build_ext, flags):
    """The command class that also compiles HOPPER_SOURCES, for Hopper's own instructions alone.

    They belong to the architecture 9.0a, which has no PTX that a later chip could run, and ninja
    compiles all files of a module for the same ones: hence a compilation of its own, whose objects
    are then linked into the module.
    """

    class BuildWithHopper(build_ext):
        def build_extension(self, ext):
            ext.extra_objects += self.compiler.compile(
                sources(HOPPER_SOURCES),
                output_dir=os.path.join(self.build_temp, "sm_90a"),
                macros=ext.define_macros,
                include_dirs=ext.include_dirs,
                extra_postargs={**flags, "nvcc": [*flags["nvcc"], *HOPPER_FLAGS]},
                depends=ext.depends,
            )
            super().build_extension(ext)

    return BuildWithHopper


def extension():
    """The extension module, and the command class that compiles it with ninja."""
    if int(setuptools.__version__.split(".")[0]) < 77:
        fail("setuptools is too old. Run:\n  pip install --upgrade setuptools wheel")
    try:
        import torch
    except ImportError:
        fail(f"torch must be installed before the build. Run:{INSTALL_COMMANDS}")
    # The ninja of this environment serves even when the environment is not activated.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    from torch.utils import cpp_extension

    version = re.search(r'^version = "(.+)"$', Path("pyproject.toml").read_text(), re.M).group(1)
    cuda = choose_cuda(torch, cpp_extension.CUDA_HOME)
    files = sources("csrc/ops/*.cpp", "csrc/cpu/*.cpp", "csrc/core/**/*.cpp")
    arch_list = choose_arch_list(torch) if cuda else ""
    hopper = re.search(r"\b9\.0", arch_list) is not None
    # All but the "+cu130" of it; torch's header lacks the "a0" or ".dev20260105" of other builds.
    torch_version = torch.__version__.split("+")[0]
    macros = [
        ("FUSED_NORM_VERSION", f'"{version}"'),
        ("FUSED_NORM_TORCH_VERSION", f'"{torch_version}"'),
        ("FUSED_NORM_ARCH_LIST", f'"{arch_list}"'),
    ]
    if cuda:
        print(f"fused_norm: CUDA build for compute capability {arch_list}", flush=True)
        os.environ["TORCH_CUDA_ARCH_LIST"] = arch_list
        files += sorted({*sources("csrc/core/**/*.cu")} - {*sources(HOPPER_SOURCES)})
        macros.append(("FUSED_NORM_WITH_CUDA", "1"))
        if hopper:
            macros.append(("FUSED_NORM_WITH_HOPPER", "1"))

    # Compiled with OpenMP but not linked to it: the calls bind to the one runtime that torch loads.
    flags = {
        "cxx": ["-O3", "-g0", "-fvisibility=hidden", "-fopenmp", "-fno-trapping-math"],
        "nvcc": ["-O3", "-Xfatbin=-compress-all"],
    }
    # --compress-mode=size would make the kernels a third smaller, for a tenth of the build's time.
    # torch takes the constructors and operators of the 16-bit types away; CMakeLists.txt does not.
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"):
        flags["nvcc"].append(f"-U__CUDA_NO_{name}__")
    extension_class = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    module = extension_class(
        "fused_norm._C",
        files,
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=macros,
        extra_compile_args=flags if cuda else flags["cxx"],
    )
    build_ext = cpp_extension.BuildExtension
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": hopper_build(build_ext, flags) if hopper else build_ext},
        "install_requires": [f"torch=={torch_version}"],  # no other one can load the extension
    }


# A source distribution needs no compiler and no torch.
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}
metadata_only = not {"egg_info", "sdist"}.isdisjoint(sys.argv) and BUILDS.isdisjoint(sys.argv)
setuptools.setup(
    project_urls=project_urls(),
    **({"install_requires": ["torch>=2.9"]} if metadata_only else extension()),
)
