"""What a tree of class folders holds, and what is left out of it: links, devices and strangers are never followed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from harness.data.decode import HEAD_BYTES, reader
from harness.runtime.errors import DataError, printable

_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .dib .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm".split()
)  # a file of these names is an image or a fault; of any other, only if its first bytes say so
_SHOWN = 5


class Scan:
    """One pass over a tree: what it holds, and what it leaves out.

    Args:
        limit: the folder that links may not leave, as a real path.
    """

    def __init__(self, limit: bytes) -> None:
        self.limit = os.path.join(limit, b"")
        self.skipped: Counter[str] = Counter()
        self.unreadable: list[str] = []
        self._seen: set[tuple[int, int]] = set()

    def class_folders(self, root: bytes) -> list[bytes]:
        """The folders in ``root``, sorted."""
        folders = []
        for entry in self._entries(root):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                self.skipped["link to a folder" if os.path.isdir(entry.path) else "file beside the class folders"] += 1
        return folders

    def images(self, folder: bytes) -> list[bytes]:
        """Paths of the images below ``folder``, relative to it and sorted."""
        found, pending = [], [folder]
        while pending:
            current = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in self._seen:  # a bind mount can lead back as a link can
                continue
            self._seen.add((status.st_dev, status.st_ino))
            for entry in self._entries(current):
                if entry.is_dir(follow_symlinks=False):
                    if _suffix(entry) in _SUFFIXES:
                        self.skipped["folder named like an image"] += 1
                    else:
                        pending.append(entry.path)
                elif self._is_image(entry):
                    found.append(entry.path[len(folder) + 1 :])
        return sorted(found)

    def refuse_unreadable(self) -> None:
        """Raise DataError if anything could not be read."""
        if self.unreadable:
            raise DataError(f"cannot read {listed(self.unreadable)}: mend the permissions, or take them out of the folder")

    def _entries(self, folder: bytes) -> list[os.DirEntry[bytes]]:
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            self.unreadable.append(os.fsdecode(folder))
            return []
        shown = [entry for entry in listed if not entry.name.startswith(b".")]
        if len(shown) < len(listed):
            self.skipped["hidden"] += len(listed) - len(shown)
        return shown

    def _is_image(self, entry: os.DirEntry[bytes]) -> bool:
        try:
            reason = self._unfit(entry)
        except OSError:
            self.unreadable.append(os.fsdecode(entry.path))
            return False
        if reason is not None:
            self.skipped[reason] += 1
        return reason is None

    def _unfit(self, entry: os.DirEntry[bytes]) -> str | None:
        reason = self._unfit_link(entry) if entry.is_symlink() else None
        if reason is not None:
            return reason
        if not entry.is_file():
            return "not a regular file"
        if not os.access(entry.path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError
        if _suffix(entry) in _SUFFIXES:
            return None
        with open(entry.path, "rb") as file:
            return None if reader(file.read(HEAD_BYTES)) else "not an image"

    def _unfit_link(self, entry: os.DirEntry[bytes]) -> str | None:
        if not os.path.exists(entry.path):  # also for a link that leads to itself
            return "broken link"
        if os.path.isdir(entry.path):
            return "link to a folder"
        return None if os.path.realpath(entry.path).startswith(self.limit) else "link out of the data set"


def _suffix(entry: os.DirEntry[bytes]) -> bytes:
    return os.path.splitext(entry.name)[1].lower()


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, printable, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
