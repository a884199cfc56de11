"""What may lie where a file of this project should, and small changes of bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Plant = Callable[[Path], object]
SECRET = "secret of another folder\n"


def elsewhere(path: Path) -> Path:
    """Where a link that is planted at ``path`` leads to: out of its folder."""
    return path.absolute().parent.with_name(f"{path.absolute().parent.name}-elsewhere")


def _content(data: bytes) -> Plant:
    return lambda path: path.write_bytes(data)


def _link_out(path: Path) -> None:
    elsewhere(path).write_text(SECRET)
    path.symlink_to(elsewhere(path))


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "mine").write_text("mine")


CONTENTS = {
    "empty": b"",
    "one byte": b"\1",
    "a list": b"[1]",
    "nothing in it": b"{}",
    "null": b"null",
    "a text": b'"x"',
    "huge number": b"1" + b"0" * 400,
    "infinite": b"1e999",
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
}
SPECIAL: dict[str, Plant] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link out": _link_out,
    "folder": _folder,
}
special = pytest.mark.parametrize("plant", SPECIAL.values(), ids=SPECIAL.keys())
every = pytest.mark.parametrize(
    "plant",
    [*map(_content, CONTENTS.values()), *SPECIAL.values()],
    ids=[*CONTENTS.keys(), *SPECIAL.keys()],
)


def put(plant: Plant, path: Path) -> None:
    """Put an oddity at ``path``, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    plant(path)


def untouched(path: Path) -> bool:
    """Whether what a planted link leads to, or a planted folder held, is still there."""
    there = elsewhere(path)
    folders = [found for found in path.parent.glob(f"{path.name}*") if found.is_dir()]
    return (not there.exists() or there.read_text() == SECRET) and all(
        (found / "mine").exists() for found in folders
    )


def listing(folder: Path) -> list[str]:
    """All that lies below ``folder``, by its path in there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """``data`` with one to seven bits flipped."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)
