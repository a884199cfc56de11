"""Files that processes share."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.data.mapped import MappedFile, checksum, in_memory, memory


def test_a_pickled_file_is_the_same_file() -> None:
    """Whoever unpickles it maps the same bytes, however many they are, and sees what is written."""
    file = MappedFile(memory("test", 1 << 20), writable=True)
    sent = pickle.dumps(file)
    twin = pickle.loads(sent)
    file.map[5] = 77
    assert (twin.map[5], twin.writable, len(sent) < 300) == (77, True, True)


def test_a_file_needs_no_name(tmp_path: Path) -> None:
    """One that was removed or replaced meanwhile is still the one that is meant."""
    (tmp_path / "a").write_bytes(b"old")
    file = MappedFile(os.open(tmp_path / "a", os.O_RDONLY))
    (tmp_path / "b").write_bytes(b"new")
    os.replace(tmp_path / "b", tmp_path / "a")
    assert bytes(pickle.loads(pickle.dumps(file)).map) == b"old"


def test_a_closed_file_is_no_other() -> None:
    """A descriptor that was closed and given to another file is refused."""
    file = in_memory("first", b"first")
    sent, number = pickle.dumps(file), file.fd
    del file
    other = in_memory("other", b"other")
    assert other.fd == number
    with pytest.raises(FileNotFoundError, match="closed before it was opened here"):
        pickle.loads(sent)


def test_a_file_outlives_the_interpreter() -> None:
    """Threads that still run while a process ends never find its number closed, or given to another file."""
    program = """
import atexit, os
atexit.register(lambda: print(os.fstat(file.fd).st_size))  # the first to register is the last to be called
from harness.data.mapped import in_memory
file = in_memory("test", b"content")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("7\n", "")


def test_a_file_for_reading_cannot_be_written() -> None:
    """What is shared for reading stays as it is, in every process."""
    file = in_memory("test", b"content")
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(file)).map[0] = 1


def test_memory_is_taken_as_it_is_written() -> None:
    """A file in memory may be larger than the machine's memory."""
    file = MappedFile(memory("test", 1 << 40), writable=True)
    file.map[1 << 39] = 1
    assert os.fstat(file.fd).st_blocks * 512 < 1 << 22


def zeroed(content: np.ndarray) -> np.ndarray:
    content[4096:8192] = 0
    return content


def flipped(content: np.ndarray) -> np.ndarray:
    content[9999] ^= 1
    return content


@pytest.mark.parametrize(
    "change",
    [zeroed, flipped, lambda content: content[:-1], lambda content: np.append(content, np.uint8(0)), np.zeros_like],
    ids=["lost page", "flipped bit", "shorter", "longer", "nothing but zeros"],
)
def test_a_checksum_shows_damage(change: Callable[[np.ndarray], np.ndarray]) -> None:
    """A lost page, a flipped bit and another length give another sum, within 63 bits."""
    content = np.random.default_rng(0).integers(0, 256, 10_003, dtype=np.uint8)
    before = checksum(content)
    assert before == checksum(content.copy())
    assert 0 < before < 2**63
    assert checksum(change(content.copy())) not in (before, 0)
