"""Defines sample sources: folders of files, arrays, and subsets of either."""

from __future__ import annotations

import math
import mmap
import os
import random
import unicodedata
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..config import ConfigError, Evaluate
from ..monitor.console import say
from ..runtime.errors import BadSample, DataError, is_out_of_memory, listed, printable
from ..runtime.files import natural, read_regular
from ..runtime.folder import check_folder, log
from ..runtime.seeding import order_rng
from ..suggestions import shell_word, typed
from .decode import way_to_read
from .folder_index import Index, listing, open_index
from .folds import Fold, HeldOut, dealt

# size limit of a file; larger files are not images and could exhaust memory
_MOST_BYTES = 1 << 30
# fixed, because the run's seed must not move images from training to validation
SPLIT_SEED = 0


class Source(Protocol):
    """A dataset; ``labels``, int64 ``[N]``, are indices into the names ``classes``."""

    classes: tuple[str, ...]

    @property
    def labels(self) -> np.ndarray:
        """The labels."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """Returns bytes or uint8 pixels ``[H, W, 3]`` and the label; raises BadSample."""

    def where(self, i: int) -> str:
        """Returns the location of sample ``i``, for messages."""


class FileSource:
    """The image files below ``root`` that ``index`` lists."""

    # the table column with the image paths
    key = "path"

    def __init__(self, root: str, index: Index) -> None:
        self.root = root
        self.index = index
        self.classes = tuple(map(os.fsdecode, index.folders))

    @property
    def labels(self) -> np.ndarray:
        """The images' indices into ``classes``, int64 ``[N]``, memory-mapped."""
        return self.index.labels

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        """Returns the path; non-UTF-8 bytes are escaped as in ``os.fsdecode``."""
        return os.path.join(self.root, self.classes[self.labels[i]], self.index.name(i))

    def name(self, i: int) -> str:
        """Returns the path relative to ``root``, with the same escapes."""
        return os.path.relpath(self.where(i), self.root)

    def digest(self) -> bytes:
        """Returns a 32-byte digest of the images' paths and labels."""
        return self.index.digest()

    def state(self, i: int) -> tuple[object, ...]:
        """Returns values that change with the file's content.

        Raises:
            OSError: the file is missing.
        """
        status = os.stat(self.where(i))
        return status.st_size, status.st_mtime_ns

    def read(self, i: int) -> tuple[bytes, int]:
        """Returns the file's bytes and its label.

        Raises:
            BadSample: the file is missing or unreadable.
        """
        try:
            return read_regular(self.where(i), _MOST_BYTES), int(self.labels[i])
        except OSError as error:
            if is_out_of_memory(error):
                raise
            raise BadSample(self.where(i), f"cannot be read: {error.strerror or error}") from error


class FolderSource(FileSource):
    """The images below ``root`` in one folder per class, ``root/class/**/file``, by name.

    If ``flat``, all images below ``root`` (or ``root`` itself, if it is an image) belong to one
    unnamed class.

    Links are followed. Hidden and system files, broken or circular links, folders with image
    suffixes and non-images are skipped and counted by reason. The listing is cached (``Index``).

    Raises:
        DataError: ``root`` is missing, has no images, has a class without images, or is partly
            unreadable.
    """

    def __init__(self, root: str | os.PathLike[str], flat: bool = False) -> None:
        root = os.path.abspath(root)
        is_file = flat and os.path.isfile(root)
        if not is_file:
            check_folder(root)
        path = os.fsencode(root)
        index = listing(path) if flat else open_index(path, cache_root() / "index")
        super().__init__(os.path.dirname(root) if is_file else root, index)
        left_out = index.left_out()
        # upper-case reasons are formats
        if advice := way_to_read([reason for reason in index.skipped if reason.isupper()]):
            left_out += f"; {advice}"
        if left_out:
            log.warning("%s: left out: %s", printable(self.root), left_out)
        filled = {self.classes[label] for label in np.unique(self.labels)}
        empty = [name for name in self.classes if name not in filled]
        if empty or not filled:
            what = f"no images in {listed(empty)}" if any(empty) else "no images"
            raise DataError(
                f"{self.root}: {what} (skipped: {left_out or 'nothing'}). Training needs one "
                "image folder per class; images for prediction can be anywhere in the folder"
            )


class ArraySource:
    """Pixels in memory: ``images``, uint8 ``[N, H, W, 3]``, with integer ``labels``, ``[N]``."""

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
        # a slice of a map reports the offset of the whole map, so it is pickled as a copy
        if not (
            isinstance(images, np.memmap)
            and isinstance(images.base, mmap.mmap)
            and images.flags.c_contiguous
        ):
            return self.__dict__
        # workers map the file, because a pickled map would copy all pixels
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

    Labels are indices into ``classes``, which contains all source classes and defaults to them.
    """

    def __init__(
        self, source: Source, indices: np.ndarray, classes: tuple[str, ...] | None = None
    ) -> None:
        self.source = source
        self.indices = indices
        self.labels = source.labels[indices]
        self.classes = classes or source.classes
        if classes is not None:
            places = {name: place for place, name in enumerate(classes)}
            # classes in other parts may be missing
            self.labels = np.array([places.get(name, -1) for name in source.classes])[self.labels]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def blocks(self) -> np.ndarray:
        """The samples' blocks, int32 ``[N]``; raises AttributeError if the source has none."""
        source: Any = self.source
        return np.asarray(source.blocks[self.indices])

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """Returns the content that ``source`` reads, and the label."""
        return self.source.read(int(self.indices[i]))[0], int(self.labels[i])

    def expect(self, rows: np.ndarray, room: int) -> int:
        """Announces samples to ``source``, which reads ahead; returns their number of bytes."""
        source: Any = self.source
        wanted: int = source.expect(self.indices[rows], room)
        return wanted

    def where(self, i: int) -> str:
        """Returns the location in ``source``."""
        return self.source.where(int(self.indices[i]))

    def state(self, i: int) -> tuple[object, ...]:
        """Returns the state of the sample in ``source``, if it has files."""
        source: Any = self.source
        state: tuple[object, ...] = source.state(int(self.indices[i]))
        return state


def undivided(source: Source) -> Source:
    """Returns the source that ``source`` is a subset of, or ``source`` itself."""
    while isinstance(source, Subset):
        source = source.source
    return source


def by_class(labels: np.ndarray, classes: int = 0) -> list[np.ndarray]:
    """Returns the sorted int64 indices for each label, for at least ``classes`` labels."""
    counts = np.bincount(labels, minlength=classes)
    return np.split(np.argsort(labels, kind="stable"), counts.cumsum()[:-1])


def split(
    source: Source, held_out: float | Fold, seed: int, groups: np.ndarray | None = None
) -> tuple[Subset, Subset]:
    """Splits ``source`` into two parts using ``seed``.

    The second part is the fraction or fold ``held_out`` of every class. Images with the same number
    in ``groups``, int64 ``[N]``, stay together.

    Raises:
        DataError: a class cannot be in both parts.
    """
    labels = source.labels
    places = by_class(labels, len(source.classes))
    together = np.arange(len(labels)) if groups is None else groups
    apart = [len(np.unique(together[each])) for each in places]
    for name, members, count in zip(source.classes, places, apart, strict=True):
        if count < 2:
            of = "" if groups is None else " in one group"
            raise DataError(
                f"class {name} has only {len(members)} training images{of}, too few to split for "
                "validation; add images, leave the class out, or merge it with another"
            )
    if isinstance(held_out, float) and groups is None:
        rng = random.Random(seed)
        chosen = np.zeros(len(source), dtype=bool)
        for members in places:
            count = min(max(1, round(len(members) * held_out)), len(members) - 1)
            chosen[members[rng.sample(range(len(members)), count)]] = True
    else:
        if isinstance(held_out, float):
            chosen = dealt(labels, together, np.array([1 - held_out, held_out]), seed) == 1
        else:
            fold, folds = held_out
            chosen = dealt(labels, together, np.full(folds, 1 / folds), seed) == fold
    if not 0 < np.count_nonzero(chosen) < len(chosen):
        part = "training" if chosen.any() else "validation"
        raise DataError(
            f"{_setting(held_out)} leaves no {part} images: too few images or groups; set "
            f"data.split_fraction={math.ceil(100 / min(apart)) / 100:g} instead"
        )
    absent = np.flatnonzero(np.bincount(labels[chosen], minlength=len(source.classes)) == 0)
    if len(absent):
        names = listed([source.classes[place] for place in absent])
        log.warning("no validation images in class %s: too few images or groups", names)
    if groups is not None:
        count, held = (len(np.unique(groups[own])) for own in (~chosen, chosen))
        say(f"groups: {count} in training, {held} in validation, none in both")
    return Subset(source, np.flatnonzero(~chosen)), Subset(source, np.flatnonzero(chosen))


def part(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns sorted int64 indices of a ``fraction`` of each class, drawn with ``seed``.

    Every class keeps at least one image, and larger fractions contain smaller ones.
    """
    rng = order_rng(seed, 0)
    kept = [rng.permutation(own)[: max(1, round(fraction * len(own)))] for own in by_class(labels)]
    return np.sort(np.concatenate(kept))


def evenly_spaced(length: int, most: int) -> list[int]:
    """Returns at most ``most`` evenly spaced indices below ``length``, including both ends."""
    return [int(place) for place in np.linspace(0, length - 1, min(length, most))]


def open_folder_splits(root: str | os.PathLike[str], held_out: HeldOut) -> tuple[Source, Source]:
    """Returns the training and validation sets below ``root``.

    These are either ``root/train`` or ``training`` with ``val``, ``valid`` or ``validation`` (if
    none exists, ``test`` or ``testing``), in any case, or one tree of class folders, of which
    ``held_out`` is drawn for validation.

    Raises:
        DataError: a folder is missing, ambiguous or rejected by ``FolderSource``, or the classes
            differ.
        ConfigError: ``held_out`` is given, but ``root`` has both folders.
    """
    base, sets = find_sets(root, held_out)
    kept = sets.get("train")
    validates = sets.get("val", sets.get("test"))
    # without a validation folder, Train may be a class
    if not kept or not (validates or kept.name == "train"):
        found = sorted(base.glob("[!.]*/"))
        _refuse_level(base, found, held_out)
        whole = FolderSource(base)
        _refuse_splits(whole)
        if held_out is None:
            raise DataError(
                f"{base} has no train folder (found: {listed([path.name for path in found])}); "
                "if these are classes, set data.split_fraction=0.1"
            )
        _look_at_classes(whole)
        return split(whole, held_out, SPLIT_SEED)
    instead = f"hold out a part of {kept.name}: {typed('data.root', kept)} data.split_fraction=0.1"
    if not validates:
        raise DataError(f"{base} has no val folder next to {kept.name}; add one, or {instead}")
    tell_of_test(sets)
    train = FolderSource(kept)
    try:
        val = FolderSource(validates)
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
            f"the training and validation sets have different classes: {'; '.join(only)}"
        )
    _look_at_classes(train)
    return train, val


def _refuse_level(base: Path, folders: list[Path], held_out: HeldOut) -> None:
    """Rejects a folder if sets are in one of its ``folders``, next to it or next to its parent.

    Raises:
        DataError: sets were found there.
    """
    # training on one part may be intended
    above = base.parents[:2] if held_out is None else ()
    for place in (*folders, *above):
        sets: dict[str, Path] = {}
        with suppress(DataError):
            sets = find_sets(place, None)[1]
        if "train" in sets and len(sets) > 1:
            found = " and ".join(path.name for path in sets.values())
            unset = f" {_setting(held_out).partition('=')[0]}=null" if held_out else ""
            raise DataError(
                f"{base} has no train folder, but {place} has {found}; set "
                f"{typed('data.root', place)}{unset}"
            )


def _told_apart(names: Iterable[str], others: Iterable[str]) -> str:
    """Returns the first few ``names``, escaped if they differ only in invisible characters."""

    def seen(name: str) -> str:
        return "".join(unicodedata.normalize("NFKC", name).casefold().split())

    twins = {*map(seen, others)}
    ordered = sorted(names, key=lambda name: (seen(name) not in twins, name))
    return listed([ascii(name) if seen(name) in twins else repr(name) for name in ordered])


def check_classes(source: Source, where: object) -> None:
    """Warns about classes of ``source`` that the user may not have intended."""
    classes = source.classes
    if len(classes) == 1:
        log.warning("%s has only one class, %r: any prediction is correct", where, classes[0])
    if sorted(classes, key=natural) != [*classes]:
        say(f"classes are sorted as text, not numerically: {listed(classes)}")


def _look_at_classes(source: FolderSource) -> None:
    """Warns about classes of ``source`` that the user may not have intended."""
    check_classes(source, source.root)
    classes = {*source.classes}
    for path in source.index.watched:
        own, *inner = os.path.relpath(path, source.root).split(os.sep)
        if own in classes and (others := classes.intersection(inner) - {own}):
            target = os.path.join(source.root, min(others))
            log.warning(
                "%s: its images belong to class %r, but %r is also a class; to move them there, "
                "run mv -n %s/* %s",
                printable(path),
                own,
                min(others),
                shell_word(path),
                shell_word(target),
            )


def _setting(held_out: float | Fold) -> str:
    """Returns the hold-out setting as typed."""
    if isinstance(held_out, float):
        return f"data.split_fraction={held_out:g}"
    return f"data.fold={held_out.fold}"


def check_unsplit(held_out: HeldOut, sets: Iterable[str], where: object) -> None:
    """Raises ConfigError if ``held_out`` has no effect because ``where`` has its own ``sets``."""
    if held_out is not None:
        raise ConfigError(
            f"{_setting(held_out)} has no effect: {where} has {' and '.join(sets)}; set it to null"
        )


def tell_of_test(sets: Collection[str]) -> None:
    """Says whether the test set, if there is one, is used for validation."""
    if "test" in sets:
        say(
            "the test set is not used. To evaluate it: mode=evaluate model.weights=RUN "
            "data.evaluate=test"
            if "val" in sets
            else "no validation set: the test set is used for validation"
        )


def find_sets(root: str | os.PathLike[str], held_out: HeldOut) -> tuple[Path, dict[str, Path]]:
    """Returns ``root`` as a path, and its folders by set.

    Raises:
        DataError: ``root`` is missing, or two folders could contain the same set.
        ConfigError: ``held_out`` has no effect.
    """
    base = Path(root).expanduser().absolute()
    check_folder(str(base))
    folders = {path.name.lower(): path for path in sorted(base.glob("[!.]*/"))}
    sets: dict[str, Path] = {}
    for names in (("train", "training"), ("val", "valid", "validation"), ("test", "testing")):
        present = [folders[name] for name in names if name in folders]
        if len(present) > 1:
            both = " and ".join(path.name for path in present)
            raise DataError(f"{base}: {both} could both be the {names[-1]} set; keep one")
        if present:
            sets[names[0]] = present[0]
    if "train" in sets and len(sets) > 1:
        check_unsplit(held_out, (path.name for path in sets.values()), base)
    return base, sets


def open_sets(root: str | os.PathLike[str]) -> tuple[Path, dict[str, Source]]:
    """Returns ``root`` as a path, and all images below it by set; "" for a single tree.

    Raises:
        DataError: a folder is missing, ambiguous or rejected by ``FolderSource``.
    """
    base, sets = find_sets(root, None)
    if len(sets) < 2:
        sets = {"": base}
    return base, {name: FolderSource(path) for name, path in sets.items()}


def open_evaluated(
    root: str | os.PathLike[str],
    evaluate: Evaluate,
    held_out: HeldOut,
    classes: tuple[str, ...],
) -> tuple[Source, str]:
    """Returns the images below ``root`` that ``mode=evaluate`` uses, and a name for them.

    These are the ``test`` or ``validation`` set or, if ``root`` contains class folders, all images,
    or those that ``held_out`` drew for validation. Labels are indices into ``classes``, the
    network's class names; an empty tuple selects the folder names.

    Raises:
        DataError: a folder is missing, ambiguous, rejected by ``FolderSource`` or not a class.
        ConfigError: ``held_out`` has no effect.
    """
    base, sets = find_sets(root, held_out)
    folder = sets.get(evaluate.name, sets.get("test"))
    name = "validation images"
    source: Source
    if folder is not None:
        source = FolderSource(folder)
        if folder != sets.get("val"):
            name = "test images"
    elif evaluate is Evaluate.test:
        raise DataError(
            f"data.evaluate=test: {base} has no test folder; specify the folder with test images "
            "with data.root=FOLDER"
        )
    elif held_out is not None:
        source = split(FolderSource(base), held_out, SPLIT_SEED)[1]
    else:
        source = FolderSource(base)
        name = "images"
    return in_classes(source, classes, folder or base), name


def in_classes(source: Source, classes: tuple[str, ...], where: object) -> Source:
    """Returns ``source`` with labels as indices into a network's ``classes``, unless empty.

    Raises:
        DataError: the source has a class that the network lacks.
    """
    if not classes or source.classes == classes:
        return source
    present = {source.classes[label] for label in np.unique(source.labels)}
    if unknown := sorted(present - {*classes}):
        raise DataError(
            f"{where}: the network has no class {_told_apart(unknown, classes)}; its "
            f"classes are {listed(classes)}. Rename or remove that class"
        )
    if absent := sorted({*classes} - present):
        say(f"{len(absent)} of {len(classes)} classes have no images: {listed(absent)}")
    return Subset(source, np.arange(len(source)), classes)


def _refuse_splits(source: FolderSource) -> None:
    """Rejects class folders whose images are all in subfolders with the same names.

    A subfolder that contains all images in a class is ignored.

    Raises:
        DataError: there are such subfolders, which are probably the classes.
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
            f"{source.root}: each of {listed(source.classes)} has the folders {listed(names)}; are "
            "these the classes? Rename two folders to train and val, or use one: "
            f"{typed('data.root', f'{source.root}/{outer}')} data.split_fraction=0.1"
        )


def cache_root() -> Path:
    """Returns the folder for generated and downloaded data, set by $WELLFED_CACHE."""
    if own := os.environ.get("WELLFED_CACHE"):
        return Path(own).expanduser()
    # for a user without a home, "~" remains and the folder cannot be written
    home = Path("/", os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or home) / "wellfed"
