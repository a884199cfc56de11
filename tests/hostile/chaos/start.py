"""Runs that ``tests/hostile/chaos/run.py`` starts, watches, signals and ends."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple, Self

import psutil

from tests.hostile.chaos.noted import NOTES, STOP

ROOT = Path(__file__).parents[3]
TRAIN = (sys.executable, "train.py")
NOTED = (sys.executable, str(ROOT / "tests/hostile/chaos/noted.py"))
POLL_S = 0.02


class Plan(NamedTuple):
    """What a part is given: its folder, its count, its seed, time limits."""

    base: Path
    n: int
    seed: int
    # from a signal to the end of the last process
    exit_s: float
    # of one start of a run
    run_s: float

    def place(self, name: str) -> Path:
        """A folder to start runs in, with a train.py."""
        place = self.base / name
        if not place.exists():
            (place / "tmp").mkdir(parents=True)
            (place / "train.py").write_text(
                f"import runpy\n\nrunpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')\n"
            )
        return place


class Run:
    """A run in a session of its own; a context manager that leaves none of its processes."""

    def __init__(
        self, plan: Plan, place: Path, command: list[str], stop: int | None = None
    ) -> None:
        self.place = place
        self.notes = place / "notes.jsonl"
        self.lasted_s = 0.0
        self._plan = plan
        self._noted = self._size()
        self._said = place / f"said-{len(list(place.glob('said-*')))}"
        # uv's own variable decides which command a run prints
        env = {key: value for key, value in os.environ.items() if key != "UV"}
        env |= {
            "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        env |= {"PYTHONFAULTHANDLER": "1", "TMPDIR": str(place / "tmp")}
        env |= {"WELLFED_CACHE": str(plan.base.with_name("cache"))}
        env |= {NOTES: str(self.notes), STOP: str(stop)}
        self._began_s = time.monotonic()
        with open(self._said, "wb") as said:
            self._process = subprocess.Popen(
                command,
                cwd=place,
                env=env,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.alive():
            self.signal(SIGKILL)
        self._process.wait(self._plan.run_s)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return next(self.place.glob("outputs/**/.lock")).parent

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._said.read_text(errors="replace")

    def alive(self) -> list[int]:
        """The processes of its session."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if (
                    os.getsid(process.pid) == self._process.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        return found

    def workers(self) -> list[psutil.Process]:
        """Its worker processes: the fork server's children."""
        with suppress(psutil.NoSuchProcess):
            servers = psutil.Process(self._process.pid).children()
            return [worker for server in servers for worker in server.children()]
        return []

    @property
    def process(self) -> psutil.Process:
        """The one that was started."""
        return psutil.Process(self._process.pid)

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, where it starts them itself: those of its children that have threads."""
        found = self.process.children()
        return sorted((rank for rank in found if rank.num_threads() > 2), key=lambda rank: rank.pid)

    def signal(self, number: int) -> None:
        """Signal its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def goes_on(self, seconds: float = math.inf) -> bool:
        """Whether it still runs after so many seconds.

        Raises:
            TimeoutError: it takes longer than a run may.
        """
        until_s = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < until_s:
            if time.monotonic() - self._began_s > self._plan.run_s:
                raise TimeoutError(
                    f"{self.place}: no end within --run-s={self._plan.run_s:g}\n{self.said[-1000:]}"
                )
            time.sleep(POLL_S)
        self.lasted_s = time.monotonic() - self._began_s
        return self._process.poll() is None

    def trains(self) -> bool:
        """Wait for its first step; whether there is one before it ends."""
        while (going := self.goes_on(POLL_S)) and self._size() == self._noted:
            pass
        return going

    def code(self) -> int:
        """Its exit code, as a shell has it, once it has ended."""
        self.goes_on()
        code = self._process.returncode
        return 128 - code if code < 0 else code

    def _size(self) -> int:
        return self.notes.stat().st_size if self.notes.exists() else 0


def free_port() -> int:
    """Returns a port of the loopback address that nobody listens to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def ended(plan: Plan, name: str, *overrides: str, stop: int | None = None) -> Run:
    """A run that has ended, after step ``stop`` if that is given, and noted its samples.

    Raises:
        RuntimeError: it ended otherwise.
    """
    with Run(plan, plan.place(name), [*NOTED, *overrides], stop) as run:
        if (code := run.code()) != (0 if stop is None else 128 + SIGTERM):
            raise RuntimeError(f"{run.place}: exit code {code}\n{run.said[-3000:]}")
    return run
