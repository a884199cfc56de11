"""A torch.profiler trace of some steps, as Chrome JSON for Perfetto."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """Records the steps that ``profile.steps`` names into ``trace/`` of the run's folder.

    Args:
        steps: first and last step, counted from 1, such as ``10-20``; None records nothing.
        folder: the run's folder.
    """

    def __init__(self, steps: str | None, folder: Path) -> None:
        self._first, self._last = (int(n) for n in steps.split("-")) if steps else (0, -1)
        self._path = folder / "trace" / f"steps-{steps}.json"
        self._profiler: profile | None = None

    def before(self, done: int) -> None:
        """Start or end the recording; ``done`` steps are done."""
        if done + 1 == self._first and self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        elif done >= self._last:
            self.close()

    def close(self) -> None:
        """End the recording and write it, if one runs."""
        if self._profiler is not None:
            self._profiler.stop()
            self._path.parent.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            self._profiler, self._first = None, 0
