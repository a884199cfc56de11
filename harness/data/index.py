"""What a tree of class folders holds, as packed arrays in one mapped file, remembered while no
folder of it changes.

Links, devices and strangers are never followed: they are left out, and counted.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.data.decode import HEAD_BYTES, reader
from harness.data.mapped import MappedFile, checksum, in_memory
from harness.runtime.errors import DataError, printable
from harness.runtime.files import open_regular, parsed, set_aside, write_whole
from harness.runtime.folder import LOGGER

# of the file, and of the rules by which a scan chooses and is trusted: whoever changes any raises
# it
_FORMAT = 3
# a folder changed so shortly before its scan may change again without another time of change
_RACY_NS = 2_000_000_000

# A file of these names is an image or a fault; of any other, only if its first bytes say so.
_SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .dib .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm".split()
)
_SHOWN = 5
_BROKEN_LINK = "broken link"
# whether access() can be asked for the user that files are opened as
_BY_USER = os.access in os.supports_effective_ids

_State = tuple[int, int, int]

_log = logging.getLogger(LOGGER)


class Index:
    """The images of a data set, in the order of their names; pickled, it is the file that holds it,
    mapped by all.

    Lists of strings would grow every worker's memory, page by page, as reference counts change.

    Attributes:
        folders: the class folders' names, sorted.
        labels: int64 ``[N]``, read-only: the place in ``folders`` of each image's class.
        skipped: how many entries were left out, by reason.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self.labels, self._ends, self._states, self._table, facts = _arrays(file)
        lists: dict[str, Any] = parsed(facts.tobytes())
        self.folders, self._watched = (
            tuple(map(os.fsencode, lists[name])) for name in ("folders", "watched")
        )
        self.skipped = Counter[str](**lists["skipped"])

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self._file,)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> bytes:
        """Image ``i``'s path, relative to the root."""
        name = self._table[self._ends[i - 1] if i else 0 : self._ends[i]].tobytes()
        return os.path.join(self.folders[self.labels[i]], name)

    def digest(self) -> bytes:
        """32 bytes that follow from the images' paths and labels alone."""
        found = hashlib.sha256(b"\0".join(self.folders))
        for array in (self.labels, self._ends, self._table):
            found.update(array.data)
        return found.digest()

    def check(self) -> None:
        """Refuse what no scan finds.

        Raises:
            ValueError: places and labels do not fit together, or a name may lead out of the root.
            IndexError: a name begins beyond the table.
        """
        sizes = np.diff(self._ends, prepend=0)
        fit = (
            self.labels.shape == sizes.shape
            and (sizes > 0).all()
            and sizes.sum() == self._table.nbytes
        )
        fit = fit and sizes.dtype == self.labels.dtype == np.int64 and self.skipped.total() >= 0
        names = b"/".join((b"", *self.folders, self._table.tobytes()))
        out = (
            re.search(rb"/[./]|\0", names)
            or np.isin(self._table[self._ends - sizes], list(b"./")).any()
        )
        if out or not fit or not np.isin(self.labels, np.arange(len(self.folders))).all():
            raise ValueError("holds what no scan finds")

    def holds(self, root: bytes) -> bool:
        """Whether every folder below ``root`` is as it was before it was scanned."""
        try:
            states = [_folder_state(os.stat(os.path.join(root, path))) for path in self._watched]
        except OSError:
            return False
        return bool(np.array_equal(self._states, states))


def open_index(root: bytes, limit: bytes, kept: Path) -> Index:
    """The index of the class folders in ``root``, whose links may not leave ``limit``, a real path.

    A later run finds it in the folder ``kept``, and only asks every folder of the tree for its
    times of change. They show what comes, goes or is renamed. They do not show a file that is
    written in place or loses its permissions, which its reader reports, nor a link to an image that
    goes by another link, elsewhere, which now leads to another place. Where a link leads nowhere,
    nothing shows when its target comes, as it does with ``git annex get``: such a tree is scanned
    each time.

    Raises:
        DataError: something cannot be read.
    """
    # another user may read other files
    key = b"\0".join((b"%d %d" % (_FORMAT, os.geteuid()), os.path.realpath(root), limit))
    place = kept / hashlib.sha256(key).hexdigest()[:32]
    if (index := _remembered(place, root)) is not None:
        return index
    began_ns = time.time_ns()
    scan = _Scan(root, limit)
    content = _packed(scan)
    changed_ns = max(chain.from_iterable(state[1:] for state in scan.watched.values()))
    settled = changed_ns < began_ns - _RACY_NS and _BROKEN_LINK not in scan.skipped
    if settled:
        try:
            kept.mkdir(parents=True, exist_ok=True)
            write_whole(place, content)
        except OSError as error:
            _log.info("%s: the index is not remembered: %s", place, error.strerror or error)
    return Index(in_memory("index", content))


def _arrays(file: MappedFile) -> list[np.ndarray]:
    """The arrays in ``file``, which has them one after another as ``np.save`` writes them."""
    found = []
    at = file.map
    at.seek(0)
    while at.tell() < len(at) - 8:
        np.lib.format.read_magic(at)
        shape, _, dtype = np.lib.format.read_array_header_1_0(at)
        array: np.ndarray = np.ndarray(shape, dtype, at, at.tell())
        at.seek(array.nbytes, os.SEEK_CUR)
        found.append(array)
    return found


def _packed(scan: _Scan) -> bytes:
    """What the file holds; its last eight bytes are a checksum of the others."""
    names = list(chain.from_iterable(scan.images))
    lists = {
        "folders": list(map(os.fsdecode, scan.folders)),
        "watched": list(map(os.fsdecode, scan.watched)),
    }
    stream = io.BytesIO()
    for array in (
        np.repeat(np.arange(len(scan.folders), dtype=np.int64), list(map(len, scan.images))),
        np.cumsum(np.fromiter(map(len, names), np.int64, len(names))),
        np.array(list(scan.watched.values()), np.int64),
        np.frombuffer(b"".join(names), np.uint8),
        np.frombuffer(json.dumps({**lists, "skipped": scan.skipped}).encode(), np.uint8),
    ):
        np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    stream.write(checksum(np.frombuffer(stream.getbuffer(), np.uint8)).to_bytes(8, "little"))
    return stream.getvalue()


def _remembered(place: Path, root: bytes) -> Index | None:
    """The index at ``place``, if there is one that still holds."""
    try:
        file = MappedFile(open_regular(place, os.O_RDONLY | os.O_NOFOLLOW))
        if checksum(np.frombuffer(file.map, np.uint8)[:-8]) != int.from_bytes(
            file.map[-8:], "little"
        ):
            raise ValueError("its checksum differs")
        index = Index(file)
        index.check()
        return index if index.holds(root) else None
    except FileNotFoundError:
        return None
    except Exception as error:
        # what is in a damaged file may raise anything
        _log.warning("%s: damaged (%s): made again", place, error)
        with suppress(OSError):
            set_aside(place)
    return None


class _Scan:
    """One pass over the class folders in ``root``: ``folders``, the ``images`` below each, how many
    were ``skipped`` and why.

    Folders' names and images are sorted, the images' paths relative to their folder. Links may not
    leave ``limit``, a real path. ``watched`` has the folders by whose ``_folder_state``, as it was
    before they were read, a change would show: those of the tree by their path in ``root``, and
    those that links to images lead to by their whole one.

    Raises:
        DataError: something cannot be read.
    """

    def __init__(self, root: bytes, limit: bytes) -> None:
        self.skipped: Counter[str] = Counter()
        self.watched: dict[bytes, _State] = {b"": _folder_state(os.stat(root))}
        self._root = root
        self._limit = os.path.join(limit, b"")
        self._unreadable: list[bytes] = []
        self._seen: set[tuple[int, int]] = set()
        self.folders: list[bytes] = []
        for entry in self._entries(root):
            if entry.is_dir(follow_symlinks=False):
                self.folders.append(entry.name)
            else:
                self.skipped[
                    "link to a folder"
                    if os.path.isdir(entry.path)
                    else "file beside the class folders"
                ] += 1
        self.folders.sort()
        self.images = [self._images(os.path.join(root, folder)) for folder in self.folders]
        if self._unreadable:
            names = [os.fsdecode(path) for path in sorted(self._unreadable)]
            raise DataError(
                f"cannot read {listed(names)}: mend the permissions, or take them out of the folder"
            )

    def _images(self, folder: bytes) -> list[bytes]:
        start = len(os.path.join(folder, b""))
        found = []
        pending = [folder]
        while pending:
            current = pending.pop()
            status = os.stat(current)
            # a bind mount can lead back as a link can
            if (status.st_dev, status.st_ino) in self._seen:
                continue
            self._seen.add((status.st_dev, status.st_ino))
            self.watched[os.path.relpath(current, self._root)] = _folder_state(status)
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
        # also for a link that leads to itself
        if not os.path.exists(entry.path):
            return _BROKEN_LINK
        if os.path.isdir(entry.path):
            return "link to a folder"
        target = os.path.realpath(entry.path)
        if not target.startswith(self._limit):
            return "link out of the data set"
        if not entry.is_file():
            return "not a regular file"
        beside = os.path.dirname(target)
        if beside not in self.watched:
            self.watched[beside] = _folder_state(os.stat(beside))
        return None


def _folder_state(status: os.stat_result) -> _State:
    """What changes when an entry comes, goes or is renamed: the folder's number, and its times of
    change in nanoseconds.

    The second of the times cannot be set by a program, as ``rsync -a`` and ``tar`` set the first.
    """
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, printable, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
