"""The GPU check on an emulated GPU: every statement of its scripts runs, there or, where it is for
that alone, on a CPU.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulator import EmulatedDevice, emulated
from lines import Lines

from harness.runtime import accelerator
from scripts import (
    bench_pinned_copy,
    differential,
    gpu_check,
    gpu_feeds,
    gpu_loaders,
    gpu_overlap,
    gpu_parts,
    gpu_tests,
    gpu_unsettled,
)
from scripts.bench_loop import make_batches
from scripts.gpu_options import Options, Row

CPU = torch.device("cpu")
FILES = sorted((gpu_check.ROOT / "scripts").glob("gpu_*.py"))
ON_A_CPU = ("elapsed", "prefetcher", "copies", "stall", "demand", "feeds")
GPU_ONLY: dict[str, dict[str, str]] = {}
"""By file the first lines of statements that only a real GPU runs, and why."""

pytestmark = [
    pytest.mark.timeout(200),
    # of torchvision, where TorchCodec is missing; of torch's thread that page-locks, whose worker
    # was killed
    pytest.mark.filterwarnings(
        "ignore:The image decoding:DeprecationWarning",
        "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    ),
]
STUB = """
import os, sys, time
part = sys.argv[1]
os.write(1, b'{"machine": {"cpu": ["made up"]}}\\n{"row": {"number": 1}}\\n')
if part == "hangs":
    time.sleep(600)
if part == "fails":
    sys.exit("no")
os.system("sleep 0.5 >/dev/null 2>&1 &")
os.write(1, b'{"wrong": "off"}\\n{"ok": "ran"}\\n')
"""
REPORT: Row = {
    "images_per_s": 100.0, "step_ms": {"median": 1.0, "p95": 2.0}, "stall_fraction": 0.0,
    "data_wait_fraction": 0.0, "loader": {"num_workers": 1, "pin_memory": True},
}  # fmt: skip
"""What a run of ``train.py`` leaves."""
RUN = gpu_parts._run
SCALED = Options.scaled
LEFT = gpu_unsettled._left
PEERS = gpu_loaders.peers


class DeviceStep:
    """A step that keeps the device busy for so long."""

    def __init__(self, seconds: float, *_: object) -> None:
        self.seconds = seconds
        self.model = torch.nn.Identity()

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        own = accelerator.of("cpu")
        own.delay(self.seconds) if own.has_streams else time.sleep(self.seconds)

    def forget(self) -> None:
        return None

    read = forget


def run_here(
    arguments: Sequence[str], limit_s: float, cores: int | None = None
) -> subprocess.CompletedProcess[str]:
    """In place of a process of its own: the loader's run here; a tuned run's report; DALI is late,
    and SPDL fails.
    """
    said = io.StringIO()
    if arguments[0].endswith("train.py"):
        folder = Path(arguments[-1].partition("=")[2])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(REPORT))
        (folder / "tuning.json").write_text(json.dumps({"demand": {"images_per_s": 300.0}}))
    elif arguments[1] == "SPDL":
        return subprocess.CompletedProcess(arguments, 3, "", "no such thing")
    elif arguments[1] == "DALI":
        raise subprocess.TimeoutExpired("gpu_loaders.py", limit_s)
    else:
        with redirect_stdout(said):
            gpu_loaders.main([*arguments[1:], "--batch-size=4", "--model=small", "--seconds=0"])
    return subprocess.CompletedProcess(arguments, 0, said.getvalue(), "")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little to load, to copy and to measure; a step is the device's alone, and ``train.py`` is not
    started.
    """
    for module in (gpu_parts, gpu_unsettled, gpu_feeds):
        monkeypatch.setattr(
            module, "make_batches", lambda count, size, side, pin: make_batches(count, 2, 16, pin)
        )
    for module, step_s in ((gpu_parts, 4e-3), (gpu_feeds, 0.1), (gpu_loaders, 1e-3)):
        monkeypatch.setattr(module, "Step", partial(DeviceStep, step_s))
        monkeypatch.setattr(module, "make_state", lambda *_: None)
    for where, name, value in (
        (Options, "scaled", lambda self, full, little: little),
        (gpu_parts, "_run", run_here),
        (
            gpu_loaders,
            "peers",
            lambda: list(gpu_loaders.LOADERS)[3:],
        ),
        (gpu_loaders.workers, "start_server", lambda *_: None),
        (gpu_loaders.seeding, "seed_everything", lambda seed: None),
        (gpu_loaders, "_WARM", 1),
        (gpu_loaders, "_READ_STEPS", 1),
        (gpu_feeds, "_SETTLE_S", 0.02),
        (gpu_feeds, "THREADS", 2),
        (gpu_feeds, "CORES", (1,)),
        (bench_pinned_copy, "WORK_SIDE", 16),
        (bench_pinned_copy, "MIB", 2**10),
        (differential, "LOADS", ((0.5, 0.0),)),
        (differential, "_ROUNDS", 1),
        (gpu_unsettled, "_CALLS", 5),
        (gpu_unsettled, "_LAUNCHES", 50),
        (gpu_unsettled, "_PREFETCHERS", 2),
        (gpu_unsettled, "BUSY_S", 1e-3),
        (gpu_unsettled, "_MIB", 2**10),
    ):
        monkeypatch.setattr(where, name, value)


@contextmanager
def kept_output() -> Iterator[None]:
    """Puts the standard output back that a process of its own gives away."""
    kept = os.dup(1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def ended(name: str, place: Path, left_s: float = 200.0, quick: bool = True) -> Row:
    """How a part ended on the device at hand."""
    said: list[Row] = []
    gpu_parts.answer_for(name, Options(CPU, quick, place, time.monotonic() + left_s), said.append)
    return said[-1]


def whole_check(place: Path, patch: pytest.MonkeyPatch) -> None:
    """``gpu_check.py`` with stubs for parts, of which one fails and one hangs, and what it says of
    a bare machine.
    """
    (place / "stub_parts.py").write_text(STUB)
    patch.setenv("PYTHONPATH", str(place))
    patch.setattr(gpu_check, "PARTS", "stub_parts")
    patch.setattr(gpu_check, "_PUT_AWAY_S", 0.5)
    patch.setattr(
        gpu_check, "GROUPS", {"one": {"fine": 20, "fails": 20}, "two": {"hangs": 2, "late": 600}}
    )
    patch.setattr(gpu_check, "_LEAST_S", 600.0)
    assert gpu_check.main(["--out", str(place), "--quick"]) == 1
    found = {
        part["part"]: part["status"]
        for part in json.loads((place / "gpu_check.json").read_text())["parts"]
    }
    assert found == {"fine": "wrong", "fails": "failed", "hangs": "cut short", "late": "not run"}
    patch.setattr(gpu_check, "NEEDED", {"no_such_module": "nothing"})
    assert gpu_check.main([]) == 2


def processes(place: Path, patch: pytest.MonkeyPatch) -> None:
    """What runs in a process of its own: a part, the tests, and the end of both."""
    killed: list[int] = []
    patch.setattr(os, "killpg", lambda group, number: killed.append(number))
    patch.setattr(
        gpu_parts,
        "PARTS",
        {"elapsed": gpu_unsettled.elapsed, "broken": lambda o: iter(range(0, 1))},
    )
    patch.setattr(pytest, "main", lambda arguments, plugins: len(arguments))
    with kept_output():
        for part in gpu_parts.PARTS:
            gpu_parts.main([part, "60", str(place), "--quick"])
        assert gpu_tests.main(["tests"]) == 4
    told = gpu_tests.Told(os.open(os.devnull, os.O_WRONLY))
    report = {
        "nodeid": "x",
        "outcome": "failed",
        "duration": 0.1,
        "longrepr": "no",
        "when": "call",
        "passed": False,
    }
    told.pytest_runtest_logreport(SimpleNamespace(**report))  # type: ignore[arg-type]
    told.pytest_collectreport(SimpleNamespace(**report, failed=True))  # type: ignore[arg-type]
    reader, writer = os.pipe()
    os.close(writer)
    gpu_parts._end_with(reader)
    assert signal.SIGKILL in killed


def run_tests(place: Path, patch: pytest.MonkeyPatch) -> None:
    """The parts that run pytest, of which one test fails."""
    (place / "scripts").mkdir()
    line = '{"test": "a", "outcome": "failed"}'
    (place / "scripts" / "gpu_tests.py").write_text(f"print('{line}'); raise SystemExit(1)")
    patch.setattr(gpu_parts, "ROOT", place)
    for part in ("conformance", "pytest"):
        assert ended(part, place)["ok"].startswith("1 failed")


def bad_ends(place: Path, patch: pytest.MonkeyPatch) -> None:
    """What is said of a device, a feed, a run or a part that does not do what it should."""
    assert "ok" in RUN(["-c", "print('ok')"], 60, 1).stdout
    assert "skipped" in ended("feeds", place.parent, 1.0)
    assert "ok" in ended("demand", place.parent, 30.0, quick=False)
    with (
        gpu_feeds.Decoding(Endless()) as decoding,
        pytest.raises(RuntimeError, match="AttributeError"),
    ):  # type: ignore[arg-type]
        decoding.beside(lambda: 1.0, busy=True)
    for answer in (
        subprocess.TimeoutExpired("train.py", 1),
        subprocess.CompletedProcess([], 2, "", "no"),
    ):
        patch.setattr(gpu_parts, "_run", partial(raised, answer))
        with pytest.raises(RuntimeError, match="train.py"):
            gpu_parts.train([], place, 1.0)
    patch.setattr(gpu_unsettled, "_APART_MS", -1.0)
    patch.setattr(gpu_unsettled, "_PASSES_S", 0.01)
    patch.setattr(gpu_unsettled, "_left", lambda before: "a thread")
    patch.setitem(gpu_unsettled.LOADERS, "processes", lambda job: nullcontext(Endless()))
    assert "ok" in ended("elapsed", place) and "ok" in ended("pinning", place.parent)
    before = set(threading.enumerate())
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert LEFT(before) == ""
    patch.setattr(
        gpu_overlap, "torch", SimpleNamespace(**vars(torch) | {"equal": lambda *_: False})
    )
    assert gpu_overlap.wrong_values(CPU, "copy") == ["wrong values where the copy is slow"]


class Endless:
    """A feed without workers, whose batches do not end."""

    worker_pids: tuple[int, ...] = ()

    def close(self) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(SimpleNamespace(images=torch.zeros(1)))


def raised(answer: Any, *_: object) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


def others(place: Path, patch: pytest.MonkeyPatch) -> None:
    """Loaders whose packages are not installed, up to what they give."""
    for name in ("dali", "spdl"):
        patch.setattr(
            gpu_loaders, name, lambda *_: (np.zeros((2, 4, 5, 3), np.uint8) for _ in range(2))
        )
        with gpu_loaders.LOADERS[name.upper()](gpu_loaders.Job(place, 1, 2, CPU)) as batches:
            assert next(iter(batches))[0].shape == (2, 3, 4, 5)
    patch.setattr(gpu_loaders, "import_module", lambda name: SimpleNamespace(decode_jpeg=len))
    assert gpu_loaders.decoder()[0] == "TorchCodec" and gpu_loaders.NVJPEG in PEERS()
    (place / "bytes").write_bytes(b"12")
    assert gpu_loaders._read(str(place / "bytes")).tolist() == [49, 50]


def test_every_statement_runs_on_the_emulated_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, little: None
) -> None:
    """Each part to its end, on the GPU and what a CPU does in its place; what is left is listed,
    and all that is listed is.
    """
    lines = Lines(FILES)
    ends = dict[tuple[str, str], Row]()
    with lines.watching():
        with pytest.MonkeyPatch.context() as patch, emulated(EmulatedDevice(), patch):
            for part in gpu_parts.PARTS.keys() - {"conformance", "pytest"}:
                ends["gpu", part] = ended(part, tmp_path)
            assert SCALED(Options(CPU, True, tmp_path, 0.0), 2, 1) == 2
            for more in (run_tests, others, processes, bad_ends):
                with pytest.MonkeyPatch.context() as inner:
                    (tmp_path / more.__name__).mkdir()
                    more(tmp_path / more.__name__, inner)
        for part in ON_A_CPU:
            ends["cpu", part] = ended(part, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            whole_check(tmp_path, patch)
    assert {how for end in ends.values() for how in end} == {"ok", "skipped"}, ends
    assert ends["cpu", "elapsed"].keys() == {"skipped"}
    assert {file: texts for file, texts in lines.missed().items() if texts} == {
        file: set(listed) for file, listed in GPU_ONLY.items()
    }
