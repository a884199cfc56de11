"""Opens images whose labels are in a table, and writes a folder's table: ``wellfed table``.

    wellfed table /data/photos > labels.csv

The table has one row per image in a folder that ``data=imagefolder`` can open, with its path, label
and, if the folder has several sets, split. Exit code 3: there is no such folder.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import astuple
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from sys import intern
from typing import TYPE_CHECKING

import numpy as np

from ..config import ConfigError, DataConfig, Evaluate, OnError
from ..monitor.console import say
from ..runtime.errors import DataError, listed, printable, tell
from ..runtime.folder import check_folder, log
from ..suggestions import shell_word, typed
from .folder_index import Index, listing, pack, path_state, remembered
from .folds import HeldOut
from .records import records, text
from .storage import (
    SPLIT_SEED,
    FileSource,
    Source,
    Subset,
    cache_root,
    check_classes,
    check_unsplit,
    in_classes,
    open_sets,
    split,
    tell_of_test,
)

if TYPE_CHECKING:
    from .shards import ShardSource

# usual column names in order of preference, in lower case, letters only
_NAMES = {
    "image": "path file image filename filepath imagepath imagefile img imgpath imgname imageid "
    "imagename fname name id",
    "label": "label class target labels classname labelname category species breed diagnosis dx y",
    "split": "split set subset partition",
    "group": "group groupid patient patientid subject subjectid",
}
SPLITS = ("train", "val", "test")
SPELLINGS = {
    "train": 0, "training": 0, "0": 0, "val": 1, "valid": 1, "validation": 1, "dev": 1, "1": 1,
    "test": 2, "testing": 2, "2": 2,
    # an empty cell
    "": 0,
}  # fmt: skip
# number of rows searched for the content of missing columns
_LOOKED_AT = 1000
_FLAGS = {"0", "1", "0.0", "1.0"}


class TableSource(FileSource):
    """The images below ``root`` listed in the table ``data.table``, by class and path.

    The listing is cached (``Index``) until the table or a folder of its images changes. With
    ``labeled=False``, every image belongs to one unnamed class.

    Raises:
        ConfigError: there is no such table or column, or no column has a known name.
        DataError: the table is unreadable, has no images, or has rows without an image or a label.
            ``data.on_error=skip`` skips these rows.
    """

    advice = (
        "write train and val into a split column, or set data.split_fraction=0.1 for rows "
        "without a split"
    )

    def __init__(self, root: str, data: DataConfig, labeled: bool = True) -> None:
        root = os.path.abspath(os.path.expanduser(root))
        check_folder(root)
        table = _Table(root, data, labeled)
        self.origin = table.path
        self.key = table.header[table.places["image"]]
        asked = "table", os.path.realpath(self.origin), root, astuple(data.columns), labeled
        index = remembered(cache_root() / "index", repr(asked).encode(), table.read)
        super().__init__(root, index)
        say(f"{self.origin}: {table}")
        if left_out := index.left_out():
            left_out = f"{self.origin}: {left_out}"
            if data.on_error is not OnError.skip:
                raise DataError(
                    f"{left_out}; correct these rows, data.root or data.table, or skip the rows "
                    "with data.on_error=skip"
                )
            log.warning("%s; left out", printable(left_out))
        if not len(self):
            raise DataError(f"{self.origin} has no images{left_out and f' ({left_out})'}; add rows")

    def where(self, i: int) -> str:
        """Returns the path."""
        return os.path.join(self.root, self.index.name(i).rpartition("\0")[2])

    def name(self, i: int) -> str:
        """Returns the image's name in the table."""
        return self.index.name(i).partition("\0")[0]

    @property
    def groups(self) -> np.ndarray | None:
        """The group of each training image, int64 ``[N]``; None if the table has no groups."""
        splits, *groups = self.index.more
        # renumbered, because the split depends on the numbers
        return np.array(_numbered(groups[0][splits == 0].tolist())) if groups else None

    def sets(self) -> dict[str, Source]:
        """Returns the table's sets by name; warns about groups in several sets."""
        splits, *groups = self.index.more
        if groups:
            pairs = np.unique([groups[0], splits], axis=1)
            if torn := np.count_nonzero(np.bincount(pairs[0]) > 1):
                log.warning(
                    "%s: %d groups have images in several of train, val and test", self.origin, torn
                )
        return {
            name: Subset(self, np.flatnonzero(splits == place))
            for place, name in enumerate(SPLITS)
            if place in splits
        }


def _sets(source: TableSource | ShardSource, held_out: HeldOut) -> dict[str, Source]:
    """Returns the sets in ``source`` by name, with ``held_out`` of ``train`` as ``val``.

    Raises:
        ConfigError: there is already a validation set.
        DataError: a class cannot be in both sets.
    """
    found = source.sets()
    if held_out is not None and "train" in found:
        if "val" in found:
            check_unsplit(held_out, found, source.origin)
        found["train"], found["val"] = split(found["train"], held_out, SPLIT_SEED, source.groups)
    return found


def open_table_splits(
    source: TableSource | ShardSource, held_out: HeldOut
) -> tuple[Source, Source]:
    """Returns the training and validation sets, or the test set if there is no validation set.

    Raises:
        ConfigError: ``held_out`` has no effect.
        DataError: a set, or a class's training images, are missing.
    """
    sets = _sets(source, held_out)
    train = sets.get("train")
    val = sets.get("val", sets.get("test"))
    if train is None or val is None:
        raise DataError(
            f"{source.origin} has no {'training' if train is None else 'validation'} images; "
            f"{source.advice}"
        )
    tell_of_test(sets)
    untrained = np.bincount(train.labels, minlength=len(train.classes)) == 0
    if untrained.any():
        names = listed([train.classes[label] for label in np.flatnonzero(untrained)])
        raise DataError(f"{source.origin}: no training images of {names}; add or remove their rows")
    check_classes(train, source.origin)
    return train, val


def open_evaluated_table(
    source: TableSource | ShardSource,
    evaluate: Evaluate,
    held_out: HeldOut,
    classes: tuple[str, ...],
) -> tuple[Source, str]:
    """Returns the images that ``mode=evaluate`` uses, and a name for them, as for folders.

    Raises:
        DataError: there is no such set, or a class that the network lacks.
    """
    sets = _sets(source, held_out)
    name = evaluate.name if evaluate.name in sets else "test"
    if evaluate is Evaluate.test and name not in sets:
        raise DataError(
            f"data.evaluate=test: {source.origin} has no test images; write test into a split "
            "column, or specify another table with data.table=FILE"
        )
    called = {"val": "validation images", "test": "test images"}[name]
    images = in_classes(sets.get(name, source), classes, source.origin)
    return images, called if name in sets else "images"


def table_path(root: str, data: DataConfig) -> str:
    """Returns the path of ``data.table``, relative to ``root`` or to the current folder."""
    table = os.path.expanduser(str(data.table))
    inside = os.path.join(root, table)
    return inside if os.path.exists(inside) else os.path.abspath(table)


class _Table:
    """One pass over a table.

    Attributes:
        path: the table's file.
        header: column names, or numbers from 1 if the first row already lists an image.
        places: positions of those columns in ``_NAMES`` that were found.

    Raises:
        ConfigError: there is no such file, or a column is missing.
        DataError: it cannot be read.
    """

    def __init__(self, root: str, data: DataConfig, labeled: bool) -> None:
        if data.table is None:
            raise ConfigError("data=table requires data.table, for example data.table=labels.csv")
        self.path = table_path(root, data)
        if not os.path.isfile(self.path):
            raise ConfigError(f"data.table={data.table}: no such file in {root} or {os.getcwd()}")
        self._root = root
        self._labeled = labeled
        self._used = [*_NAMES] if labeled else ["image"]
        self._state = path_state(os.fsencode(self.path))
        self._rows = records(self.path)
        first = next(self._rows)
        self.header = [text(name).strip() for name in first[1]]
        self._find_columns(data)
        # a first row with an image is not a header; checking may require a listing
        images = (place for place, name in enumerate(self.header) if len(self._find(name)) == 1)
        if "image" not in self.places and (image := next(images, None)) is not None:
            self._rows = chain([first], self._rows)
            self.header = [str(place + 1) for place in range(len(self.header))]
            self._find_columns(data)
            self.places.setdefault("image", image)
        free = [place for place in range(len(self.header)) if place not in self.places.values()]
        if len(free) == 1 and labeled and not data.columns.label:
            self.places.setdefault("label", free[0])
        wanted = {name for name in self._used if getattr(data.columns, name)}
        wanted |= {"image", "label"} & {*self._used}
        if missing := sorted(wanted - {*self.places}):
            asked = " and ".join(getattr(data.columns, name) or name for name in missing)
            raise ConfigError(
                f"{self.path} has no column {asked} among {listed(self.header)}; "
                f"{self._advice(missing, free, data)}"
            )

    def __str__(self) -> str:
        used = " ".join(f"{name}={self.header[place]}" for name, place in self.places.items())
        rest = [each for i, each in enumerate(self.header) if i not in self.places.values()]
        return used + (f" (unused: {listed(rest)})" if rest else "")

    def _find_columns(self, data: DataConfig) -> None:
        plain = [*map(_plain, self.header)]
        self.places: dict[str, int] = {}
        for name in self._used:
            given = getattr(data.columns, name)
            for each in [given] if given else _NAMES[name].split():
                for among, wanted in ((self.header, each), (plain, _plain(each))):
                    if wanted in among:
                        self.places.setdefault(name, among.index(wanted))

    def _advice(self, missing: Sequence[str], free: Iterable[int], data: DataConfig) -> str:
        """Returns advice on ``missing`` columns, which may be among the ``free`` ones."""
        rows = [[*map(text, values)] for _, values in islice(self._rows, _LOOKED_AT) if values]
        columns = {place: [row[place] for row in rows if place < len(row)] for place in free}
        flags = [place for place, values in columns.items() if {*values} <= _FLAGS]
        ones = [
            row.count("1") + row.count("1.0")
            for row in zip(*(columns[place] for place in flags), strict=False)
        ]
        if len(flags) > 1 and {*ones} == {1} and "label" in missing:
            return (
                "each row has a 1 in one of the columns "
                f"{listed([self.header[place] for place in flags])}; "
                "add a label column with its name"
            )
        # the other named columns stay
        named = {name: getattr(data.columns, name) for name in self._used}
        guess: dict[str, str] = {}
        repeating = []
        for place, values in columns.items():
            if any(map(self._find, values[:1])):
                guess.setdefault("image", self.header[place])
            elif 1 < len({*values}) <= len(values) / 2:
                repeating.append(self.header[place])
        # of several columns, any may be the label
        if len(repeating) == 1:
            guess["label"] = repeating[0]
        for name in missing:
            near = get_close_matches(named[name] or "", [self.header[i] for i in free], 1)
            named[name] = near[0] if near else guess.get(name, "COLUMN")
        example = ", ".join(f"{name}: {column}" for name, column in named.items() if column)
        return f"set it: {shell_word(f'data.columns={{{example}}}')}"

    def read(self) -> tuple[Index, bool]:
        """Returns the index, and whether later changes can be detected."""
        left_out: defaultdict[str, list[str]] = defaultdict(list)
        # by path: label, path, split, group, name in the table, row
        rows: dict[str, tuple[str, str, int, str, str, int]] = {}
        conflicting = set()
        several = "ambiguous names"
        lost = False
        for number, values in filter(itemgetter(1), self._rows):
            # the last cells of a row may be missing
            cells = dict(enumerate(map(text, values)))
            image, *more = (cells.get(self.places.get(name, -1), "") for name in _NAMES)
            label, part, group = map(str.strip, more)
            split = SPELLINGS.get(part.lower(), -1)
            found = self._find(image)
            where = f"{image} in row {number}"
            if not found:
                lost = True
                if self._labeled:
                    left_out["images not found"].append(where)
                else:
                    rows[image] = "", image, 0, image, image, number
            elif len(found) > 1:
                if several not in left_out:
                    one = min(found, key=lambda path: "train" not in path)
                    folder = os.path.join(self._root, os.path.dirname(one))
                    several += (
                        f", but not with {typed('data.root', folder)} "
                        f"{typed('data.table', self.path)}"
                    )
                left_out[several].append(f"{where}: {' or '.join(found)}")
            elif self._labeled and not label:
                left_out["images without labels"].append(where)
            elif self._labeled and split < 0:
                left_out["images in a split other than train, val or test"].append(where)
            elif (name := found[0]) in rows:
                if (label, split) != rows[name][::2][:2]:
                    conflicting.add(name)
                left_out["images listed twice"].append(f"{where} and {rows[name][-1]}")
            else:
                rows[name] = intern(label), name, split, group or name, image, number
        # either row may be correct
        kept = sorted(row for name, row in rows.items() if name not in conflicting)
        labels, names, splits, groups, images, _ = zip(*kept, strict=True) if kept else [()] * 6
        folders = {os.path.dirname(os.path.join(self._root, name)) for name in names}
        watched = {
            os.fsencode(path): path_state(os.fsencode(path))
            for path in filter(os.path.isdir, folders)
        }
        watched[os.fsencode(self.path)] = self._state
        columns = [_numbered(labels), splits, _numbered(groups)][: 2 + ("group" in self.places)]
        # identical rows are used once
        both = map(dict.fromkeys, zip(images, names, strict=True))
        called = [*map(os.fsencode, map("\0".join, both))]
        classes = [*map(os.fsencode, dict.fromkeys(labels))]
        return pack(classes, columns, called, left_out, watched), not lost

    def _find(self, name: str) -> list[str]:
        """Returns the paths below ``root`` that ``name`` may refer to; several if it is ambiguous.

        A name may lack its suffix or leading folders, start with another machine's folders, or use
        backslashes.
        """
        path = os.path.normpath(name.replace("\\", "/"))
        if os.path.isfile(os.path.join(self._root, path)):
            return [path]
        found = defaultdict(list)
        for plain, image in self._below[os.path.basename(path)]:
            short, long = sorted((f"/{plain}", f"/{path}"), key=len)
            if long.endswith(short):
                found[len(short)].append(image)
        return found[max(found, default=0)]

    @cached_property
    def _below(self) -> defaultdict[str, list[tuple[str, str]]]:
        """All images by file name with and without suffix, as pairs of listed and real paths."""
        found = defaultdict(list)
        index = listing(os.fsencode(self._root))
        for path in map(index.name, range(len(index.labels))):
            for plain in {path, os.path.splitext(path)[0]}:
                found[os.path.basename(plain)].append((plain, path))
        return found


def _plain(name: str) -> str:
    """Returns the letters and digits in a column name, in lower case."""
    return "".join(filter(str.isalnum, name.casefold()))


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Returns a number for each value, starting from 0, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def main(arguments: Sequence[str]) -> int:
    """Prints a folder's table; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="wellfed table", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folder", help="class folders, or train, val and test with class folders")
    try:
        # keep warnings out of the table
        with redirect_stdout(sys.stderr):
            base, sources = open_sets(parser.parse_args(arguments).folder)
    except DataError as error:
        return tell([error])
    columns = slice(2 + ("" not in sources))
    # non-UTF-8 names keep their bytes
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["path", "label", "split"][columns])
    for name, source in sources.items():
        for i, label in enumerate(source.labels):
            path = os.path.relpath(source.where(i), base)
            table.writerow([path, source.classes[label], name][columns])
    return 0
