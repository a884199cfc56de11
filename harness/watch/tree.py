"""What this process and its descendants have used, with those that have ended.

Linux only: it is all in /proc.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_TRIES = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tree:
    """Sums over a process and its descendants, workers of a fork server among them.

    The kernel adds a process's figures to its parent's as soon as the parent takes note of its end.
    So the sums count every process once, in life and after, and only grow, but for one that ends as
    an orphan and takes its part along.
    """

    def __init__(self, pid: int | None = None, proc: Path = Path("/proc")) -> None:
        self._pid = pid or os.getpid()
        self._proc = str(proc)
        self._members: dict[int, None] = {self._pid: None}  # every process after its parent
        self._strangers: set[int] = set()
        self._queued_ns: dict[str, int] = {}  # by thread
        self._queued_s = 0.0

    def processor(self) -> tuple[float, int] | None:
        """Seconds of processor time, and major page faults: those that waited for storage, as of
        files mapped into memory.
        """
        sums = self._sums("stat", _times_and_faults)
        return None if sums is None else (sums[0] / _TICKS_PER_S, sums[1])

    def read_bytes(self) -> tuple[int, int] | None:
        """Bytes that read calls returned, and bytes that were fetched from storage for it.

        The first are of files in the page cache or not, and of pipes and sockets; not of files
        mapped into memory. The second are what this process had block devices and NFS read,
        read-ahead included; what another process reads for it, as the daemon of a FUSE file system
        does, the kernel counts as that one's.
        """
        sums = self._sums("io", _asked_and_fetched)
        return None if sums is None else (sums[0], sums[1])

    def queued_s(self) -> float:
        """Seconds that threads could have run but waited for a processor, those before the first
        call included.

        Raises:
            FileNotFoundError: the kernel does not say.
        """
        found: dict[str, int] = {}
        for thread in self._threads():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[thread] = int(self._read(thread, "schedstat").split()[1])
        if not found:
            raise FileNotFoundError(f"{self._proc}/{self._pid}/task has no schedstat")
        self._queued_s += (
            sum(max(0, ns - self._queued_ns.get(thread, 0)) for thread, ns in found.items()) / 1e9
        )
        self._queued_ns = found
        return self._queued_s

    def pids(self) -> set[int]:
        """All processes that are alive."""
        self._look_round()
        return set(self._members)

    def _threads(self) -> Iterator[str]:
        for pid in self.pids():
            with suppress(FileNotFoundError, ProcessLookupError):
                yield from [
                    f"{pid}/task/{thread}" for thread in os.listdir(f"{self._proc}/{pid}/task")
                ]

    def _sums(self, name: str, figures: Callable[[bytes], tuple[int, int]]) -> list[int] | None:
        """The figures of ``/proc/<pid>/<name>`` over all members; None where processes end faster
        than they can be read.

        Parents are read before their children: a child that could still be read is not yet in its
        parent's figures, and one that could not makes all be read again.
        """
        for _ in range(_TRIES):
            self._look_round()
            found = []
            for pid in self._members:
                try:
                    found.append(figures(self._read(pid, name)))
                except (FileNotFoundError, ProcessLookupError):
                    if pid == self._pid:
                        raise
                    break
            else:
                return [sum(column) for column in zip(*found, strict=True)]
        return None

    def _look_round(self) -> None:
        """Find new descendants.

        A process keeps its parent while that lives, so that each is asked once, not every time.
        """
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._strangers &= there
        self._members = {pid: None for pid in self._members if pid in there or pid == self._pid}
        parents = {pid: self._parent(pid) for pid in there - self._strangers - self._members.keys()}
        while born := [pid for pid, parent in parents.items() if parent in self._members]:
            for pid in born:
                self._members[pid] = None
                del parents[pid]
        self._strangers |= parents.keys()

    def _parent(self, pid: int) -> int | None:
        try:
            return int(_after_name(self._read(pid, "stat"))[1])
        except OSError:
            return None  # ended already, or hidden from us and so none of ours

    def _read(self, pid: int | str, name: str) -> bytes:
        handle = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY)
        try:
            return os.read(handle, 4096)
        finally:
            os.close(handle)


def _after_name(stat: bytes) -> list[bytes]:
    """The fields of a ``stat`` from the third on; the second is a name in brackets that may hold
    anything.
    """
    return stat[stat.rindex(b")") + 2 :].split()


def _times_and_faults(stat: bytes) -> tuple[int, int]:
    majflt, cmajflt, utime, stime, cutime, cstime = map(int, _after_name(stat)[9:15])
    return utime + stime + cutime + cstime, majflt + cmajflt


def _asked_and_fetched(io: bytes) -> tuple[int, int]:
    counters = dict(line.split(b": ") for line in io.splitlines())
    return int(counters[b"rchar"]), int(counters[b"read_bytes"])
