"""Runs tests on the made-up CUDA runtime, which a process has from its start or never.

Where torch sees no GPU, an item of another process stands in for each test that is marked
``cuda_order``. That process runs pytest on the made-up runtime and is told which test is next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakecuda import build

ROOT = Path(__file__).parents[2]


class FailedThereError(Exception):
    """The test failed in the other process, which said how."""


class OtherProcess:
    """Pytest on the made-up runtime, from its first test on; a new one where it has died."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, nodeid: str) -> tuple[str, str]:
        """Runs a test; returns its outcome and what it said."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(nodeid + "\n")
            process.stdin.flush()
            answer = self._answers.readline()
        except BaseException:
            # the time of the test is over: pytest's faulthandler writes where it hangs
            process.send_signal(signal.SIGABRT)
            self._end()
            print(self._last_words(), file=sys.stderr)
            raise
        if not answer:
            return "failed", f"the process ended with {self._end()}:\n{self._last_words()}"
        outcome, said = json.loads(answer)
        return outcome, said

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._end()
        self._log.close()

    def _started(self) -> subprocess.Popen[str]:
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "pytest", "-p", "tests.fakecuda.other", "-m", "cuda_order"]
        # this process keeps the time, and hands the tests out
        command += [
            "--tb=short",
            "-p",
            "no:timeout",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *self._files,
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**build.environment(), "FAKE_CUDA_ANSWERS": str(writer)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writer],
            text=True,
        )
        os.close(writer)
        self._answers = os.fdopen(reader)
        return process

    def _end(self) -> int:
        process = self._process
        self._process = None
        assert process is not None and process.stdin is not None
        process.stdin.close()
        self._answers.close()
        return process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-8000:]


class StandIn(pytest.Item):
    """A test that runs in the other process."""

    def __init__(self, *, other: OtherProcess, test: pytest.Item, **how: Any) -> None:
        super().__init__(**how)
        self._other = other
        self._test = test
        # the first one waits for the build and for the process to start
        self.own_markers = [*test.iter_markers("timeout")] or [pytest.mark.timeout(300).mark]

    def runtest(self) -> None:
        outcome, said = self._other.run(self.nodeid)
        if outcome == "skipped":
            pytest.skip(said)
        if outcome == "failed":
            raise FailedThereError(said)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedThereError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> Any:
        return self._test.reportinfo()


def place(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts stand-ins in the place of tests that need a GPU, or has them skipped, without one."""
    if torch.cuda.is_available():
        return
    missing = build.unavailable()
    there = [item for item in items if item.get_closest_marker("cuda_order") and not missing]
    files = dict.fromkeys(str(item.path) for item in there)
    other = OtherProcess([*files])
    config.add_cleanup(other.close)
    for place, item in enumerate(items):
        if item.get_closest_marker("cuda_values"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))
        elif item.get_closest_marker("cuda_order"):
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
            else:
                parent = item.parent
                assert parent is not None
                items[place] = StandIn.from_parent(parent, name=item.name, other=other, test=item)
