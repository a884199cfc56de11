"""What a tree of class folders holds, and what is left out of it: links, devices and strangers are never followed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from harness.data.decode import HEAD_BYTES, reader
from harness.runtime.errors import DataError, printable

# A file of these names is an image or a fault; of any other, only if its first bytes say so.
_SUFFIXES = frozenset(b".jpg .jpeg .jpe .jfif .png .webp .bmp .dib .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm".split())
_SHOWN = 5


class Scan:
    """One pass over the class folders in ``root``: ``folders``, the ``images`` below each, how many were ``skipped`` and why.

    Folders and images are sorted, the images' paths relative to their folder. Links may not leave ``limit``, a real path.

    Raises:
        DataError: something cannot be read.
    """

    def __init__(self, root: bytes, limit: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self._limit = os.path.join(limit, b"")
        self._unreadable: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self.folders: list[bytes] = []
        for entry in self._entries(root):
            if entry.is_dir(follow_symlinks=False):
                self.folders.append(entry.path)
            else:
                self.skipped["link to a folder" if os.path.isdir(entry.path) else "file beside the class folders"] += 1
        self.images = [self._images(folder) for folder in self.folders]
        if self._unreadable:
            raise DataError(f"cannot read {listed(self._unreadable)}: mend the permissions, or take them out of the folder")

    def _images(self, folder: bytes) -> list[bytes]:
        found, pending = [], [folder]
        while pending:
            current = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in self._seen:  # a bind mount can lead back as a link can
                continue
            self._seen.add((status.st_dev, status.st_ino))
            for entry in self._entries(current):
                try:
                    reason = self._unfit(entry)
                except OSError:
                    self._unreadable.append(os.fsdecode(entry.path))
                    continue
                if reason is not None:
                    self.skipped[reason] += 1
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    found.append(entry.path[len(folder) + 1 :])
        return sorted(found)

    def _entries(self, folder: bytes) -> list[os.DirEntry[bytes]]:
        try:
            with os.scandir(folder) as entries:
                every = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            self._unreadable.append(os.fsdecode(folder))
            return []
        shown = [entry for entry in every if not entry.name.startswith(b".")]
        if len(shown) < len(every):
            self.skipped["hidden"] += len(every) - len(shown)
        return shown

    def _unfit(self, entry: os.DirEntry[bytes]) -> str | None:
        """Why ``entry`` is left out; None where it is an image or a folder."""
        named_image = os.path.splitext(entry.name)[1].lower() in _SUFFIXES
        if entry.is_dir(follow_symlinks=False):
            return "folder named like an image" if named_image else None
        if entry.is_symlink():
            if not os.path.exists(entry.path):  # also for a link that leads to itself
                return "broken link"
            if os.path.isdir(entry.path):
                return "link to a folder"
            if not os.path.realpath(entry.path).startswith(self._limit):
                return "link out of the data set"
        if not entry.is_file():
            return "not a regular file"
        if not os.access(entry.path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError
        if named_image:
            return None
        with open(entry.path, "rb") as file:
            return None if reader(file.read(HEAD_BYTES)) else "not an image"


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, printable, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
