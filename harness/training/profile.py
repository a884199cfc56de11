"""Records a torch.profiler trace of some steps as Chrome JSON for Perfetto."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

# profile() takes one, but torch.profiler does not export the class
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ..clock import spans
from ..monitor.console import say
from ..runtime import accelerator
from ..runtime.folder import log


class Trace:
    """Records the steps in ``profile.steps`` to ``trace/``, with the names from ``clock.spans``.

    Work between these steps is also recorded, in every Python thread, so a prefetcher's work
    appears next to the step. The file is named after the recorded steps, since a run may start or
    end within the range. If the profiler fails, the run continues without a trace.

    Args:
        steps: first and last step, counted from 1, as in ``10-20``; if None, nothing is recorded.
        folder: the run's folder.
        pause: excludes the profiler's start-up and export from step time.
    """

    def __init__(
        self, steps: str | None, folder: Path, pause: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._first, self._last = map(int, (steps or "1-0").split("-"))
        self._folder = folder / "trace"
        self._pause = pause
        self._profiler: profile | None = None
        # recorded steps
        self._made: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wraps the run's step ``number``, counted from 1."""
        if not self._first <= number <= self._last:
            yield
            return
        if not self._made:
            with self._optional():
                activities = [ProfilerActivity.CPU]
                if accelerator.count():
                    activities.append(ProfilerActivity.CUDA)
                else:
                    # otherwise, it warns that there is no GPU
                    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
                every_thread = _ExperimentalConfig(profile_all_threads=True)
                profiler = profile(activities=activities, experimental_config=every_thread)
                profiler.start()
                self._profiler = profiler
                spans.record(record_function)
        self._made.append(number)
        with spans.named(f"step {number}"):
            yield
        if number == self._last:
            self.close()

    def close(self) -> None:
        """Stops recording and writes the trace; warns if none of the steps ran."""
        if self._first <= self._last and not self._made:
            text = "profile.steps=%d-%d: none of these steps ran, so there is no trace"
            log.warning(text, self._first, self._last)
        self._last = 0
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        spans.record(None)
        path = self._folder / f"steps-{self._made[0]}-{self._made[-1]}.json"
        with self._optional():
            profiler.stop()
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(path))
            say(f"trace: open {os.path.relpath(path)} in https://ui.perfetto.dev")

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Excludes a block from step time; if it fails, only the trace is lost."""
        try:
            with self._pause("profile"):
                yield
        except Exception as error:
            self._last = 0
            log.warning("profile.steps: no trace was written: %s", error)
