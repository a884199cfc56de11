"""The folders, files and commands of the cases of ``tests/hostile/attack/run.py``."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from PIL import Image

from harness.training import checkpoint_read
from tests.hostile.chaos.start import ROOT
from tests.support.run_state import digest

IMAGES = "../in/images"
BARE = (
    "data=imagefolder", "data.image_size=32", "loader.batch_size=8", "trainer.epochs=2",
    "device=cpu", "trainer.num_threads=1", "schedule=constant",
)  # fmt: skip
RUN = (*BARE, f"data.root={IMAGES}", "run.name=x")
DIGITS = ("data=digits", "device=cpu", "trainer.epochs=1", "trainer.max_steps=2", "run.name=x")
STOPPED_AT = 4
_made = threading.Lock()


class Strike(NamedTuple):
    """A signal, so many seconds after the start or after a text was printed."""

    number: int
    after_s: float
    # main, group, or child: the youngest descendant
    whom: str = "main"
    text: bytes = b""

    def due(self, run_s: float, out: Path, process: subprocess.Popen[bytes]) -> bool:
        """Sends the signal once it is time; says whether that was now."""
        if self.text and self.text not in out.read_bytes():
            return False
        changed_s = run_s
        if self.text:
            mark = out.with_suffix(".mark")
            if not mark.exists():
                mark.write_text(str(run_s))
            changed_s = run_s - float(mark.read_text())
        if changed_s < self.after_s:
            return False
        with suppress(ProcessLookupError, psutil.Error):
            if self.whom == "group":
                os.killpg(process.pid, self.number)
            elif self.whom == "main":
                os.kill(process.pid, self.number)
            else:
                below = psutil.Process(process.pid).children(recursive=True)
                if not below:
                    return False
                max(below, key=lambda each: each.create_time()).send_signal(self.number)
        return True


class Step(NamedTuple):
    """One command, and how it may end."""

    words: tuple[str, ...]
    codes: frozenset[int]
    wrap: tuple[str, ...] = ()
    strike: Strike | None = None
    # most of them
    errors: int = 1
    lines: int = 3
    says: tuple[str, ...] = ()
    limit_s: float = 120.0
    program: tuple[str, ...] | None = None


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: bytes
    err: bytes
    seconds: float
    timed_out: bool
    seen: set[int]
    struck: bool

    def tail(self) -> str:
        """Its last lines."""
        out = self.out.decode(errors="replace").splitlines()[-3:]
        return "\n".join([*out, *self.err.decode(errors="replace").splitlines()[-8:]])


Prepare = Callable[[Path], Any]
Check = Callable[[Path, list[Done]], list[str]]


class Case(NamedTuple):
    """Commands in a prepared place, and what must hold after them."""

    kind: str
    name: str
    steps: tuple[Step, ...]
    prepare: Prepare | None = None
    # "images", and "stopped" or "done": a run in work/outputs/x
    needs: tuple[str, ...] = ()
    env: Mapping[str, str | None] = {}
    check: Check | None = None
    together: bool = False
    changes_in: bool = False
    leaves: tuple[str, ...] = ()
    leaves_tmp: bool = False


def listing(folder: Path) -> dict[str, str]:
    """Returns what lies in a folder: each name's kind, and content or target."""
    found = {}
    for path, folders, files in os.walk(os.fsencode(folder)):
        for name in (*folders, *files):
            whole = os.path.join(path, name)
            status = os.lstat(whole)
            text = f"{stat.S_IFMT(status.st_mode):o} {status.st_size}"
            if stat.S_ISLNK(status.st_mode):
                text = os.fsdecode(os.readlink(whole))
            elif stat.S_ISREG(status.st_mode) and status.st_size < 50 << 20:
                with open(whole, "rb") as file:
                    text += hashlib.file_digest(file, "sha256").hexdigest()
            elif stat.S_ISDIR(status.st_mode):
                text = "folder"
            found[repr(os.path.relpath(whole, os.fsencode(folder)))] = text
    return found


def make_images(root: Path, seed: int = 0, sizes: tuple[int, int] = (24, 12)) -> None:
    """Makes JPEG files of 48 pixels in two classes, to train and to validate."""
    for part, count in zip(("train", "val"), sizes, strict=True):
        for i in range(count):
            path = root / part / "ab"[i % 2] / f"{i:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng((seed, i, len(part))).integers(0, 256, (6, 6, 3))
            Image.fromarray(noise.astype(np.uint8)).resize((48, 48)).save(path, quality=90)


def make_shared(shared: Path) -> None:
    """Makes, once, the images and the runs that cases have copies of.

    Raises:
        RuntimeError: a plain run failed.
    """
    with _made:
        if (shared / "ready").exists():
            return
        make_images(shared / "in/images")
        (shared / "tmp").mkdir()
        more = {"stopped": (f"trainer.max_steps={STOPPED_AT}",), "done": ()}
        for name, words in more.items():
            (shared / name).mkdir()
            env = {**os.environ, "PYTHONPATH": str(ROOT), "WELLFED_CACHE": str(shared / "cache")}
            command = [sys.executable, str(ROOT / "train.py"), *RUN, *words]
            done = subprocess.run(
                command, cwd=shared / name, env=env, capture_output=True, timeout=300, check=False
            )
            if done.returncode:
                raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
        (shared / "ready").touch()


def prepared(case: Case, place: Path, shared: Path) -> None:
    """Makes the place of a case."""
    make_shared(shared)
    for name in ("in", "neighbor", "home", "tmp", "cache", "work"):
        (place / name).mkdir(parents=True)
    (place / "neighbor/keep.txt").write_text("keep me\n")
    (place / "neighbor/run/checkpoints").mkdir(parents=True)
    (place / "neighbor/run/metrics.jsonl").write_text('{"step": 1}\n')
    (place / "shared").symlink_to(shared)
    if "images" in case.needs:
        shutil.copytree(shared / "in/images", place / "in/images")
    for name in ("stopped", "done"):
        if name in case.needs:
            shutil.copytree(shared / name / "outputs", place / "work/outputs", symlinks=True)
    if case.prepare is not None:
        case.prepare(place)


def same(place: Path, _: list[Done]) -> list[str]:
    """Returns what tells a run from the plain one: its state, bitwise."""
    whole = digest(place / "shared/done/outputs/x")
    found = digest(place / "work/outputs/x")
    return [] if found == whole else ["another state than the plain run's"]


def same_if_done(place: Path, done: list[Done]) -> list[str]:
    """As ``same``, where the last command succeeded."""
    return same(place, done) if done[-1].code == 0 else []


def newest(place: Path) -> checkpoint_read.Record:
    """Returns the newest checkpoint of the run in ``place``."""
    return checkpoint_read.records(place / "work/outputs/x/checkpoints")[-1]


def reseal(place: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Changes what is in the newest checkpoint, and gives its record the right digest."""
    record = newest(place)
    state = torch.load(record.path, weights_only=True)
    state = change(state) or state
    torch.save(state, record.path)
    found = hashlib.sha256(record.path.read_bytes()).hexdigest()
    record.path.with_suffix(".json").write_bytes(checkpoint_read.sealed(record_with(record, found)))


def record_with(record: checkpoint_read.Record, sha256: str) -> checkpoint_read.Record:
    """Returns ``record`` with another digest."""
    return checkpoint_read.Record(record.path, record.step, record.epoch, record.top1, sha256)


def flip(path: Path, draw: random.Random, count: int = 1) -> None:
    """Flips bits of a file."""
    # a cache is sparse, and longer than memory
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(count):
            place = draw.randrange(size)
            file.seek(place)
            byte = file.read(1)[0] ^ 1 << draw.randrange(8)
            file.seek(place)
            file.write(bytes([byte]))


def ends(*codes: int) -> frozenset[int]:
    """Returns exit codes."""
    return frozenset(codes)


def killed(number: int = SIGKILL) -> int:
    """Returns the exit code after a signal."""
    return 128 + number
