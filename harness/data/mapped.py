"""Files that the processes of one machine map together, whether or not they have a name."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import xxhash


class MappedFile:
    """All bytes of an open file, shared by every process that is handed this object; ``fd`` is
    closed with it.

    Pickled, it is where this process holds the file: another opens it as
    ``/proc/<process>/fd/<number>``, which needs no name and finds no newer file of the same name.
    So whoever pickles it holds it until the other has it. It ends when the last process that maps
    it does; nothing is left behind.

    Attributes:
        fd: the file's descriptor in this process.
        writable: whether it is mapped for writing.
        map: the bytes.
    """

    def __init__(self, fd: int, writable: bool = False) -> None:
        self.fd = fd
        self.writable = writable
        # a thread that outlives the interpreter may still write to it
        weakref.finalize(self, os.close, fd).atexit = False
        self.map = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[object, ...]:
        status = os.fstat(self.fd)
        return _opened, (
            f"/proc/{os.getpid()}/fd/{self.fd}",
            self.writable,
            (status.st_dev, status.st_ino),
        )


def _opened(path: str, writable: bool, identity: tuple[int, int]) -> MappedFile:
    found = MappedFile(
        os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC), writable
    )
    status = os.fstat(found.fd)
    # its holder closed it, and something else has the number
    if (status.st_dev, status.st_ino) != identity:
        raise FileNotFoundError(f"{path}: closed before it was opened here")
    return found


def in_memory(name: str, content: bytes) -> MappedFile:
    """A file in memory that holds ``content``, for reading; ``/proc`` shows ``name``."""
    # nothing at all cannot be mapped
    fd = memory(name, max(1, len(content)))
    with open(fd, "wb", closefd=False) as stream:
        stream.write(content)
    return MappedFile(fd)


def memory(name: str, size: int) -> int:
    """The descriptor of ``size`` zero bytes of memory, which take none until they are written;
    ``/proc`` shows ``name``.

    Unlike files in /dev/shm it has no limit of its own, and no name that could be left behind.
    """
    fd = os.memfd_create(name)
    os.ftruncate(fd, size)
    return fd


def checksum(content: np.ndarray) -> int:
    """Returns 63 bits that follow from each byte of ``content`` (C-contiguous), its place and the
    shape.
    """
    digest = xxhash.xxh3_64(repr(content.shape).encode())
    digest.update(content.data)
    return digest.intdigest() >> 1
