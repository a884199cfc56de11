"""Lists the images in a dataset as packed arrays in one mapped file.

The file is cached until one of its inputs changes. In a tree of class folders, links are followed
wherever they lead, but no folder is read twice. Other files are skipped, counted and listed.
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

# increase it if the file layout or the rules for scanning and trust change
_FORMAT = 10
# a folder changed this recently may change again within the same mtime
_RACY_NS = 2_000_000_000

# files with these suffixes are images or errors; others only by their first bytes
SUFFIXES = frozenset(
    b".jpg .jpeg .jpe .jfif .png .webp .bmp .dib .tif .tiff .gif .ppm .pgm .pbm .pnm .pfm".split()
)
# left by operating systems, archivers and network storage, in addition to hidden files
_LITTER = frozenset(
    b"thumbs.db|ehthumbs.db|desktop.ini|__macosx|@eadir|@recycle|#recycle|#snapshot|$recycle.bin|"
    b"system volume information|lost+found|__pycache__".split(b"|")
)
_BROKEN_LINK = "broken link"
_REPEATED = "link to a folder already read"


class Index:
    """The images in a dataset, by class and path.

    An index pickles as its mapped file, because reference counts in string lists would copy their
    pages in every worker. The file has the columns, names, facts in JSON, the number of images, the
    number of columns and the length of the facts.

    Attributes:
        file: the mapped file.
        folders: the names of the class folders or the labels in a table, sorted.
        labels: int64 ``[N]``, read-only, indices into ``folders``.
        ends: int64 ``[N]``, the end of each image's name in ``names``.
        more: additional columns, int64 ``[N]`` each.
        names: the concatenated paths below the class folders, or names in a table, uint8.
        skipped: number of skipped entries by reason, which may be an image format.
        examples: the first three paths for each reason.
        watched: the state of each folder or file whose change could affect the images.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
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
        return Index, (self.file,)

    def name(self, i: int) -> str:
        """Returns the name of image ``i``; bytes that are not UTF-8 are escaped."""
        begin = self.ends[i - 1] if i else 0
        return os.fsdecode(self.names[begin : self.ends[i]].tobytes())

    def left_out(self) -> str:
        """Returns skipped entries by reason, with examples; empty if there are none."""
        return ", ".join(
            f"{count} {reason} ({', '.join(self.examples[reason])}{', ...' * (count > 3)})"
            for reason, count in self.skipped.most_common()
        )

    def digest(self) -> bytes:
        """Returns a 32-byte digest of the images' paths and labels."""
        found = hashlib.sha256(b"\0".join(self.folders))
        for array in (self.labels, self.ends, self.names):
            found.update(array.data)
        return found.digest()


def listing(root: bytes) -> Index:
    """Returns an uncached index of all images below ``root``, or of the file ``root``.

    They belong to one class folder with an empty name. Unreadable files are included and raise an
    error when they are read.

    Raises:
        DataError: a folder cannot be read.
    """
    return _Scan(root, flat=True).index()


def open_index(root: bytes, kept: Path) -> Index:
    """Returns the index of the class folders in ``root``.

    A later run loads the index from the folder ``kept`` and only checks the times of every folder.
    Files written in place and links retargeted outside the tree are not detected. Trees with
    broken links are rescanned each time, because a new target leaves no trace.

    Raises:
        DataError: something cannot be read.
    """

    def scan() -> tuple[Index, bool]:
        found = _Scan(root)
        return found.index(), _BROKEN_LINK not in found.left_out

    return remembered(kept, os.path.realpath(root), scan)


def remembered(kept: Path, source: bytes, make: Callable[[], tuple[Index, bool]]) -> Index:
    """Returns the index of ``source`` from the folder ``kept``; ``make`` rebuilds it if needed.

    ``make`` returns the index, and whether watching the folders and files detects every change.
    """
    # another user may have other read permissions
    key = b"\0".join((b"%d %d" % (_FORMAT, os.geteuid()), source))
    place = kept / hashlib.sha256(key).hexdigest()[:32]
    if content := read_kept(place, key):
        index = Index(in_memory(content))
        # a folder may be missing
        with suppress(FileNotFoundError):
            states = index.watched.items()
            if all(path_state(os.fsencode(path)) == state for path, state in states):
                return index
    racy_ns = time.time_ns() - _RACY_NS
    index, shows = make()
    if shows and all(max(state[1:]) < racy_ns for state in index.watched.values()):
        write_kept(place, key, index.file.map[:])
    return index


def pack(
    folders: Sequence[bytes],
    columns: Sequence[Sequence[int] | np.ndarray],
    names: Sequence[bytes],
    left_out: Mapping[str, Sequence[str]],
    watched: Mapping[bytes, list[int]],
) -> Index:
    """Returns an index in memory.

    ``columns`` are the labels, ``[N]``, and ``more``; ``left_out`` contains all skipped entries by
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
    """One scan of the class folders in ``root`` or, if ``flat``, of all images below it.

    Images are sorted by their paths, which are relative to their class folder. ``watched`` contains
    the ``path_state``, before reading, of all folders in the tree and of all folders to which image
    links lead.

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
            above = _with_parents(root)
            for entry in sorted(self._entries(root), key=attrgetter("name")):
                if entry.is_symlink() and not os.path.exists(entry.path):
                    self.left_out[_BROKEN_LINK].append(entry.path)
                elif not entry.is_dir():
                    self.left_out["file next to the class folders"].append(entry.path)
                elif entry.is_symlink() and os.path.realpath(entry.path) in above:
                    self.left_out[_REPEATED].append(entry.path)
                else:
                    self.images[entry.name] = self._images(entry.path)
        if self._unreadable:
            names = listed(list(map(os.fsdecode, sorted(self._unreadable))))
            raise DataError(
                f"cannot read {names}; fix the permissions, or move them out of the folder"
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
        # read after the folders, by name
        links: list[bytes] = []
        read: set[bytes] = set()
        done = [self._root]
        while pending or links:
            if not pending:
                links.sort()
                link = links.pop(0)
                read.update(*map(_with_parents, done))
                done.clear()
                if os.path.realpath(link) in read:
                    self.left_out[_REPEATED].append(link)
                    continue
                pending.append(link)
            at = pending.pop()
            done.append(at)
            # one file per folder stands for all, because each check over a network is a round trip
            looks = True
            for entry in self._entries(at):
                suffix = entry.name[entry.name.rfind(b".") :].lower()
                if not looks and suffix in SUFFIXES and entry.is_file(follow_symlinks=False):
                    found.append(entry.path[start:])
                    continue
                try:
                    reason = self._unfit(entry)
                    # checked for the effective user, because that user opens files
                    if looks and reason is None and not entry.is_dir():
                        looks = False
                        if not os.access(entry.path, os.R_OK, effective_ids=True):
                            raise PermissionError
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
        """Returns why ``entry`` is skipped; None for an image or a folder."""
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
        if suffix in SUFFIXES:
            return None
        with open(entry.path, "rb") as file:
            head = file.read(HEAD_BYTES)
        plugin = reader(head)
        if suffix and plugin is TiffImageFile:
            # most raw camera formats begin like TIFF but contain a thumbnail
            return os.fsdecode(suffix[1:].upper())
        return None if plugin else foreign(head) or "not an image"


def _with_parents(folder: bytes) -> set[bytes]:
    """Returns the real paths of ``folder`` and of all folders above it."""
    real = Path(os.fsdecode(os.path.realpath(folder)))
    return {os.fsencode(path) for path in (real, *real.parents)}


def path_state(path: bytes) -> list[int]:
    """Returns the inode number and times of a folder or file.

    A folder's times change with its entries' names; a file's, with its content. Programs such as
    ``rsync -a`` and ``tar`` set the first time (mtime), but cannot set the second (ctime).
    """
    status = os.stat(path)
    return [status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
