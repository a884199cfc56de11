"""Sums the resource use of this process and its descendants, including ended ones.

Linux only, because it reads /proc.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tree:
    """Sums over a process and its descendants, including a fork server's workers.

    The kernel adds a child's counters to its parent's when the parent reaps it, so the sums count
    each process once and never decrease. An orphan's counters are lost when it ends.
    """

    def __init__(self, pid: int | None = None, proc: Path = Path("/proc")) -> None:
        self._pid = pid or os.getpid()
        self._proc = str(proc)
        # every process after its parent
        self._members: dict[int, None] = {self._pid: None}
        self._seen = {self._pid}
        self._queued_ns: dict[str, int] = {}  # by thread
        self._queued_s = 0.0

    def processor(self) -> tuple[float, int] | None:
        """Returns the CPU seconds and the number of major page faults.

        Major faults wait for storage, for example in memory-mapped files. Returns None if
        processes end faster than they can be read.
        """
        stats = self._read_all("stat")
        if stats is None:
            return None
        ticks = faults = 0
        for stat in stats:
            majflt, cmajflt, *times = map(int, _after_name(stat)[9:15])
            faults += majflt + cmajflt
            ticks += sum(times)
        return ticks / _TICKS_PER_S, faults

    def read_bytes(self) -> tuple[int, int] | None:
        """Returns the bytes returned by read calls and the bytes fetched from storage.

        The former include cached files, pipes and sockets, but not memory-mapped files. The latter
        are reads from block devices and NFS, including read-ahead; reads by another process on its
        behalf, such as a FUSE daemon, are counted for that process. Returns None if processes end
        faster than they can be read.
        """
        read = self._read_all("io")
        if read is None:
            return None
        asked = fetched = 0
        for io in read:
            counters = dict(line.split(b": ") for line in io.splitlines())
            asked += int(counters[b"rchar"])
            fetched += int(counters[b"read_bytes"])
        return asked, fetched

    def queued_s(self) -> float:
        """Returns the seconds that runnable threads waited for a CPU.

        Includes the time before the first call.

        Raises:
            FileNotFoundError: the kernel does not support this.
        """
        found = {}
        ended = suppress(FileNotFoundError, ProcessLookupError)
        for pid in self.pids():
            with ended:
                for thread in os.listdir(f"{self._proc}/{pid}/task"):
                    with ended:
                        waited = self._read(f"{pid}/task/{thread}", "schedstat").split()[1]
                        found[thread] = int(waited)
        if not found:
            raise FileNotFoundError(f"{self._proc}/{self._pid}/task has no schedstat")
        for thread, ns in found.items():
            self._queued_s += max(0, ns - self._queued_ns.get(thread, 0)) / 1e9
        self._queued_ns = found
        return self._queued_s

    def pids(self) -> set[int]:
        """Returns the IDs of all live processes."""
        self._look_round()
        return set(self._members)

    def _read_all(self, name: str) -> list[bytes] | None:
        """Returns ``/proc/<pid>/<name>`` of all members; None if they end too fast to read.

        Parents are read before their children: a readable child is not yet in its parent's
        counters, and an unreadable one causes all of them to be read again.
        """
        for _ in range(5):
            self._look_round()
            found = []
            try:
                for pid in self._members:
                    found.append(self._read(pid, name))
                return found
            except (FileNotFoundError, ProcessLookupError):
                if pid == self._pid:
                    raise
        return None

    def _look_round(self) -> None:
        """Find new descendants.

        A process keeps its parent as long as the parent lives, so each is queried only once.
        """
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._members = {pid: None for pid in self._members if pid in there or pid == self._pid}
        parents = dict.fromkeys(there - self._seen, 0)
        for pid in parents:
            # else it has ended, or is hidden and so belongs to another user
            with suppress(OSError):
                parents[pid] = int(_after_name(self._read(pid, "stat"))[1])
        while born := [pid for pid, parent in parents.items() if parent in self._members]:
            for pid in born:
                self._members[pid] = None
                del parents[pid]
        self._seen = there

    def _read(self, pid: int | str, name: str) -> bytes:
        with open(f"{self._proc}/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(4096)


def _after_name(stat: bytes) -> list[bytes]:
    """Returns the fields of a ``stat`` file from the third one on.

    The second is a name in parentheses that may contain anything.

    """
    return stat[stat.rindex(b")") + 2 :].split()
