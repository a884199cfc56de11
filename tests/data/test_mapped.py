"""Files that processes share."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

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


def test_a_closed_file_is_no_other() -> None:
    """A descriptor that was closed and given to another file is refused."""
    file = in_memory(b"first")
    sent = pickle.dumps(file)
    number = file.fd
    del file
    other = in_memory(b"other")
    assert other.fd == number
    with pytest.raises(FileNotFoundError, match="closed before it was opened here"):
        pickle.loads(sent)


def test_a_file_outlives_the_interpreter() -> None:
    """Threads of an ending process never find the number closed or reused."""
    program = """
import atexit, os
# the first to register is the last to be called
atexit.register(lambda: print(os.fstat(file.fd).st_size))
from harness.data.mapped import in_memory
file = in_memory(b"content")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
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


def moved(*pieces: slice) -> np.ndarray:
    """The content, with the first piece where the next one was, and so on around."""
    changed = CONTENT.copy()
    for to, of in zip(pieces, pieces[1:] + pieces[:1], strict=True):
        changed[to] = CONTENT[of]
    return changed


def zeroed(start: int, count: int) -> np.ndarray:
    changed = CONTENT.copy()
    changed[start : start + count] = 0
    return changed


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(zeroed(4096, 4096), id="lost page"),
        pytest.param(zeroed(0, 40_960), id="nothing but zeros"),
        pytest.param(zeroed(39_999, 4), id="lost end"),
        pytest.param(CONTENT[:-1], id="shorter"),
        pytest.param(CONTENT[:-4096], id="a page shorter"),
        pytest.param(CONTENT[1:], id="without its first byte"),
        pytest.param(np.append(CONTENT, np.uint8(0)), id="longer"),
        pytest.param(np.append(CONTENT, np.zeros(4096, np.uint8)), id="a page longer"),
        pytest.param(np.append(CONTENT, CONTENT), id="twice"),
        pytest.param(CONTENT[::-1].copy(), id="backwards"),
        pytest.param(np.roll(CONTENT, 8), id="moved on"),
        *(
            pytest.param(
                moved(slice(at, at + size), slice(to, to + size)),
                id=f"{size} bytes at {at} and {to} swapped",
            )
            for size in (1, 2, 4, 8, 64, 512, 4096)
            for at, to in ((0, 20_480), (0, size), (8192, 8192 + 3 * size))
        ),
        pytest.param(
            moved(*(slice(at, at + 8) for at in (0, 800, 80, 8000))), id="four words around"
        ),
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


@pytest.mark.parametrize("size", [16_384, 40_003], ids=["whole blocks", "with a rest"])
@pytest.mark.parametrize("like", ["noise", "zeros", "ones"])
def test_a_checksum_shows_flips_all_over(size: int, like: str) -> None:
    """The same flips in every k-th byte never cancel."""
    content = {
        "noise": CONTENT,
        "zeros": np.zeros_like(CONTENT),
        "ones": np.full_like(CONTENT, 255),
    }[like][:size]
    sums = {checksum(content)}
    cases = [
        (k, mask)
        for k in range(1, 65)
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 3, 0x81, 0xC0, 0xF0, 255)
    ]
    for k, mask in cases:
        changed = content.copy()
        changed[k - 1 :: k] ^= mask
        sums.add(checksum(changed))
    assert len(sums) == 1 + len(cases)


def test_a_checksum_shows_two_flips_of_the_same_bit() -> None:
    """Two flips of the same bit in words apart do not cancel, in either direction."""
    rng = np.random.default_rng(1)
    before = checksum(CONTENT)
    for _ in range(5_000):
        changed = CONTENT.copy()
        changed[rng.choice(CONTENT.size // 8, 2, replace=False) * 8 + 7] ^= 0x80
        assert checksum(changed) != before


def test_a_checksum_knows_the_shape() -> None:
    """The same bytes as an image of other sides are another image."""
    shapes = [(12, 4, 3), (4, 12, 3), (48, 1, 3), (144,)]
    assert len({checksum(CONTENT[:144].reshape(shape)) for shape in shapes}) == len(shapes)


def test_a_checksum_takes_any_content() -> None:
    """Sums of no byte, one byte and bytes at odd addresses depend on content alone."""
    sums = {checksum(CONTENT[:size]) for size in (0, 1, 4, 4095, 4096, 4097)}
    assert len(sums) == 6
    assert checksum(CONTENT[1:20_000]) == checksum(CONTENT[1:20_000].copy())


def test_a_checksum_stays_what_it_is() -> None:
    """Files of earlier runs hold the sum: a change raises both formats."""
    assert checksum(np.arange(9000, dtype=np.uint16)) == 3942633588125132878
