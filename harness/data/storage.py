"""Defines the sources of samples: folders of files, arrays, and subsets of either."""

from __future__ import annotations

import mmap
import os
import random
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..config import ConfigError, Evaluate
from ..monitor.console import say
from ..runtime.errors import BadSample, DataError, is_out_of_memory, listed, printable
from ..runtime.files import natural, read_regular
from ..runtime.folder import log
from ..runtime.seeding import order_rng
from ..suggestions import shell_word, typed
from .decode import way_to_read
from .folder_index import listing, open_index

# of one file; larger ones are no images, and would take the run's memory
_MOST_BYTES = 1 << 30


class Source(Protocol):
    """A data set; ``labels``, int64 ``[N]``, are places in ``classes``, the names."""

    classes: tuple[str, ...]

    @property
    def labels(self) -> np.ndarray:
        """The labels."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """Returns bytes or uint8 pixels ``[H, W, 3]``, and the label; raises BadSample."""

    def where(self, i: int) -> str:
        """Returns where sample ``i`` lies, for messages."""


class FolderSource:
    """The images below ``root``, by name, with one folder for each class: ``root/class/**/file``.

    If ``flat``, the images lie anywhere below ``root``, or ``root`` is an image itself. They belong
    to one class, which has no name.

    Links are followed. Hidden entries and other litter, broken links and loops of links, folders
    named like images and everything that is not an image are left out, and counted by reason. The
    list of names is remembered (``Index``).

    Raises:
        DataError: ``root`` is missing, has no images, a class without images, or something that may
            not be read.
    """

    def __init__(self, root: str | os.PathLike[str], flat: bool = False) -> None:
        self.root = os.path.abspath(root)
        is_file = flat and os.path.isfile(self.root)
        if not is_file:
            _check_folder(self.root)
        if flat:
            index = listing(os.fsencode(self.root))
        else:
            index = open_index(os.fsencode(self.root), cache_root() / "index")
        if is_file:
            self.root = os.path.dirname(self.root)
        self.index = index
        self.classes = tuple(map(os.fsdecode, index.folders))
        left_out = ", ".join(
            f"{count} {reason} ({', '.join(index.examples[reason])}{', ...' * (count > 3)})"
            for reason, count in index.skipped.most_common()
        )
        # formats are the reasons in capitals
        if advice := way_to_read([reason for reason in index.skipped if reason.isupper()]):
            left_out += f"; {advice}"
        if left_out:
            log.warning("%s: left out: %s", printable(self.root), left_out)
        filled = {self.classes[label] for label in np.unique(self.labels)}
        empty = [name for name in self.classes if name not in filled]
        if empty or not filled:
            what = f"no images in {listed(empty)}" if any(empty) else "no images"
            raise DataError(
                f"{self.root}: {what} (left out: {left_out or 'nothing'}); a data set has one "
                "folder for each class, with its images; images to predict lie anywhere"
            )

    @property
    def labels(self) -> np.ndarray:
        """The places of the images' folders in ``classes``, int64 ``[N]``, mapped."""
        return self.index.labels

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        """Returns the path; bytes that are not UTF-8 are escaped as by ``os.fsdecode``."""
        index = self.index
        begin = index.ends[i - 1] if i else 0
        name = os.fsdecode(index.names[begin : index.ends[i]].tobytes())
        return os.path.join(self.root, self.classes[index.labels[i]], name)

    def name(self, i: int) -> str:
        """Returns the path below ``root``, with the same escapes."""
        return os.path.relpath(self.where(i), self.root)

    def read(self, i: int) -> tuple[bytes, int]:
        """Returns the file's bytes and its label.

        Raises:
            BadSample: the file is gone or unreadable.
        """
        try:
            return read_regular(self.where(i), _MOST_BYTES), int(self.labels[i])
        except OSError as error:
            if is_out_of_memory(error):
                raise
            raise BadSample(self.where(i), f"cannot be read: {error.strerror or error}") from error


def _check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise DataError(
            f"data.root={path}: no such folder; set it to the folder that holds the data set"
        )


class ArraySource:
    """Pixels in memory: ``images`` uint8 ``[N, H, W, 3]`` with integer ``labels`` ``[N]``."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, classes: Iterable[str], name: str
    ) -> None:
        assert images.dtype == np.uint8 and images.shape[3:] == (3,) and len(images) == len(labels)
        self.images = images
        self.labels = labels.astype(np.int64, copy=False)
        self.classes = tuple(classes)
        self.name = name

    def __getstate__(self) -> dict[str, Any]:
        images = self.images
        # A part of a map says the offset of the whole one, and is sent as a copy.
        if not (
            isinstance(images, np.memmap)
            and isinstance(images.base, mmap.mmap)
            and images.flags.c_contiguous
        ):
            return self.__dict__
        # a worker maps the file too: a pickled map would be a copy of all pixels
        place = (images.filename, np.uint8, "r", images.offset, images.shape)
        return {**self.__dict__, "images": place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.images, tuple):
            self.images = np.memmap(*self.images)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> tuple[np.ndarray, int]:
        """Returns a view of the pixels, and the label."""
        return self.images[i], int(self.labels[i])

    def where(self, i: int) -> str:
        """Returns the array's name and the row."""
        return f"{self.name}[{i}]"


class Subset:
    """The samples of ``source`` at ``indices``, int64 ``[N]``.

    Labels are places in ``classes``, which holds all of the source's; None: in the source's own.
    """

    def __init__(
        self, source: Source, indices: np.ndarray, classes: tuple[str, ...] | None = None
    ) -> None:
        self.source = source
        self.indices = indices
        self.labels = source.labels[indices]
        self.classes = classes or source.classes
        if classes is not None:
            self.labels = np.array([classes.index(name) for name in source.classes])[self.labels]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """Returns what ``source`` reads, and the label."""
        return self.source.read(int(self.indices[i]))[0], int(self.labels[i])

    def where(self, i: int) -> str:
        """Returns what ``source`` says."""
        return self.source.where(int(self.indices[i]))


def by_class(labels: np.ndarray, classes: int = 0) -> list[np.ndarray]:
    """Returns the places of each label, int64 and ascending, of at least ``classes`` labels."""
    counts = np.bincount(labels, minlength=classes)
    return np.split(np.argsort(labels, kind="stable"), counts.cumsum()[:-1])


def split(source: Source, fraction: float, seed: int) -> tuple[Subset, Subset]:
    """Splits ``source`` in two by ``seed``; the second part has ``fraction`` of every class.

    Raises:
        DataError: a class has a single image, which cannot be in both.
    """
    rng = random.Random(seed)
    chosen = np.zeros(len(source), dtype=bool)
    places = by_class(source.labels, len(source.classes))
    for name, members in zip(source.classes, places, strict=True):
        if len(members) < 2:
            raise DataError(
                f"class {name} has {len(members)} images: too few to split for validation"
            )
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        chosen[members[rng.sample(range(len(members)), count)]] = True
    return Subset(source, np.flatnonzero(~chosen)), Subset(source, np.flatnonzero(chosen))


def part(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns the places of ``fraction`` of each class, as ``seed`` chooses, int64 and ascending.

    Every class keeps an image, and a larger fraction has the images of a smaller one.
    """
    rng = order_rng(seed, 0)
    kept = [rng.permutation(own)[: max(1, round(fraction * len(own)))] for own in by_class(labels)]
    return np.sort(np.concatenate(kept))


def evenly_spaced(length: int, most: int) -> list[int]:
    """Returns at most ``most`` places below ``length``, evenly spread, with both ends."""
    return [int(place) for place in np.linspace(0, length - 1, min(length, most))]


def open_folder_splits(
    root: str | os.PathLike[str], split_fraction: float | None, seed: int
) -> tuple[Source, Source]:
    """Returns the training and the validation set below ``root``.

    Either ``root/train`` or ``training`` with one of ``val``, ``valid`` or ``validation`` (without
    any of them ``test`` or ``testing``), in capitals too, or one tree of class folders, of which
    ``split_fraction`` (0..1) is kept for validation, as ``seed`` chooses.

    Raises:
        DataError: a folder is missing, ambiguous or refused by ``FolderSource``, or the classes
            differ.
        ConfigError: ``split_fraction`` is given, and ``root`` has both folders.
    """
    base, sets = _sets(root, split_fraction)
    kept = sets.get("train")
    held_out = sets.get("val", sets.get("test"))
    # without a set to validate, Train may be a class
    if not kept or not (held_out or kept.name == "train"):
        found = sorted(base.glob("[!.]*/"))
        _refuse_level(base, found, split_fraction)
        whole = FolderSource(base)
        _refuse_splits(whole)
        if split_fraction is None:
            raise DataError(
                f"{base}: no train folder in it (found: {listed([path.name for path in found])}); "
                "for one tree of class folders set data.split_fraction=0.1"
            )
        _look_at_classes(whole)
        return split(whole, split_fraction, seed)
    instead = (
        f"keep a part of {kept.name} for it: {typed('data.root', kept)} data.split_fraction=0.1"
    )
    if not held_out:
        raise DataError(f"{base}: no val folder beside {kept.name}; add it, or {instead}")
    if "test" in sets and held_out != sets["test"]:
        say("test is kept apart; evaluate it by mode=evaluate resume=RUN data.evaluate=test")
    train = FolderSource(kept)
    try:
        val = FolderSource(held_out)
    except DataError as error:
        raise DataError(f"{error}, or {instead}") from error
    if len(train.classes) == 1:
        _refuse_splits(train)
    only = [
        f"only in {own.root}: {_told_apart({*own.classes} - {*other.classes}, other.classes)}"
        for own, other in ((train, val), (val, train))
        if {*own.classes} - {*other.classes}
    ]
    if only:
        raise DataError(
            f"the training and the validation set have different classes: {'; '.join(only)}"
        )
    _look_at_classes(train)
    return train, val


def _refuse_level(base: Path, folders: list[Path], fraction: float | None) -> None:
    """Refuses a folder whose sets lie in one of its ``folders``, or beside it or its class folder.

    Raises:
        DataError: there are such sets.
    """
    # a part of a training set may be wanted
    above = base.parents[:2] if fraction is None else ()
    for place in (*folders, *above):
        sets: dict[str, Path] = {}
        with suppress(DataError):
            sets = _sets(place, None)[1]
        if "train" in sets and len(sets) > 1:
            found = " and ".join(path.name for path in sets.values())
            unset = "" if fraction is None else " data.split_fraction=null"
            raise DataError(
                f"{base}: no train folder in it, and {place} has {found}; set "
                f"{typed('data.root', place)}{unset}"
            )


def _told_apart(names: Iterable[str], others: Iterable[str]) -> str:
    """Returns the first five of ``names``, escaped if only invisible signs tell it from another."""

    def seen(name: str) -> str:
        return "".join(unicodedata.normalize("NFKC", name).casefold().split())

    twins = {*map(seen, others)}
    ordered = sorted(names, key=lambda name: (seen(name) not in twins, name))
    return listed([ascii(name) if seen(name) in twins else repr(name) for name in ordered])


def _look_at_classes(source: FolderSource) -> None:
    """Says which of the classes of ``source`` may not be those that the user means."""
    classes = source.classes
    if len(classes) == 1:
        log.warning("%s: only one class, %r: any prediction is correct", source.root, classes[0])
    if sorted(classes, key=natural) != [*classes]:
        say(f"classes are sorted as text, not as numbers: {listed(classes)}")
    for path in source.index.watched:
        own, *inner = os.path.relpath(path, source.root).split(os.sep)
        if own in classes and (others := {*inner} & {*classes} - {own}):
            target = os.path.join(source.root, min(others))
            log.warning(
                "%s: its images count as class %r, and %r is a class too; to move them there: "
                "mv -n %s/* %s",
                printable(path),
                own,
                min(others),
                shell_word(path),
                shell_word(target),
            )


def _sets(root: str | os.PathLike[str], fraction: float | None) -> tuple[Path, dict[str, Path]]:
    """Returns ``root`` as a path, and the folders in it by the set that they hold.

    Raises:
        DataError: ``root`` is missing, or two folders may hold one set.
        ConfigError: the ``fraction`` to split off has no effect.
    """
    base = Path(root).expanduser().absolute()
    _check_folder(str(base))
    folders = {path.name.lower(): path for path in sorted(base.glob("[!.]*/"))}
    sets: dict[str, Path] = {}
    for names in (("train", "training"), ("val", "valid", "validation"), ("test", "testing")):
        present = [folders[name] for name in names if name in folders]
        if len(present) > 1:
            both = " and ".join(path.name for path in present)
            raise DataError(f"{base}: {both} may both be the {names[-1]} set; keep one of them")
        if present:
            sets[names[0]] = present[0]
    if fraction is not None and "train" in sets and len(sets) > 1:
        raise ConfigError(
            f"data.split_fraction={fraction:g} has no effect: {base} has "
            f"{' and '.join(path.name for path in sets.values())}; set it to null"
        )
    return base, sets


def open_evaluated(
    root: str | os.PathLike[str],
    evaluate: Evaluate,
    split_fraction: float | None,
    seed: int,
    classes: tuple[str, ...],
) -> tuple[Source, str]:
    """Returns the images below ``root`` that ``mode=evaluate`` uses, and what to call them.

    That is the ``test`` or the ``validation`` set, or, if ``root`` holds class folders instead, all
    images; of these ``split_fraction``, as ``seed`` chooses, is the
    validation set of a run that split them. Labels are places in ``classes``, those of a network,
    by name; an empty tuple stands for the folders' own.

    Raises:
        DataError: a folder is missing, ambiguous, refused by ``FolderSource`` or of no class.
        ConfigError: ``split_fraction`` has no effect.
    """
    base, sets = _sets(root, split_fraction)
    folder = sets.get(evaluate.name, sets.get("test"))
    name = "validation images"
    source: Source
    if folder is not None:
        source = FolderSource(folder)
        if folder != sets.get("val"):
            name = "test images"
    elif evaluate is Evaluate.test:
        raise DataError(
            f"data.evaluate=test: {base} has no folder test; name the folder of the test images "
            "with data.root=FOLDER"
        )
    elif split_fraction is not None:
        source = split(FolderSource(base), split_fraction, seed)[1]
    else:
        source = FolderSource(base)
        name = "images"
    if classes and source.classes != classes:
        if unknown := sorted({*source.classes} - {*classes}):
            raise DataError(
                f"{folder or base}: the network has no class {_told_apart(unknown, classes)}; its "
                f"classes are {listed(classes)}. Rename or remove the folder"
            )
        if absent := sorted({*classes} - {*source.classes}):
            say(f"no images of {len(absent)} of {len(classes)} classes: {listed(absent)}")
        source = Subset(source, np.arange(len(source)), classes)
    return source, name


def _refuse_splits(source: FolderSource) -> None:
    """Refuses class folders whose images all lie in sub-folders of the same names.

    A folder that has all images of a class is passed over.

    Raises:
        DataError: there are such sub-folders, which are classes then.
    """
    inner = []
    for members in by_class(source.labels):
        folders = {os.path.dirname(source.name(i)) for i in members}
        outer = os.path.commonpath(folders)
        if outer in folders:
            return
        inner.append({os.path.relpath(folder, outer).split(os.sep)[0] for folder in folders})
    names = sorted(set.intersection(*inner))
    if len(names) > 1:
        raise DataError(
            f"{source.root}: each of {listed(source.classes)} has the folders {listed(names)}: are "
            "these the classes? Rename two to train and val, or use one: "
            f"{typed('data.root', f'{source.root}/{outer}')} data.split_fraction=0.1"
        )


def cache_root() -> Path:
    """Returns the folder for data that the program makes or fetches, by $WELLFED_CACHE."""
    if own := os.environ.get("WELLFED_CACHE"):
        return Path(own).expanduser()
    # "~" stays of a user without a home and a name: then it is a folder that nobody may write to
    home = Path("/", os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home) / "wellfed"
