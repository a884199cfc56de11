"""Shares memory-mapped files, named or anonymous, among the processes on a machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
import weakref
from multiprocessing import util

import numpy as np
import xxhash


class MappedFile:
    """All bytes of an open file, shared with every process that receives this object.

    The object pickles as the file's path, which is ``/proc/<pid>/fd/<n>`` on Linux. Keep the object
    until the receiver has unpickled it, because deleting it closes ``fd``. The file is freed when
    the last process that maps it exits.

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
        return opened, (path_of(self.fd), self.writable)


def opened(path: str, writable: bool) -> MappedFile:
    """Maps the file at ``path``; raises OSError."""
    flags = os.O_RDWR if writable else os.O_RDONLY
    return MappedFile(os.open(path, flags | os.O_CLOEXEC), writable)


def path_of(fd: int) -> str:
    """Returns a path by which any local process can open the file behind ``fd``."""
    if sys.platform == "darwin":
        return fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0").decode()
    return f"/proc/{os.getpid()}/fd/{fd}"


def in_memory(content: bytes) -> MappedFile:
    """Returns an in-memory file that contains ``content``, for reading."""
    fd = memory(len(content))
    os.pwrite(fd, content, 0)
    return MappedFile(fd)


def memory(size: int) -> int:
    """Returns a file descriptor for ``size`` zero bytes of memory.

    Memory is allocated on write. Unlike files in /dev/shm, it has no separate limit and leaves no
    name behind. Systems other than Linux use a temporary file.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("wellfed")
    else:
        fd, path = tempfile.mkstemp(prefix="wellfed-")
        util.Finalize(None, os.unlink, [path], exitpriority=0)
    os.ftruncate(fd, size)
    return fd


def reserve(fd: int, size: int) -> None:
    """Allocates at least ``size`` bytes for a file on disk; unwritten bytes are zero.

    Raises:
        OSError: the disk is full, which would later kill any process that writes to the map.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    elif (missing := size - os.fstat(fd).st_size) > 0:
        os.pwrite(fd, bytes(missing), size - missing)


def checksum(content: np.ndarray, *facts: object) -> int:
    """Returns a 63-bit digest of ``content`` (C-contiguous), its shape and ``facts``."""
    digest = xxhash.xxh3_64(repr((*content.shape, *facts)).encode())
    digest.update(content.data)
    return digest.intdigest() >> 1
