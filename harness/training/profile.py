"""A torch.profiler trace of some steps, as Chrome JSON for Perfetto."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

# profile() takes one, and torch.profiler does not export it
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from harness.runtime import accelerator
from harness.runtime.files import replacing
from harness.runtime.folder import LOGGER
from harness.watch import spans
from harness.watch.console import say

_NOTHING = nullcontext()

_log = logging.getLogger(LOGGER)


class Trace:
    """Records the steps that ``profile.steps`` names into ``trace/`` of the run's folder, with the
    names of ``watch.spans``.

    What the run does between two of these steps is recorded too. Every Python thread is, so that
    what a prefetcher's thread does can be seen beside the step. The file is named after the steps
    that are in it: a run may begin or end among those asked for.

    Args:
        steps: first and last step, counted from 1, such as ``10-20``; None records nothing.
        folder: the run's folder.
        pause: keeps the time that the profiler takes to start and to write out of the steps.
    """

    def __init__(
        self, steps: str | None, folder: Path, pause: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._first, self._last = (int(n) for n in steps.split("-")) if steps else (1, 0)
        self._folder = folder / "trace"
        self._pause = pause
        self._profiler: profile | None = None
        self._began = self._ended = 0

    def step(self, number: int) -> AbstractContextManager[Any]:
        """The block of the run's step ``number``, counted from 1."""
        return self._recorded(number) if self._first <= number <= self._last else _NOTHING

    def close(self) -> None:
        """End the recording and write it, if one runs; say so where none of the steps was trained."""
        if self._profiler is not None:
            profiler = self._profiler
            self._profiler = None
            spans.record(None)
            self._write(profiler)
        elif self._first <= self._last and not self._began:
            _log.warning(
                "profile.steps=%d-%d: none of these steps was trained, there is no trace",
                self._first,
                self._last,
            )
        self._last = 0

    @contextmanager
    def _recorded(self, number: int) -> Iterator[None]:
        if self._profiler is None:
            with self._pause("profile"):
                self._begin(number)
        self._ended = number
        with spans.named(f"step {number}"):
            yield
        if number == self._last:
            with self._pause("profile"):
                self.close()

    def _begin(self, number: int) -> None:
        """Start recording; a profiler that cannot costs the trace and not the run."""
        activities = [ProfilerActivity.CPU]
        if accelerator.count():
            activities.append(ProfilerActivity.CUDA)
        else:
            # it would complain that there is no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._began = number
        try:
            profiler = profile(
                activities=activities,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            profiler.start()
        except Exception as error:
            self._last = 0
            _log.warning("profile.steps: no trace: %s", error)
        else:
            self._profiler = profiler
            spans.record(record_function)

    def _write(self, profiler: profile) -> None:
        """End and write the trace, whole or not at all; a full disk, or a profiler that fails,
        costs it and not the run.
        """
        path = self._folder / f"steps-{self._began}-{self._ended}.json"
        try:
            profiler.stop()
            self._folder.mkdir(exist_ok=True)
            with replacing(path) as temporary:
                profiler.export_chrome_trace(str(temporary))
                # the exporter raises nothing when it cannot write
                with temporary.open("rb") as file:
                    file.seek(-min(64, temporary.stat().st_size), os.SEEK_END)
                    if not file.read().rstrip().endswith(b"}"):
                        raise OSError("the file is not whole; free some space")
        except Exception as error:
            _log.warning("profile.steps: no trace in %s: %s", os.path.relpath(path), error)
        else:
            say(
                f"trace of steps {self._began} to {self._ended}: open {os.path.relpath(path)} in "
                "https://ui.perfetto.dev"
            )
