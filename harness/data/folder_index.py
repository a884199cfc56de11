"""Lists the images of a data set as packed arrays in one mapped file.

The file is remembered while nothing that it was made of changes. In a tree of class folders,
links are followed wherever they lead, but not into a folder that was read already. What is no image
is left out, counted and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np
from PIL.TiffImagePlugin import TiffImageFile

from ..runtime import signals
from ..runtime.errors import DataError, listed
from ..runtime.files import read_kept, write_kept
from .decode import HEAD_BYTES, foreign, reader
from .mapped import MappedFile, in_memory

# Of the file, and of the rules by which a scan chooses and is trusted: raise it with either.
_FORMAT = 10
# a folder changed so shortly before its scan may change again without another time of change
_RACY_NS = 2_000_000_000

# A file of these names is an image or a fault; of any other, only if its first bytes say so.
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .dib .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm".split()
)
# What operating systems, archivers and network storage leave in folders, besides hidden names.
_LITTER = frozenset(
    b"thumbs.db|ehthumbs.db|desktop.ini|__macosx|@eadir|@recycle|#recycle|#snapshot|$recycle.bin|"
    b"system volume information|lost+found|__pycache__".split(b"|")
)
_BROKEN_LINK = "broken link"
_REPEATED = "link to a folder that is read already"


class Index:
    """The images of a data set, by class and path.

    Pickled, an index is its mapped file: lists of strings would grow every worker's memory, page by
    page, as reference counts change. The file has the columns, names, facts in JSON, the number of
    images, the number of columns and the length of the facts.

    Attributes:
        folders: the class folders' names or the labels of a table, sorted.
        labels: int64 ``[N]``, read-only: the place in ``folders`` of each image's class.
        ends: int64 ``[N]``: where each image's name ends in ``names``, and the next one begins.
        more: further columns, int64 ``[N]`` each.
        names: the paths below the class folders, or what a table has of each image, uint8, one
            behind the other.
        skipped: how many entries were left out, by reason; an image's format is a reason.
        examples: the first three paths of each.
        watched: the state of each folder or file by whose change one of the images would show.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        content = np.frombuffer(file.map, np.uint8)
        count, columns, size = content[-24:].view(np.int64).tolist()
        end = 8 * columns * count
        self.labels, self.ends, *self.more = content[:end].view(np.int64).reshape(columns, count)
        self.names = content[end : -24 - size]
        facts = json.loads(content[-24 - size : -24].tobytes())
        folders, skipped, self.examples, self.watched = facts
        self.folders = tuple(map(os.fsencode, folders))
        self.skipped = Counter[str](skipped)

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self._file,)

    def content(self) -> bytes:
        """Returns the bytes of the file."""
        return self._file.map[:]

    def name(self, i: int) -> str:
        """Returns the name of image ``i``; bytes that are not UTF-8 are escaped."""
        begin = self.ends[i - 1] if i else 0
        return os.fsdecode(self.names[begin : self.ends[i]].tobytes())

    def left_out(self) -> str:
        """Returns what was left out, by reason, with examples; nothing if all is there."""
        return ", ".join(
            f"{count} {reason} ({', '.join(self.examples[reason])}{', ...' * (count > 3)})"
            for reason, count in self.skipped.most_common()
        )

    def digest(self) -> bytes:
        """Returns 32 bytes that follow from the images' paths and labels alone."""
        found = hashlib.sha256(b"\0".join(self.folders))
        for array in (self.labels, self.ends, self.names):
            found.update(array.data)
        return found.digest()


def listing(root: bytes) -> Index:
    """Returns an index of all images below ``root``, or of the file ``root``, that is not kept.

    They belong to one class folder, whose name is empty. A file that may not be read is among
    them: whoever reads it is told.

    Raises:
        DataError: a folder cannot be read.
    """
    return _Scan(root, flat=True).index()


def open_index(root: bytes, kept: Path) -> Index:
    """Returns the index of the class folders in ``root``.

    A later run finds the index in the folder ``kept``, and only asks every folder of the tree for
    its times of change. Not detected: files written in place, links re-targeted outside the tree.
    Trees with broken links are scanned each time, for nothing shows when a target comes.

    Raises:
        DataError: something cannot be read.
    """

    def scan() -> tuple[Index, bool]:
        found = _Scan(root)
        return found.index(), _BROKEN_LINK not in found.left_out

    return remembered(kept, os.path.realpath(root), scan)


def remembered(kept: Path, source: bytes, make: Callable[[], tuple[Index, bool]]) -> Index:
    """Returns the index of ``source`` in the folder ``kept``; ``make`` makes it again if need be.

    ``make`` returns the index, and whether a change of what it watches would show all changes.
    """
    # Another user may read other files.
    key = b"\0".join((b"%d %d" % (_FORMAT, os.geteuid()), source))
    place = kept / hashlib.sha256(key).hexdigest()[:32]
    if content := read_kept(place, key):
        index = Index(in_memory(content))
        # a folder of the tree may be gone
        with suppress(FileNotFoundError):
            states = index.watched.items()
            if all(path_state(os.fsencode(path)) == state for path, state in states):
                return index
    racy_ns = time.time_ns() - _RACY_NS
    index, shows = make()
    if shows and all(max(state[1:]) < racy_ns for state in index.watched.values()):
        write_kept(place, key, index.content())
    return index


def pack(
    folders: Sequence[bytes],
    columns: Sequence[Sequence[int] | np.ndarray],
    names: Sequence[bytes],
    left_out: Mapping[str, Sequence[str]],
    watched: Mapping[bytes, list[int]],
) -> Index:
    """Returns an index in memory.

    ``columns`` are the labels, ``[N]``, and what is ``more``; ``left_out`` has all entries by
    reason.
    """
    ends = np.cumsum([*map(len, names)], dtype=np.int64)
    labels, *more = columns
    table = np.array([labels, ends, *more], np.int64)
    counts = {reason: len(entries) for reason, entries in left_out.items()}
    examples = {reason: entries[:3] for reason, entries in left_out.items()}
    states = {os.fsdecode(path): state for path, state in watched.items()}
    facts = json.dumps([[*map(os.fsdecode, folders)], counts, examples, states]).encode()
    sizes = np.array([len(names), len(table), len(facts)])
    content = b"".join((table.tobytes(), *names, facts, sizes.tobytes()))
    return Index(in_memory(content))


class _Scan:
    """One pass over the class folders in ``root``, or if ``flat`` over the images below it.

    Images are sorted by their paths, which are relative to their class folder. ``watched`` has the
    folders by whose ``path_state``, as it was before they were read, a change would show: those
    of the tree, and those that links to images lead to.

    Raises:
        DataError: something cannot be read.
    """

    def __init__(self, root: bytes, flat: bool = False) -> None:
        # paths by reason
        self.left_out: defaultdict[str, list[bytes]] = defaultdict(list)
        self.watched: dict[bytes, list[int]] = {}
        self._root = root
        self._unreadable: list[bytes] = []
        self._flat = flat
        # by their class folder
        self.images: dict[bytes, list[bytes]] = {}
        if os.path.isfile(root):
            self.images[b""] = [os.path.basename(root)]
        elif flat:
            self.images[b""] = self._images(root)
        else:
            for entry in sorted(self._entries(root), key=attrgetter("name")):
                if not os.path.exists(entry.path):
                    self.left_out[_BROKEN_LINK].append(entry.path)
                elif not os.path.isdir(entry.path):
                    self.left_out["file beside the class folders"].append(entry.path)
                elif os.path.realpath(entry.path) in _with_parents(root):
                    self.left_out[_REPEATED].append(entry.path)
                else:
                    self.images[entry.name] = self._images(entry.path)
        if self._unreadable:
            names = listed(list(map(os.fsdecode, sorted(self._unreadable))))
            raise DataError(
                f"cannot read {names}: mend the permissions, or take them out of the folder"
            )

    def index(self) -> Index:
        """Returns what was found."""
        names = [*chain.from_iterable(self.images.values())]
        labels = np.repeat(np.arange(len(self.images)), [*map(len, self.images.values())])
        below = len(os.path.join(self._root, b""))
        left_out = {
            reason: [os.fsdecode(path[below:]) for path in sorted(paths)]
            for reason, paths in self.left_out.items()
        }
        return pack([*self.images], [labels], names, left_out, self.watched)

    def _images(self, folder: bytes) -> list[bytes]:
        start = len(os.path.join(folder, b""))
        found = []
        pending = [folder]
        # after the folders themselves, by name
        links: list[bytes] = []
        read = _with_parents(self._root)
        while pending or links:
            if not pending:
                links.sort()
                link = links.pop(0)
                if os.path.realpath(link) in read:
                    self.left_out[_REPEATED].append(link)
                    continue
                pending.append(link)
            at = pending.pop()
            read |= _with_parents(at)
            for entry in self._entries(at):
                try:
                    reason = self._unfit(entry)
                except OSError:
                    if not self._flat:
                        self._unreadable.append(entry.path)
                        continue
                    reason = None
                if reason is not None:
                    self.left_out[reason].append(entry.path)
                elif entry.is_dir():
                    (links if entry.is_symlink() else pending).append(entry.path)
                else:
                    found.append(entry.path[start:])
        return sorted(found)

    def _entries(self, folder: bytes) -> list[os.DirEntry[bytes]]:
        signals.check()
        shown = []
        try:
            self.watched[folder] = path_state(folder)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith(b".") or entry.name.lower() in _LITTER:
                        self.left_out["hidden"].append(entry.path)
                    else:
                        shown.append(entry)
        except OSError:
            self._unreadable.append(folder)
        return shown

    def _unfit(self, entry: os.DirEntry[bytes]) -> str | None:
        """Why ``entry`` is left out; None: it is an image or a folder."""
        suffix = os.path.splitext(entry.name)[1].lower()
        # also for a link that leads to itself
        if entry.is_symlink() and not os.path.exists(entry.path):
            return _BROKEN_LINK
        if entry.is_dir():
            return "folder named like an image" if suffix in SUFFIXES else None
        if entry.is_symlink():
            beside = os.path.dirname(os.path.realpath(entry.path))
            if beside not in self.watched:
                self.watched[beside] = path_state(beside)
        if not entry.is_file():
            return "not a regular file"
        # asked for the user that files are opened as
        if not os.access(entry.path, os.R_OK, effective_ids=True):
            raise PermissionError
        if suffix in SUFFIXES:
            return None
        with open(entry.path, "rb") as file:
            head = file.read(HEAD_BYTES)
        plugin = reader(head)
        if suffix and plugin is TiffImageFile:
            # most raw formats of cameras begin like it, and have a thumbnail where it has pixels
            return os.fsdecode(suffix[1:].upper())
        return None if plugin else foreign(head) or "not an image"


def _with_parents(folder: bytes) -> set[bytes]:
    """Returns the real path of ``folder``, and those of all folders above it."""
    paths = [os.path.realpath(folder)]
    while (parent := os.path.dirname(paths[-1])) != paths[-1]:
        paths.append(parent)
    return {*paths}


def path_state(path: bytes) -> list[int]:
    """Returns the number and times of a folder or file.

    A folder's change with its entries' names, a file's with its content.

    The second of the times cannot be set by a program, as ``rsync -a`` and ``tar`` set the first.
    """
    status = os.stat(path)
    return [status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
