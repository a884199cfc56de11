"""Finds the samples in tar shards with WebDataset's layout, and caches their index.

An image's label is the number in the ``.cls`` next to it, or in ``label`` in its ``.json``, or else
the first folder in its name. Patterns or ``_info.json`` determine which shards belong to which set.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from fnmatch import filter as matching
from functools import partial
from typing import Any

import numpy as np

from ..config import ConfigError, DataConfig
from ..monitor.console import progress, say
from ..runtime import signals
from ..runtime.errors import DataError, listed
from ..runtime.files import read_kept, write_kept
from ..runtime.folder import check_folder
from .ahead import Ahead
from .folder_index import SUFFIXES
from .mapped import in_memory
from .shards import ShardSource
from .storage import cache_root
from .stores import Store, open_store
from .table import SPELLINGS, SPLITS
from .tar import TarError, members

INFO = "_info.json"
INDEX = "_index.npz"
# increase it if the rules for finding labels change
_FORMAT = 1
# shard, offset, length and label of each sample, and the class names
_Columns = tuple[list[Any], Sequence[str]]


def open_shards(root: str, data: DataConfig, labeled: bool = True) -> ShardSource:
    """Returns all samples in the shards below ``root`` that ``data`` selects.

    Their index is cached until a shard's size or tag changes. With ``labeled=False``, every image
    belongs to one unnamed class.

    Raises:
        ConfigError: a pattern matches no shard.
        DataError: a shard is missing or rejected, or labels are missing or contradict each other.
    """
    store = open_store(root)
    if "://" not in root:
        check_folder(store.root)
    try:
        names = store.names()
        beside = {name: store.state(name) for name in (INFO, INDEX) if name in names}
        read = {name: store.read(name, 0, size) for name, (size, _) in beside.items()}
        try:
            info = json.loads(read.get(INFO, b"{}"))
        except ValueError as error:
            raise DataError(f"{store.root}/{INFO}: {error}; fetch it again") from error
        parts = _parts(store.root, names, data, info)
        states = {name: store.state(name) for name in parts}
        key = repr((_FORMAT, store.root, labeled, parts, states, beside)).encode()
        kept = cache_root() / "index" / hashlib.sha256(key).hexdigest()[:32]
        content = read_kept(kept, key)
        if content is None:
            sizes = {name: size for name, (size, _) in states.items()}
            ready = _ready(read[INDEX], sizes) if INDEX in read else None
            columns, classes = ready or indexed(store, sizes, info.get("classes"), labeled)
            if not labeled:
                columns[3], classes = np.zeros_like(columns[3]), [""]
            content = _content(columns, classes, parts, [*states.values()])
            write_kept(kept, key, content)
    except OSError as error:
        raise DataError(f"{store.root}: cannot be read: {error}") from error
    ahead = Ahead(store, data) if data.scratch or "://" in root else store
    return ShardSource(ahead, in_memory(content))


def _parts(root: str, names: list[str], data: DataConfig, info: dict[str, Any]) -> dict[str, int]:
    """Returns the index of each shard's set in ``SPLITS``."""
    patterns = {"train": data.train, "val": data.val}
    chosen = [
        (SPELLINGS[name], shard)
        for name, pattern in patterns.items()
        if pattern
        for shard in matched(names, f"data.{name}", pattern)
    ] or [
        (SPELLINGS[name], shard)
        for name, split in info.get("splits", {}).items()
        if name in SPELLINGS
        for shard in split["filenames"]
    ]
    chosen = chosen or [(0, name) for name in matching(names, "*.tar")]
    parts = {shard: part for part, shard in chosen}
    if not len(parts) == len(chosen) > 0:
        raise DataError(
            f"{root} has no *.tar shards, or one in two sets; select each once with "
            "data.train=PATTERN data.val=PATTERN"
        )
    return parts


def matched(names: Sequence[str], setting: str, pattern: str) -> list[str]:
    """Returns the ``names`` that match ``pattern``, which may contain {000..146}, * and ?.

    Raises:
        ConfigError: none matches, or a number in its range is missing.
    """
    if found := re.search(r"\{(\d+)\.\.(\d+)\}", pattern):
        first, last = found.groups()
        return [
            name
            for number in range(int(first), int(last) + 1)
            for name in matched(
                names, setting, pattern.replace(found[0], str(number).zfill(len(first)), 1)
            )
        ]
    chosen = matching(names, pattern)
    if not chosen:
        raise ConfigError(f"{setting}={pattern}: no such shard among {listed(names)}")
    return chosen


def _content(
    columns: list[Any], classes: Sequence[str], parts: dict[str, int], states: list[Any]
) -> bytes:
    """Returns the content of a ``ShardSource``'s file."""
    part = np.array([*parts.values()])[columns[0]]
    order = np.argsort(part, kind="stable")
    facts = {
        "shards": [*parts],
        "states": states,
        "classes": [*classes],
        "ends": np.bincount(part, minlength=len(SPLITS)).cumsum().tolist(),
    }
    told = json.dumps(facts).encode()
    shard, offset, length, labels = (np.asarray(column)[order] for column in columns)
    narrow = np.array([shard, length, labels], np.int32)
    sizes = np.array([len(order), len(told)])
    wide = offset.astype(np.int64)
    return b"".join((wide.data, narrow.data, told, sizes.data))


def _ready(content: bytes, sizes: dict[str, int]) -> _Columns | None:
    """Returns the index that ``wellfed pack`` wrote; None if the shard sizes differ."""
    with np.load(io.BytesIO(content)) as found:
        shards = found["shards"].tolist()
        known = dict(zip(shards, found["sizes"].tolist(), strict=True))
        if any(known.get(name) != size for name, size in sizes.items()):
            say(f"{INDEX}: shard sizes differ; reading shard headers instead")
            return None
        place = {name: i for i, name in enumerate(sizes)}
        shard = np.array([place.get(name, -1) for name in shards])[found["shard"]]
        columns = [shard, found["offset"], found["length"], found["label"]]
        return [column[shard >= 0] for column in columns], found["classes"].tolist()


def indexed(
    store: Store, sizes: dict[str, int], given: list[str] | None, labeled: bool
) -> _Columns:
    """Returns the samples found in the shards' headers, ordered by label, then by name."""
    rows: list[tuple[bytes, int, int, int, int]] = []
    with progress("Reading headers", len(sizes), "shards") as bar:
        for place, name in enumerate(bar.over(sizes)):
            signals.check()
            try:
                read = partial(store.read, name)
                if "://" in store.root:
                    # one request per shard, not one per sample
                    read = partial(_part, read(0, sizes[name]))
                rows += _samples(read, sizes[name], place)
            except (ValueError, OSError) as error:
                raise DataError(f"{store.root}/{name}: {error}") from error
    if not rows:
        raise DataError(f"{store.root}: there are no images in {listed([*sizes])}")
    rows.sort()
    names, shard, offset, length, told = zip(*rows, strict=True)
    labels, classes = np.zeros(len(rows), np.int32), [""]
    if labeled:
        try:
            labels, classes = labels_of(names, told, given)
        except TarError as error:
            raise DataError(f"{store.root}: {error}") from error
    order = np.argsort(labels, kind="stable")
    return [np.array(column)[order] for column in (shard, offset, length, labels)], classes


def _part(content: bytes, offset: int, length: int) -> bytes:
    return content[offset : offset + length]


def _samples(read: Any, size: int, place: int) -> list[tuple[bytes, int, int, int, int]]:
    """Returns the name, shard, offset, length and number (-1: none) of each image in a shard."""
    images: dict[bytes, tuple[bytes, tuple[int, int]]] = {}
    told: dict[bytes, int] = {}
    for name, at, length, content in members(read, size, (b".cls", b".json")):
        name = name.removeprefix(b"./")
        stem, _, suffix = name.rpartition(b".")
        if suffix in (b"cls", b"json"):
            label = json.loads(content).get("label") if suffix == b"json" else int(content)
            if isinstance(label, int) and told.setdefault(stem, label) != label:
                raise TarError(f"{os.fsdecode(stem)} has two labels; correct one")
        elif b"." + suffix.lower() in SUFFIXES and b"/." not in b"/" + name:
            if stem in images:
                raise TarError(f"{os.fsdecode(stem)} has two images; keep one")
            images[stem] = name, (at, length)
    return [(name, place, *at, told.get(stem, -1)) for stem, (name, at) in images.items()]


def labels_of(
    names: Sequence[bytes], told: Sequence[int], given: list[str] | None
) -> tuple[np.ndarray, list[str]]:
    """Returns the image labels, int32 ``[N]``, and the classes.

    Args:
        names: image names; the first folder in each one is its class unless there are numbers.
        told: the class number of each image; -1: none.
        given: the class names by number; None: unknown.

    Raises:
        TarError: images have no label, or two labels that disagree.
    """
    folders = [os.fsdecode(name[: max(0, name.find(b"/"))]) for name in names]
    pairs = sorted({*zip(told, folders, strict=True)}, key=lambda p: (p[0], os.fsencode(p[1])))
    numbers, places = ({*column} for column in zip(*pairs, strict=True))
    by_folder = numbers == {-1} and "" not in places
    if -1 in numbers and not by_folder:
        raise TarError("images have no label; add KEY.cls to each, or name them CLASS/KEY.jpg")
    # if each number has its own folder, the folder is its name
    named = by_folder or len(pairs) == len(numbers) == len(places) > 1
    called = {pair: pair[1] if named else str(pair[0]) for pair in pairs}
    if given and not by_folder:
        if max(numbers) >= len(given):
            raise TarError(f"label {max(numbers)} has no name in {INFO}; add it to classes")
        called = {pair: given[pair[0]] for pair in pairs}
    classes = given or [*dict.fromkeys(called.values())]
    for (number, folder), name in called.items():
        if name not in classes or (folder in classes and folder != name):
            raise TarError(f"label {number} and folder {folder} disagree; correct one")
    label = {pair: classes.index(name) for pair, name in called.items()}
    return np.array([label[pair] for pair in zip(told, folders, strict=True)], np.int32), classes
