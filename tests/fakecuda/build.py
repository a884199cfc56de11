"""Builds the made-up CUDA runtime, once for each state of its sources and each torch.

``python -m tests.fakecuda.build COMMAND...`` runs a command on it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".pytest_cache" / "fakecuda"
# The first and the last version that the tests passed with. Another one is skipped, so that a new
# torch fails nothing before somebody has looked: the weekly job tells.
TRIED = (2, 11), (2, 15)
ANY_TORCH = "FAKE_CUDA_ANY_TORCH"
# torch's libraries look the driver up by this name, and find the preloaded library
DRIVER = "libcuda.so.1"
# nvidia-ml-py looks this one up, and finds the same library by the link
NVML = "libnvidia-ml.so.1"


def unavailable() -> str | None:
    """Returns why the runtime cannot be built here; None where it can."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the made-up CUDA runtime is for Linux on x86-64"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not (TRIED[0] <= version <= TRIED[1] or os.environ.get(ANY_TORCH)):
        return f"the made-up CUDA runtime was not tried with torch {torch.__version__}"
    if shutil.which("g++") is None:
        return "the made-up CUDA runtime needs g++"
    if _headers() is None:
        return "the made-up CUDA runtime needs the headers of nvidia-cuda-crt (uv sync --group dev)"
    return None


def environment() -> dict[str, str]:
    """Returns this process's variables, with which a new one sees the made-up GPUs."""
    folder = _built()
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_PRELOAD": str(folder / DRIVER),
        "LD_LIBRARY_PATH": str(folder),
        "CUDA_MODULE_LOADING": "LAZY",
    }


def _headers() -> Path | None:
    """Returns the folder of CUDA's headers, those of both distributions in one."""
    found = importlib.util.find_spec("nvidia")
    for root in (found and found.submodule_search_locations) or ():
        folder = Path(root) / f"cu{torch.version.cuda.split('.')[0]}" / "include"
        if all((folder / name).exists() for name in ("cuda_runtime_api.h", "crt/host_config.h")):
            return folder
    return None


def _built() -> Path:
    """Returns the folder of the libraries, built if they are not there."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in {".cpp", ".h", ".inc"})
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _compile(Path(scratch) / "built")
            # another process may have been first
            if not folder.exists():
                os.rename(Path(scratch) / "built", folder)
    return folder


def _compile(folder: Path) -> None:
    folder.mkdir()
    command = ["g++", "-O1", "-std=c++17", "-Wall", "-fPIC", "-shared", "-I", str(_headers())]
    command += [*map(str, sorted(HERE.glob("*.cpp"))), "-lpthread"]
    command += [f"-Wl,-soname,{DRIVER}", "-o", str(folder / DRIVER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / NVML).symlink_to(DRIVER)


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
