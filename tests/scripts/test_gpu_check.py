"""The GPU check on an emulated GPU and on a CPU, and what it keeps however a part ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice, emulated
from PIL import Image
from samples import comes_true

from harness.feed.prefetcher import DataPrefetcher
from harness.runtime import accelerator
from scripts import gpu_check
from scripts.bench import differential
from scripts.bench.loop import make_batches
from scripts.gpu import copies
from scripts.gpu import feeds as gpu_feeds
from scripts.gpu import loaders as gpu_loaders
from scripts.gpu import overlap as gpu_overlap
from scripts.gpu import parts as gpu_parts
from scripts.gpu import unsettled as gpu_unsettled
from scripts.gpu.options import Options, Row
from scripts.gpu_check import DEADLINE_S, GROUPS, Findings, missing, scrubbed

# of torchvision, where TorchCodec is missing; of torch's pinning thread, whose worker was killed
pytestmark = pytest.mark.filterwarnings(
    "ignore:The image decoding:DeprecationWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
CPU = torch.device("cpu")
TESTS = Path(__file__).parents[1]
ROWS = 20
SECRET = "s3cr3t-of-the-environment"
STUB = f"""
import json, os, pathlib, signal, subprocess, sys, time

def say(**said):
    os.write(1, json.dumps(said).encode() + b"\\n")

part = sys.argv[1]
say(machine={{"cpu": "made up"}})
for number in range({ROWS}):
    say(row={{"number": number}})
if part == "wrong":
    say(wrong="off by 2")
elif part == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
elif part == "fails":
    sys.exit("no /home/somebody/file for {SECRET}")
elif part == "hangs":
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("PLACE").write_text(f"{{beside.pid}} {{os.getpid()}}")
    time.sleep(600)
say(ok="all")
"""


class DeviceStep:
    """A step that keeps the device busy for so long."""

    def __init__(self, seconds: float, *_: object) -> None:
        self.seconds = seconds
        self.model = torch.nn.Identity()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        own = accelerator.get("cpu")
        own.delay(self.seconds) if own.has_streams else time.sleep(self.seconds)

    def forget(self) -> None:
        return None

    read = forget


def run_here(
    arguments: Sequence[str], limit_s: float, cores: int | None = None
) -> subprocess.CompletedProcess[str]:
    """In place of a process: a loader's run in this one, or a report of ``train.py``."""
    said = io.StringIO()
    if arguments[0].endswith("train.py"):
        folder = Path(arguments[-1].partition("=")[2])
        folder.mkdir(parents=True, exist_ok=True)
        report = {
            "images_per_s": 100.0, "step_ms": {"median": 1.0, "p95": 2.0}, "stall_fraction": 0.0,
            "data_wait_fraction": 0.0, "loader": {"num_workers": 1, "pin_memory": True},
        }  # fmt: skip
        (folder / "report.json").write_text(json.dumps(report))
        (folder / "tuning.json").write_text(json.dumps({"demand": {"images_per_s": 300.0}}))
    elif arguments[2] in ("SPDL", "DALI"):
        return subprocess.CompletedProcess(arguments, 3, "", "no such thing")
    else:
        with redirect_stdout(said):
            gpu_loaders.main([*arguments[2:], "--batch-size=4", "--model=small", "--seconds=0"])
    return subprocess.CompletedProcess(arguments, 0, said.getvalue(), "")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to load, to copy and to measure; a step is the device's alone."""
    for module in (gpu_parts, gpu_feeds):
        monkeypatch.setattr(
            module, "make_batches", lambda count, size, side, pin: make_batches(count, 2, 16, pin)
        )
    for module, step_s in ((gpu_parts, 4e-3), (gpu_feeds, 0.1), (gpu_loaders, 1e-3)):
        monkeypatch.setattr(module, "Step", partial(DeviceStep, step_s))
        monkeypatch.setattr(module, "make_state", lambda *_: None)
    for where, values in {
        Options: {
            "scaled": lambda self, full, little: little, "need_compiler": lambda self: None,
        },
        gpu_parts: {"_run": run_here},
        gpu_loaders: {
            "peers": lambda: list(gpu_loaders.LOADERS)[3:], "_WARM": 1, "_READ_STEPS": 1,
        },
        gpu_loaders.workers: {"start_server": lambda *_: None},
        gpu_loaders.seeding: {"seed_everything": lambda seed: None},
        gpu_feeds: {"_SETTLE_S": 0.02, "THREADS": 2, "CORES": (1,)},
        copies: {"WORK_SIDE": 16, "MIB": 2**10},
        differential: {"LOADS": ((0.5, 0.0),), "_ROUNDS": 1},
        gpu_unsettled: {
            "_CALLS": 5, "_LAUNCHES": 50, "BUSY_S": 1e-3, "_MIB": 2**10,
        },
    }.items():  # fmt: skip
        for name, value in values.items():
            monkeypatch.setattr(where, name, value)


def answers(part: str, place: Path) -> list[Row]:
    """All that a part says on the device at hand."""
    said: list[Row] = []
    gpu_parts.answer_for(part, Options(CPU, True, place, time.monotonic() + 200), said.append)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(gpu_parts.PARTS.keys() - {"conformance", "pytest"}))
def test_a_part_runs_on_an_emulated_gpu(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little: None
) -> None:
    """It measures something, to its end."""
    with emulated(EmulatedDevice(), monkeypatch):
        said = answers(part, tmp_path)
    assert list(said[-1]) == ["ok"] and any("row" in answer for answer in said), said
    assert json.dumps(gpu_parts.plain(said))


@pytest.mark.parametrize("part", ["events", "prefetcher", "copies", "stall", "demand", "feeds"])
def test_without_a_gpu_a_part_does_what_a_cpu_can(part: str, tmp_path: Path, little: None) -> None:
    assert list(answers(part, tmp_path)[-1]) == ["skipped" if part == "events" else "ok"]


@pytest.mark.parametrize("slow", ["copy", "step"])
def test_right_values_pass_and_wrong_ones_do_not(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race check names the slow side of a prefetcher that gives other values."""
    assert gpu_overlap.wrong_values(CPU, slow) == []
    monkeypatch.setattr(
        gpu_overlap,
        "DataPrefetcher",
        lambda *a, **k: ((i + (i.max() == 7), n) for i, n in DataPrefetcher(*a, **k)),
    )
    assert gpu_overlap.wrong_values(CPU, slow)


def test_a_loader_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], little: None
) -> None:
    """A network trains on nvJPEG's loader; the last line is the rate, as JSON."""
    ramp = np.broadcast_to(np.linspace(0, 60, 80)[None, :, None], (60, 80, 3)).astype(np.uint8)
    for split, i in ((split, i) for split in ("train", "val") for i in range(8)):
        place = tmp_path / split / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(ramp + 150 * (i % 2)).save(place / f"{i}.jpg", quality=95)
    small = ["--seconds=0", "--batch-size=4", "--model=small", "--device=cpu"]
    assert gpu_loaders.main([gpu_loaders.NVJPEG, str(tmp_path), "0", *small]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["images_per_s"] > 0 and found["decoder"] in ("torchvision", "TorchCodec")


# the check itself, with stubs in place of its parts


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stubs in place of the parts; a folder for what is found."""
    (tmp_path / "stub_parts.py").write_text(STUB.replace("PLACE", str(tmp_path / "beside")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(gpu_check.ROOT), str(tmp_path))))
    monkeypatch.setenv("A_TOKEN", SECRET)
    monkeypatch.setattr(gpu_check, "PARTS", "stub_parts")
    return tmp_path


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "gpu_check.json").read_text())
    return {part["part"]: part for part in found["parts"]}


def left_by(folder: Path) -> list[int]:
    """The processes of a part that hangs, once it does."""
    place = folder / "beside"
    return [int(pid) for pid in place.read_text().split()] if place.exists() else []


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_all_rows_are_kept_however_a_part_ends(stubs: Path) -> None:
    """A crash, an error and a hang end with their part, and so does what it started."""
    groups = {"group": {"fine": 60, "wrong": 60, "crash": 60, "fails": 60, "hangs": 3, "last": 60}}
    findings = Findings(stubs / "gpu_check.json", groups, quick=True)
    gpu_check.run(groups, findings, quick=True, deadline_s=120)
    found = found_in(stubs)
    assert {name: part["status"] for name, part in found.items()} == {
        "fine": "ok", "wrong": "wrong", "crash": "failed", "fails": "failed",
        "hangs": "cut short", "last": "ok",
    }  # fmt: skip
    assert all(
        [row["number"] for row in part["rows"]] == list(range(ROWS)) for part in found.values()
    )
    assert found["wrong"]["problems"] == ["off by 2"]
    assert found["fails"]["found"] == "ended with 1: no *** for ***"
    assert comes_true(lambda: all(map(is_gone, left_by(stubs))))


def test_a_check_that_is_killed_leaves_its_rows(stubs: Path) -> None:
    """The part that ran has its rows, and the parts end with the check."""
    code = (
        "from scripts import gpu_check; gpu_check.PARTS, gpu_check.GROUPS, gpu_check.missing = "
        f"'stub_parts', {{'one': {{'hangs': 400}}}}, str; gpu_check.main(['--out', {str(stubs)!r}])"
    )
    check = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        there = comes_true(
            lambda: len(left_by(stubs)) == 2 and len(found_in(stubs)["hangs"]["rows"]) == ROWS, 60
        )
    finally:
        check.kill()
        check.wait()
        for pid in left_by(stubs):
            os.kill(pid, 9)
    assert there and found_in(stubs)["hangs"]["status"] == "cut short"


def test_it_starts_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the packages that are missing."""
    assert missing() == ""
    script = gpu_check.ROOT / "scripts" / "gpu_check.py"
    command = [sys.executable, "-S", "-I", str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert " torch torchvision " in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("OSError: /home/ann/x y.jpg: no such file", "OSError: ***: no such file"),
        (
            f'File "{gpu_check.ROOT}/harness/feed/buffers.py", line 3',
            'File "harness/feed/buffers.py", line 3',
        ),
        ("/opt/ann/lib/python3.12/site-packages/torch/cuda/__init__.py", "torch/cuda/__init__.py"),
        (f"HTTP 403 with {SECRET}", "HTTP 403 with ***"),
        ("at 10.1.2.3, GPU-8f6c1c1e-0000-4000-8000-000000000001", "at ***, ***"),
        ("images/s 4.5/s, 1/2; ~/data", "images/s 4.5/s, 1/2; ***"),
        ("box-of-ann: login as ann", "***: login as ***"),
        ("driver 580.159.04, torch 2.11.0+cu130", "driver 580.159.04, torch 2.11.0+cu130"),
        ("python 3.12.11, Linux-6.8-x86_64", "python 3.12.11, Linux-6.8-x86_64"),
    ],
)
def test_nothing_private_is_told(text: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and the project's files stay."""
    for name, value in {
        "HOME": "/home/ann/x y.jpg", "USER": "ann", "A_TOKEN": SECRET,
        "PYTHON_VERSION": "3.12.11", "NVARCH": "x86_64",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_check.platform, "node", lambda: "box-of-ann.example.org")
    assert scrubbed({"row": [text, 3]}) == {"row": [left, 3]}


def test_every_part_is_in_a_group_that_fits() -> None:
    """The parts of each group have time in one call."""
    assert [part for group in GROUPS.values() for part in group] == list(gpu_parts.PARTS)
    assert all(sum(group.values()) < DEADLINE_S <= 480 for group in GROUPS.values())


# the tests for CUDA, on a machine with the packages of ``NEEDED`` alone


BARE = """
import sys
# none of these can be imported
sys.modules |= dict.fromkeys(
    ("selenium", "scipy", "sklearn", "sklearn.datasets", "scipy.stats")
)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pytest_alone_collects_them(tmp_path: Path) -> None:
    """Each file has some, and none needs more packages."""
    (tmp_path / "more_of_pytest.py").write_text(BARE)
    paths = os.pathsep.join((str(tmp_path), str(TESTS / "support"), str(TESTS.parent)))
    plugins = ("-pno:timeout", "-pno:xdist", "-pno:cacheprovider", "-pmore_of_pytest")
    files = gpu_parts.cuda_tests()
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", gpu_parts.CUDA,
            *plugins, *files, *gpu_parts.CONFORMANCE,
        ],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files) > 5 and all(f"{path}::" in done.stdout for path in files)
