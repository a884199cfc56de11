"""Files that processes share."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from commands import python

from harness.data.mapped import MappedFile, checksum, in_memory, memory


def test_a_pickled_file_is_the_same_file() -> None:
    """Whoever unpickles it maps the same bytes, however many they are, and sees what is written."""
    file = MappedFile(memory(1 << 20), writable=True)
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


def test_a_file_outlives_the_interpreter() -> None:
    """Threads of an ending process never find the number closed or reused."""
    program = """
import atexit, os
# the first to register is the last to be called
atexit.register(lambda: print(os.fstat(file.fd).st_size))
from harness.data.mapped import in_memory
file = in_memory(b"content")
"""
    ended = python(program)
    assert (ended.stdout, ended.stderr) == ("7\n", "")


def test_a_file_for_reading_cannot_be_written() -> None:
    """What is shared for reading stays as it is, in every process."""
    file = in_memory(b"content")
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(file)).map[0] = 1


def test_memory_is_taken_as_it_is_written() -> None:
    """A file in memory may be larger than the machine's memory."""
    file = MappedFile(memory(1 << 40), writable=True)
    file.map[1 << 39] = 1
    assert os.fstat(file.fd).st_blocks * 512 < 1 << 22


CONTENT = np.random.default_rng(0).integers(
    0, 256, 40_003, dtype=np.uint8
)  # with a rest that fills no word
CONTENT.flags.writeable = False


def swapped(at: int, to: int, size: int) -> np.ndarray:
    changed = CONTENT.copy()
    changed[at : at + size] = CONTENT[to : to + size]
    changed[to : to + size] = CONTENT[at : at + size]
    return changed


def zeroed(start: int, count: int) -> np.ndarray:
    changed = CONTENT.copy()
    changed[start : start + count] = 0
    return changed


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(zeroed(4096, 4096), id="lost page"),
        pytest.param(zeroed(39_999, 4), id="lost end"),
        pytest.param(CONTENT[:-4096], id="a page shorter"),
        pytest.param(np.append(CONTENT, np.uint8(0)), id="longer"),
        pytest.param(swapped(0, 8, 8), id="words swapped"),
        pytest.param(swapped(0, 20_480, 4096), id="pages swapped"),
    ],
)
def test_a_checksum_shows_lost_and_moved_parts(damaged: np.ndarray) -> None:
    """What is zeroed, cut off, appended or elsewhere gives another sum, within 63 bits."""
    before = checksum(CONTENT)
    assert before == checksum(CONTENT.copy())
    assert 0 < before < 2**63
    assert checksum(damaged) not in (before, 0)


def test_a_checksum_shows_each_flipped_bit() -> None:
    """No single bit may flip unseen, and no two flips give the same sum."""
    content = CONTENT[-8_203:].copy()
    sums = {checksum(content)}
    for at in range(content.size):
        for bit in range(8):
            content[at] ^= 1 << bit
            sums.add(checksum(content))
            content[at] ^= 1 << bit
    assert len(sums) == 1 + 8 * content.size


def test_a_checksum_knows_the_shape() -> None:
    """The same bytes as an image of other sides are another image."""
    shapes = [(12, 4, 3), (4, 12, 3), (48, 1, 3), (144,)]
    assert len({checksum(CONTENT[:144].reshape(shape)) for shape in shapes}) == len(shapes)


def test_a_checksum_stays_what_it_is() -> None:
    """Files of earlier runs hold the sum: a change raises both formats."""
    assert checksum(np.arange(9000, dtype=np.uint16)) == 3942633588125132878
