"""Sums the resource use of this process and its descendants, ended ones included.

Linux only: it is all in /proc.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tree:
    """Sums over a process and its descendants, workers of a fork server among them.

    The kernel adds a child's counters to its parent's when the parent takes note of the child's
    end. So the sums count each process once, in life and after, and only grow. An orphan's part is
    lost with the orphan.
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
        """Returns seconds of processor time, and major page faults.

        Major faults waited for storage, as those of files mapped into memory. None where processes
        end faster than they can be read.
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
        """Returns bytes that read calls returned, and bytes that were fetched from storage for it.

        The first are of files in the page cache or not, and of pipes and sockets; not of files
        mapped into memory. The second are what this process had block devices and NFS read,
        read-ahead included; what another process reads for it, as the daemon of a FUSE file system
        does, the kernel counts as the other's. None where processes end faster than they can be
        read.
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
        """Returns the seconds that threads could have run but waited for a processor.

        Those before the first call are included.

        Raises:
            FileNotFoundError: the kernel does not say.
        """
        found: dict[str, int] = {}
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
        """Returns all processes that are alive."""
        self._look_round()
        return set(self._members)

    def _read_all(self, name: str) -> list[bytes] | None:
        """Returns ``/proc/<pid>/<name>`` of all members; None where they end faster than is read.

        Parents are read before their children: a child that could still be read is not yet in its
        parent's figures, and one that could not makes all be read again.
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

        A process keeps its parent while that lives, so that each is asked once, not every time.
        """
        there = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._members = {pid: None for pid in self._members if pid in there or pid == self._pid}
        parents = dict.fromkeys(there - self._seen, 0)
        for pid in parents:
            # else it has ended already, or is hidden from us and so none of ours
            with suppress(OSError):
                parents[pid] = int(_after_name(self._read(pid, "stat"))[1])
        while born := [pid for pid, parent in parents.items() if parent in self._members]:
            for pid in born:
                self._members[pid] = None
                del parents[pid]
        self._seen = there

    def _read(self, pid: int | str, name: str) -> bytes:
        handle = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY)
        try:
            return os.read(handle, 4096)
        finally:
            os.close(handle)


def _after_name(stat: bytes) -> list[bytes]:
    """Returns the fields of a ``stat`` from the third on.

    The second is a name in brackets that may hold anything.
    """
    return stat[stat.rindex(b")") + 2 :].split()
