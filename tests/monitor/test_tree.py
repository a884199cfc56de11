"""What a process and its descendants have used, on real processes and on a made-up /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.monitor.tree import Tree

MIB = 2**20
FAMILY = """
import os, sys
def burn():
    while sum(os.times()[:2]) < 0.2:
        sum(range(1000))
def work():
    burn()
    open(sys.argv[1], "rb").read()
    print("worked", flush=True)
for order in sys.stdin:
    if order == "fork\\n":
        go, begin = os.pipe()
        end, over = os.pipe()
        if not (pid := os.fork()):
            os.read(go, 1)
            work()
            os.read(end, 1)
            os._exit(0)
        print(pid, flush=True)
    elif order == "work\\n":
        os.write(begin, b"1")
    elif order == "reap\\n":
        os.write(over, b"1")
        os.waitpid(pid, 0)
        print("reaped", flush=True)
"""


class Family:
    """A process that forks a child, lets it work and reaps it when told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def told(self, order: str) -> str:
        """What the process says to an order."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def family(folder: Path) -> Iterator[Family]:
    """A family whose work is 0.2 s of processor time and to read 4 MiB."""
    data = folder / "data"
    data.write_bytes(bytes(4 * MIB))
    command = [sys.executable, "-c", FAMILY, str(data)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Family(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def used(tree: Tree) -> tuple[float, int]:
    """Processor time in seconds, and bytes asked for."""
    processor = tree.processor()
    read = tree.read_bytes()
    assert processor is not None and read is not None
    return processor[0], read[0]


def test_a_child_counts_once_while_it_lives_and_after(tmp_path: Path) -> None:
    """What a child uses is seen while it lives, and neither lost nor counted again."""
    with family(tmp_path) as parent:
        tree = Tree(parent.pid)
        cpu_s, asked = used(tree)
        parent.told("fork")
        idle_s, _ = used(tree)
        assert idle_s - cpu_s < 0.1
        assert parent.told("work") == "worked"
        worked_s, worked = used(tree)
        assert 0.15 < worked_s - cpu_s < 0.5
        assert 4 * MIB <= worked - asked < 5 * MIB
        assert parent.told("reap") == "reaped"
        after_s, after = used(tree)
    assert 0 <= after_s - worked_s < 0.1
    assert 0 <= after - worked < MIB


def test_bytes_from_storage_are_not_those_of_the_page_cache(tmp_path: Path) -> None:
    """A first read comes from storage, a second from the page cache; both are returned."""
    file = tmp_path / "data"
    with open(file, "wb") as written:
        written.write(os.urandom(4 * MIB))
        written.flush()
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tree = Tree()
    totals = [tree.read_bytes()]
    for _ in range(2):
        file.read_bytes()
        totals.append(tree.read_bytes())
    asked, fetched = zip(*filter(None, totals), strict=True)
    if fetched[1] == fetched[0]:
        pytest.skip(
            f"{tmp_path} is on no file system whose reads are counted as storage's, or keeps its "
            "pages"
        )
    assert asked[1] - asked[0] >= 4 * MIB <= asked[2] - asked[1]
    assert fetched[1] - fetched[0] >= 4 * MIB
    assert fetched[2] - fetched[1] < MIB


class Proc:
    """A /proc that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, pid: int, parent: int, ticks: int = 0, name: str = "python", faults: int = 0
    ) -> None:
        """Adds a process; half of its ticks and faults are its ended children's."""
        own = (
            f"0 0 0 0 0 0 0 {faults - faults // 2} {faults // 2} {ticks // 2} 0 "
            f"{ticks - ticks // 2} 0 20 0 1 0"
        )
        (self.folder / str(pid)).mkdir(exist_ok=True)
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} {own}\n")

    def queue(self, pid: int, **waited_ns: int) -> None:
        """Lets threads of a process have waited; those that are not named have ended."""
        tasks = self.folder / str(pid) / "task"
        shutil.rmtree(tasks, ignore_errors=True)
        for name, waited in waited_ns.items():
            (tasks / name[1:]).mkdir(parents=True)
            (tasks / name[1:] / "schedstat").write_text(f"123 {waited} 7\n")

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.folder / str(pid) / "task", ignore_errors=True)
        (self.folder / str(pid) / "stat").unlink()
        (self.folder / str(pid)).rmdir()


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """A /proc of process 50 and strangers, beside entries that are no processes."""
    (tmp_path / "meminfo").touch()
    made = Proc(tmp_path)
    made.add(1, 0, 10_000)
    made.add(50, 1, 100)
    return made


def ticks(tree: Tree) -> int:
    found = tree.processor()
    assert found is not None
    return round(found[0] * os.sysconf("SC_CLK_TCK"))


def test_descendants_of_all_generations_are_found(proc: Proc) -> None:
    """A fork server's workers are found, whatever their numbers and names."""
    proc.add(60, 50, 10, name="fork) S 1 (server")
    proc.add(7, 60, 1, faults=5)
    proc.add(70, 1, 5000)
    tree = Tree(50, proc.folder)
    assert tree.processor() == (pytest.approx(111 / os.sysconf("SC_CLK_TCK")), 5)


def test_threads_that_wait_for_a_processor_are_added_up(proc: Proc) -> None:
    """One that ended takes nothing back, and a new one counts from its start."""
    proc.add(60, 50)
    proc.queue(1, t1=10**12)
    proc.queue(50, t50=2 * 10**9, t51=10**9)
    proc.queue(60, t60=5 * 10**8)
    tree = Tree(50, proc.folder)
    begin = tree.queued_s()
    proc.queue(50, t50=3 * 10**9, t52=10**8)
    assert tree.queued_s() - begin == pytest.approx(1.1)
    proc.remove(60)
    proc.queue(50, t50=3 * 10**9, t52=10**8)
    assert tree.queued_s() - begin == pytest.approx(1.1)


def test_a_kernel_that_does_not_say_how_long_threads_waited(proc: Proc) -> None:
    """There is no figure, and none is 0."""
    with pytest.raises(FileNotFoundError, match="50/task has no schedstat"):
        Tree(50, proc.folder).queued_s()


def test_an_orphan_stays_a_member(proc: Proc) -> None:
    """A descendant whose parent ended first counts on, though it is another's child now."""
    proc.add(60, 50)
    proc.add(61, 60, 3)
    tree = Tree(50, proc.folder)
    assert ticks(tree) == 103
    proc.remove(60)
    proc.add(61, 1, 4)
    assert ticks(tree) == 104


@pytest.mark.parametrize(("ending", "expected"), [(2, 140), (9, None)], ids=["some", "too many"])
def test_an_end_amid_the_reading_is_read_again(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, ending: int, expected: int | None
) -> None:
    """A child that ends in between makes all be read again; a crowd gives nothing."""
    for pid in range(60, 70):
        proc.add(pid, 50, 4)
    tree = Tree(50, proc.folder)
    tree.processor()
    real = Tree._read
    last = iter(range(60, 60 + ending))

    def read(self: Tree, pid: int, name: str) -> bytes:
        found = real(self, pid, name)
        if pid == 50 and (child := next(last, None)) is not None:
            proc.remove(child)
            proc.add(50, 1, 100 + 4 * (child - 59))
        return found

    monkeypatch.setattr(Tree, "_read", read)
    assert (ticks(tree) if expected else tree.processor()) == expected


@pytest.mark.parametrize(
    "error", [FileNotFoundError, PermissionError], ids=["missing", "forbidden"]
)
def test_a_kernel_that_does_not_count_reads_is_told_from_an_end(
    proc: Proc, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """Where our own counters are missing or forbidden the error comes through."""

    def refuse(self: Tree, pid: int, name: str) -> bytes:
        raise error(name)

    tree = Tree(50, proc.folder)
    monkeypatch.setattr(Tree, "_read", refuse)
    with pytest.raises(error, match="io"):
        tree.read_bytes()
