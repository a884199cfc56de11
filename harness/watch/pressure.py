"""What holds this process up from outside: its control groups' quota on processors, and memory that must be waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.runtime.limits import words


def throttled(groups: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """By control group: scheduling periods in which something of it wanted to run, and in how many its quota stopped it."""
    found = {}
    for group in groups:
        stat = words(group / "cpu.stat")
        counters = dict(zip(stat[::2], stat[1::2], strict=False))
        if "nr_periods" in counters:  # version 2 leaves it out where the group has no processor controller
            found[group] = int(counters["nr_periods"]), int(counters["nr_throttled"])
    return found


def memory_stalled(groups: Sequence[Path], root: Path = Path("/")) -> tuple[Path, float]:
    """The file that says it, and for how many seconds so far at least one task was waiting for memory (PSI).

    It is the innermost of ``groups`` that has such a file, or else the whole machine's.

    Raises:
        FileNotFoundError: none can be read, as where the kernel was started without PSI.
    """
    for path in (*(group / "memory.pressure" for group in groups), root / "proc/pressure/memory"):
        said = words(path)  # some avg10=0.00 avg60=0.00 avg300=0.00 total=<microseconds> full ...
        if said:
            return path, int(said[4].removeprefix("total=")) / 1e6
    raise FileNotFoundError(f"{path} cannot be read; the kernel may have been built or started without PSI")
