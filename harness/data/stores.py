"""Reads files by name, position and length, below a folder or from an object store."""

from __future__ import annotations

import os
import resource
from functools import lru_cache

from ..runtime.files import open_regular
from .remote import RemoteStore


class FolderStore:
    """The files below a folder. Links are followed."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        # leaves half of the file descriptors for other uses
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._opened = lru_cache(most)(self._open)

    def __reduce__(self) -> tuple[object, ...]:
        return FolderStore, (self.root,)

    def _open(self, name: str) -> Descriptor:
        return Descriptor(open_regular(os.path.join(self.root, name)))

    def names(self) -> list[str]:
        """Returns the names of all files, sorted."""
        walked = os.walk(self.root, followlinks=True)
        paths = (os.path.join(folder, name) for folder, _, files in walked for name in files)
        return sorted(os.path.relpath(path, self.root) for path in paths)

    def state(self, name: str) -> tuple[int, str]:
        """Returns a file's size, and its inode number and times as text."""
        status = os.stat(os.path.join(self.root, name))
        return status.st_size, f"{status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns exactly ``length`` bytes from a file.

        Raises:
            OSError: they cannot be read, or the file is too short.
        """
        # a reference, because another thread may drop this file from the cache
        file = self._opened(name)
        data = os.pread(file.fd, length, offset)
        if len(data) < length:
            raise OSError(f"ends before byte {offset + length}")
        return data


class Descriptor:
    """An open file, closed when the last reference is deleted."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


# Files by name below ``root``, which identifies them in messages and contains no secrets. Threads
# may call a store concurrently. After unpickling, a store opens its files again.
Store = FolderStore | RemoteStore


def open_store(root: str) -> Store:
    """Returns the store at ``root``, a folder or an address with "://"."""
    return RemoteStore(root) if "://" in root else FolderStore(root)
