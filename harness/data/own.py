"""A data set of the user's: ``data.name=my_module:open_splits`` gives one to train on and one to
validate.

Each is a source (``harness.data.storage.Source``), decoded and augmented as ours are, or a
``torch.utils.data.Dataset`` of (image, label) with transforms of its own. ``docs/adding.md`` has an
example of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from harness.config import ConfigError, DataCache, DataConfig
from harness.data.storage import ArraySource, FolderSource, Source, Subset
from harness.runtime import parts
from harness.runtime.errors import BadSample
from harness.runtime.seeding import seeded

_MEMBERS = ("classes", "labels", "read", "where")  # of a source, besides ``__len__``
_SETS = ("training", "validation")


class OwnSource:
    """A source of the user's, with labels as the feed wants them; ``where`` names it in messages.

    Raises:
        ConfigError: its labels are no places in its classes, one for each sample.
    """

    def __init__(self, given: Any, where: str) -> None:
        self._given = given
        self.classes = tuple(map(str, given.classes))
        labels = np.asarray(given.labels)
        if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
            text = f"{where}: its labels are {_kind(labels)}"
            raise ConfigError(f"{text}; they must be integers, one for each sample")
        if labels.min() < 0 or labels.max() >= len(self.classes):
            raise ConfigError(
                f"{where}: labels from {labels.min()} to {labels.max()} and {len(self.classes)} "
                "classes; a label is a place in classes, from 0"
            )
        self.labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, i: int) -> str:
        """As the user's source names it."""
        return str(self._given.where(i))

    def read(self, i: int) -> tuple[bytes | np.ndarray, int]:
        """What the user's source gives.

        Raises:
            BadSample: it failed, or gave neither bytes nor pixels.
        """
        try:
            content, label = self._given.read(i)
        except (BadSample, MemoryError):
            raise
        except Exception as error:
            raise BadSample(self.where(i), parts.told(error)) from error
        if isinstance(content, np.ndarray):
            is_good = content.dtype == np.uint8 and content.shape[2:] == (3,)
        else:
            is_good = isinstance(content, bytes)
        if is_good:
            return content, int(label)
        raise BadSample(
            self.where(i),
            f"read({i}) gave {_kind(content)}; it must give bytes, or uint8 pixels [H, W, 3]",
        )


class OwnDataset:
    """A ``torch.utils.data.Dataset`` of (image, label), with transforms of its own, for a feed.

    A sample depends on (seed, epoch, index) alone, like every other: while it is made, the global
    random states are its own. Threads share those, so that only processes can serve it.
    """

    def __init__(
        self,
        given: Any,
        where: str,
        classes: tuple[str, ...],
        image_size: int,
        seed: int,
    ) -> None:
        self._given = given
        self._where = where
        self.classes = classes
        self.image_size = image_size
        self.seed = seed

    def __len__(self) -> int:
        return len(self._given)

    def fill(self, epoch: int, index: int, out: np.ndarray) -> int:
        """Write sample ``index`` of ``epoch`` into ``out``, uint8 ``[3, S, S]``; its label.

        Raises:
            BadSample: the data set failed, or gave no image of that size with its label.
        """
        where = f"{self._where}, sample {index}"
        try:
            with seeded(self.seed, epoch, index):
                image, label = self._given[index]
        except MemoryError:  # no sample's fault
            raise
        except Exception as error:
            raise BadSample(where, parts.told(error)) from error
        try:
            out[:] = _pixels(image, self.image_size)
            number = int(label)
        except (ValueError, TypeError) as error:
            raise BadSample(where, str(error)) from error
        if not 0 <= number < len(self.classes):
            reason = f"its label is {number}, and there are {len(self.classes)} classes"
            raise BadSample(where, f"{reason}; they count from 0")
        return number


def open_own(
    data: DataConfig, seed: int, split_seed: int
) -> tuple[Source, Source] | tuple[OwnDataset, OwnDataset]:
    """The training and the validation set that the user's function ``data.name`` opens.

    The function is given ``data`` and ``split_seed``; ``seed`` is the run's.

    Raises:
        ConfigError: the function failed, or did not give two sources or two data sets alike.
    """
    splits = parts.call("data.name", data.name, data, split_seed)
    begin = f"data.name={data.name}:"
    pair = splits
    if hasattr(splits, "train") and hasattr(splits, "val"):
        pair = splits.train, splits.val
    if not isinstance(pair, Sequence) or len(pair) != 2:
        text = f"{begin} returned {_kind(splits)}"
        raise ConfigError(f"{text}; it must return two sets, training and validation")
    if data.cache is not DataCache.none:
        text = f"data.cache={data.cache.name}: has no effect with {data.name}"
        raise ConfigError(f"{text}; set it to none")
    wheres = [f"{begin} the {name} set" for name in _SETS]
    train, val = map(_as_source, pair, wheres)
    if (train is None) != (val is None):
        raise ConfigError(f"{begin} one set is a source, the other is not; return two of a kind")
    if train is not None and val is not None:
        if train.classes != val.classes:
            raise ConfigError(f"{begin} its training and validation set have different classes")
        return train, val
    names = _class_names(splits) or _class_names(pair[0])
    if names is None:
        raise ConfigError(f"{wheres[0]} has no classes; give it an attribute classes, their names")
    first = _as_dataset(pair[0], wheres[0], names, data.image_size, seed)
    second = _as_dataset(pair[1], wheres[1], names, data.image_size, seed)
    return first, second


def _as_source(part: Any, where: str) -> Source | None:
    """``part`` as a source; None where it is to be a data set."""
    if isinstance(part, ArraySource | FolderSource | Subset):
        return part
    if not hasattr(part, "read"):
        return None
    missing = [name for name in _MEMBERS if not hasattr(part, name)]
    if missing:
        text = f"{where} has read and no {', '.join(missing)}"
        raise ConfigError(f"{text}; a source has {', '.join(_MEMBERS)}")
    return OwnSource(part, where)


def _as_dataset(
    part: Any, where: str, classes: tuple[str, ...], image_size: int, seed: int
) -> OwnDataset:
    """``part`` as a data set, of which a sample has been tried."""
    if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
        text = f"{where} is {_kind(part)}"
        raise ConfigError(f"{text}; it must be a source, or have __len__ and __getitem__")
    dataset = OwnDataset(part, where, classes, image_size, seed)
    if not len(dataset):
        raise ConfigError(f"{where} is empty")
    try:
        dataset.fill(0, 0, np.empty((3, image_size, image_size), np.uint8))
    except BadSample as error:
        raise ConfigError(str(error)) from error
    return dataset


def _class_names(part: Any) -> tuple[str, ...] | None:
    """The attribute ``classes`` of ``part``, or of what it is a ``torch.utils.data.Subset`` of."""
    while not hasattr(part, "classes") and hasattr(part, "dataset"):
        part = part.dataset
    return tuple(map(str, part.classes)) if hasattr(part, "classes") else None


def _pixels(image: Any, size: int) -> np.ndarray:
    """``image`` as uint8 ``[3, size, size]``.

    Raises:
        ValueError: it has another size or form, or values that no pixels have.
    """
    if isinstance(image, Image.Image):
        image = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    if isinstance(image, torch.Tensor):
        image = image.detach().numpy()
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[0] not in (1, 3):
        text = f"it gave {_kind(image)}"
        raise ValueError(f"{text}; it must give an image of PIL's, or a tensor [3, S, S]")
    if image.shape[1:] != (size, size):
        text = f"its image has {image.shape[2]}x{image.shape[1]} pixels"
        raise ValueError(f"{text}; set data.image_size to the side that your transforms give")
    if np.issubdtype(image.dtype, np.floating):
        # so that NaN is refused too
        if not (image.min() >= 0 and image.max() <= 1):
            text = f"its values go from {image.min():.3g} to {image.max():.3g}, not 0 to 1"
            raise ValueError(f"{text}; leave Normalize to data.mean and data.std")
        image = np.rint(255 * image)
    elif image.dtype != np.uint8:
        raise ValueError(f"it gave {_kind(image)}; pixels are uint8, or floats from 0 to 1")
    return np.broadcast_to(image, (3, size, size)).astype(np.uint8)


def _kind(value: Any) -> str:
    """What ``value`` is, with the shape of an array."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
