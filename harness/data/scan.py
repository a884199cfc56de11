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
BROKEN_LINK = "broken link"
_BY_USER = os.access in os.supports_effective_ids  # whether access() can be asked for the user that files are opened as

State = tuple[int, int, int]


class Scan:
    """One pass over the class folders in ``root``: ``folders``, the ``images`` below each, how many were ``skipped`` and why.

    Folders' names and images are sorted, the images' paths relative to their folder. Links may not leave ``limit``, a real
    path. ``watched`` has the folders by whose ``folder_state``, as it was before they were read, a change would show: those
    of the tree by their path in ``root``, and those that links to images lead to by their whole one.

    Raises:
        DataError: something cannot be read.
    """

    def __init__(self, root: bytes, limit: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self.watched: dict[bytes, State] = {b"": folder_state(os.stat(root))}
        self._root, self._limit = root, os.path.join(limit, b"")
        self._unreadable: list[bytes] = []
        self._seen: set[tuple[int, int]] = set()
        self.folders: list[bytes] = []
        for entry in self._entries(root):
            if entry.is_dir(follow_symlinks=False):
                self.folders.append(entry.name)
            else:
                self.skipped["link to a folder" if os.path.isdir(entry.path) else "file beside the class folders"] += 1
        self.folders.sort()
        self.images = [self._images(os.path.join(root, folder)) for folder in self.folders]
        if self._unreadable:
            names = [os.fsdecode(path) for path in sorted(self._unreadable)]
            raise DataError(f"cannot read {listed(names)}: mend the permissions, or take them out of the folder")

    def _images(self, folder: bytes) -> list[bytes]:
        start, found, pending = len(os.path.join(folder, b"")), [], [folder]
        while pending:
            current = pending.pop()
            status = os.stat(current)
            if (status.st_dev, status.st_ino) in self._seen:  # a bind mount can lead back as a link can
                continue
            self._seen.add((status.st_dev, status.st_ino))
            self.watched[os.path.relpath(current, self._root)] = folder_state(status)
            folders = []
            for entry in self._entries(current):
                try:
                    reason = self._unfit(entry)
                except OSError:
                    self._unreadable.append(entry.path)
                    continue
                if reason is not None:
                    self.skipped[reason] += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    found.append(entry.path[start:])
            pending += sorted(folders)
        return sorted(found)

    def _entries(self, folder: bytes) -> list[os.DirEntry[bytes]]:
        try:
            with os.scandir(folder) as entries:
                every = list(entries)
        except OSError:
            self._unreadable.append(folder)
            return []
        shown = [entry for entry in every if not entry.name.startswith(b".")]
        if len(shown) < len(every):
            self.skipped["hidden"] += len(every) - len(shown)
        return shown

    def _unfit(self, entry: os.DirEntry[bytes]) -> str | None:
        """Why ``entry`` is left out; None where it is an image or a folder."""
        named_image = entry.name[entry.name.rfind(b".") :].lower() in _SUFFIXES
        if not entry.is_file(follow_symlinks=False):
            if entry.is_dir(follow_symlinks=False):
                return "folder named like an image" if named_image else None
            if not entry.is_symlink():
                return "not a regular file"
            if (reason := self._unfit_link(entry)) is not None:
                return reason
        if not os.access(entry.path, os.R_OK, effective_ids=_BY_USER):
            raise PermissionError
        if named_image:
            return None
        with open(entry.path, "rb") as file:
            return None if reader(file.read(HEAD_BYTES)) else "not an image"

    def _unfit_link(self, entry: os.DirEntry[bytes]) -> str | None:
        if not os.path.exists(entry.path):  # also for a link that leads to itself
            return BROKEN_LINK
        if os.path.isdir(entry.path):
            return "link to a folder"
        target = os.path.realpath(entry.path)
        if not target.startswith(self._limit):
            return "link out of the data set"
        if not entry.is_file():
            return "not a regular file"
        beside = os.path.dirname(target)
        if beside not in self.watched:
            self.watched[beside] = folder_state(os.stat(beside))
        return None


def folder_state(status: os.stat_result) -> State:
    """What changes when an entry comes, goes or is renamed: the folder's number, and its times of change in nanoseconds.

    The second of the times cannot be set by a program, as ``rsync -a`` and ``tar`` set the first.
    """
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, printable, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
