"""Data sets of the user's: two sources, or two of torch's data sets."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from harness.config import AugmentConfig, ConfigError, DataCache, DataConfig
from harness.data.datasets import ImageDataset, Splits, load
from harness.data.decode import decode
from harness.data.own import OwnDataset
from harness.data.storage import ArraySource
from harness.runtime.errors import BadSample
from harness.runtime.seeding import seed_everything

NAME = "mine:open_splits"


class Rows:
    """A source of four rows of pixels, or of what it is told to give."""

    classes = ("a", "b")

    def __init__(self, labels: Any = (0, 1, 1, 0), content: Any = None) -> None:
        self.labels = labels
        self.content = np.zeros((9, 9, 3), np.uint8) if content is None else content

    def __len__(self) -> int:
        return 4

    def read(self, i: int) -> tuple[Any, int]:
        return self.content, self.labels[i]

    def where(self, i: int) -> str:
        return f"row {i}"


class Classless(Rows):
    """A source whose classes are none."""

    classes = None


class Longer(Rows):
    """A source of more samples than labels."""

    def __len__(self) -> int:
        return 5


class Endless:
    """A data set that does not know its length."""

    classes = ("a", "b")

    def __len__(self) -> int:
        raise TypeError("unknown")

    def __getitem__(self, i: int) -> Any:
        raise AssertionError(i)


class Drawn:
    """A data set whose image is one drawn number, by each of the three global generators."""

    classes = ("a", "b")

    def __init__(self, image: Any = None, label: Any = 1, length: int = 6) -> None:
        self.image, self.label, self.length = image, label, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.image, Exception):
            raise self.image
        if self.image is not None:
            return self.image, self.label
        return torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])[
            :, None, None
        ].expand(3, 8, 8), self.label


class Given(Drawn):
    """A data set of one sample."""

    def __init__(self, sample: Any) -> None:
        super().__init__()
        self.sample = sample

    def __getitem__(self, i: int) -> Any:
        return self.sample


class Keeps(Drawn):
    """A data set that draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    def __getitem__(self, i: int) -> Any:
        # the first image is black
        return torch.full((3, 8, 8), i * self.rng.random() / 6), 1


class Unnamed(Drawn):
    """A data set whose classes are none."""

    classes = None  # type: ignore[assignment]


class Pair:
    """Splits as an object."""

    def __init__(self, train: Any, val: Any, **more: Any) -> None:
        self.train, self.val = train, val
        self.__dict__.update(more)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Splits]:
    """Loads what a user's function returns."""

    def load_(splits: Any, **settings: Any) -> Splits:
        monkeypatch.setattr("harness.data.own.user_code.call", lambda *given: splits)
        return load(DataConfig(name=NAME, image_size=8, **settings), AugmentConfig(), 3)

    return load_


def filled(dataset: Any, epoch: int, index: int) -> tuple[np.ndarray, int]:
    """A sample's pixels and label."""
    out = np.zeros((3, 8, 8), np.uint8)
    return out, dataset.fill(epoch, index, out)


def test_a_function_gets_the_settings_and_a_seed(write_module: Callable[[str, str], None]) -> None:
    """It sees data.*, and a seed that is not the run's: a split must not move with that."""
    write_module(
        "mine", "def open_splits(data, seed):\n    raise ValueError(f'{data.root} {seed}')\n"
    )
    with pytest.raises(ConfigError, match=f"^data.name={NAME}: failed with ValueError: /r 0 "):
        load(DataConfig(name=NAME, root="/r"), AugmentConfig(), 3)


@pytest.mark.parametrize(
    "make", [Pair, lambda *both: both, lambda *both: list(both)], ids=["object", "tuple", "list"]
)
def test_sources_are_decoded_and_augmented_as_ours(
    opened: Callable[..., Splits], make: Any
) -> None:
    """Two sources become two of our data sets, with labels as an array."""
    splits = opened(make(Rows(), Rows([1, 1, 1, 0])))
    assert isinstance(splits.train, ImageDataset)
    assert (splits.classes, splits.name, len(splits.val)) == (("a", "b"), NAME, 4)
    assert splits.train.source.labels.tolist() == [0, 1, 1, 0]
    assert filled(splits.val, 0, 0)[1] == 1
    assert isinstance(pickle.loads(pickle.dumps(splits.train)), ImageDataset)


def test_a_source_of_ours_stays_what_it_is(opened: Callable[..., Splits]) -> None:
    """Those are known to the arrays and the cache."""
    source = ArraySource(np.zeros((4, 9, 9, 3), np.uint8), np.zeros(4, int), ["a"], "x")
    train = opened((source, source)).train
    assert isinstance(train, ImageDataset)
    assert train.source is source


@pytest.mark.parametrize(
    "content",
    [np.zeros((9, 9), np.uint8), np.zeros((9, 9, 3)), None, "x"],
    ids=["gray", "float", "ok", "text"],
)
def test_what_a_source_reads_is_checked(opened: Callable[..., Splits], content: Any) -> None:
    """Anything but bytes and uint8 pixels is a bad sample, by the name that the source gives it."""
    train = opened((Rows(content=content), Rows())).train
    if content is None:
        assert filled(train, 0, 1)[1] == 1
        return
    with pytest.raises(
        BadSample,
        match=r"^row 1: read\(1\) .* uint8 pixels \[H, W, 3\]$",
    ):
        filled(train, 0, 1)


class Broken(Rows):
    """A source that fails in its own way."""

    def read(self, i: int) -> Any:
        raise KeyError("no such row")


def test_a_source_that_fails_is_a_bad_sample(opened: Callable[..., Splits]) -> None:
    """A source's error is told in one line, with its place."""
    train = opened((Broken(), Rows())).train
    with pytest.raises(BadSample, match=r"^row 1: KeyError: 'no such row' \(.*test_own.py:\d+\)$"):
        filled(train, 0, 1)


def test_a_sample_follows_from_its_key_alone(
    opened: Callable[..., Splits], kept_globals: None
) -> None:
    """In any order, in any process, and nothing is drawn from the trainer's random states."""
    train = opened((Drawn(), Drawn())).train
    assert isinstance(train, OwnDataset)
    seed_everything(1)
    expected = random.random(), np.random.random(), float(torch.rand(()))
    seed_everything(1)
    first, other, epoch, again = (
        filled(train, *key)[0] for key in ((0, 2), (0, 3), (1, 2), (0, 2))
    )
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected
    assert np.array_equal(first, again)
    assert len({first.tobytes(), other.tobytes(), epoch.tobytes()}) == 3
    assert np.array_equal(filled(pickle.loads(pickle.dumps(train)), 0, 2)[0], first)


@pytest.mark.parametrize(("dataset", "warnings"), [(Keeps, 2), (Drawn, 0)])
def test_a_generator_of_its_own_is_warned_of(
    opened: Callable[..., Splits], caplog: pytest.LogCaptureFixture, dataset: Any, warnings: int
) -> None:
    """Each set whose sample does not follow from its key has a warning, and no other set."""
    with caplog.at_level(logging.WARNING, "wellfed"):
        opened((dataset(), dataset()))
    assert len(caplog.records) == warnings


def test_a_label_that_is_another_one_is_a_bad_sample(opened: Callable[..., Splits]) -> None:
    """What a source reads is what its labels say, or the sample is named."""
    source = Rows()
    train = opened((source, Rows())).train
    assert filled(train, 0, 1)[1] == 1
    source.labels = (0, 1.7, 1, 0)
    with pytest.raises(BadSample, match=r"^row 1: read\(1\) .* 1.7, not 1$"):
        filled(train, 0, 1)


def test_names_on_top_of_the_sets_own(opened: Callable[..., Splits]) -> None:
    """Splits may give readable names to classes that both sets number alike."""
    assert opened(Pair(Drawn(), Drawn(), classes=["cat", "dog"])).classes == ("cat", "dog")
    assert opened((Drawn(), Unnamed())).classes == ("a", "b")
    both = Pair(Drawn(), Drawn(), classes=np.array(["cat", "dog"]))
    both.val.classes = np.array(["a", "b"])
    assert opened(both).classes == ("cat", "dog")


def test_a_label_may_be_text(opened: Callable[..., Splits]) -> None:
    """As a table has it."""
    assert filled(opened((Drawn(label="1"), Drawn())).train, 0, 0)[1] == 1


def test_sets_of_different_classes_are_refused(opened: Callable[..., Splits]) -> None:
    """Of two data sets, whose labels would mean different things."""
    other = Drawn()
    other.classes = ("b", "a")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="different classes$"):
        opened((Drawn(), other))


@pytest.mark.parametrize(
    ("image", "value"),
    [
        pytest.param(Image.new("L", (8, 8), 7), 7, id="gray of PIL's"),
        pytest.param(torch.full((3, 8, 8), 7, dtype=torch.uint8), 7, id="uint8"),
        pytest.param(torch.full((1, 8, 8), 7 / 255), 7, id="gray floats"),
        pytest.param(np.full((3, 8, 8), 1.0), 255, id="numpy's floats"),
    ],
)
def test_an_image_may_have_many_forms(
    opened: Callable[..., Splits], image: Any, value: int
) -> None:
    """PIL's, uint8 or floats from 0 to 1, of one channel or three; the label may be a tensor."""
    out, label = filled(opened((Drawn(image, torch.tensor(0)), Drawn(image))).train, 0, 0)
    assert (label, np.unique(out).tolist()) == (0, [value])


def test_the_classes_may_be_named_in_three_places(opened: Callable[..., Splits]) -> None:
    """On what is returned, on the training set, or on what that is a part of."""
    part = torch.utils.data.Subset(Drawn(), [1, 2])  # type: ignore[arg-type]
    assert opened((part, part)).classes == ("a", "b")
    assert opened(Pair(part, part, classes=["c", "d"])).classes == ("c", "d")
    assert len(opened((part, part)).train) == 2


class Unordered(Rows):
    classes = frozenset(("dark", "light"))


class Texted(Drawn):
    classes = "dark, light"  # type: ignore[assignment]


class Nameless(Drawn):
    classes = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()

    def __getattribute__(self, name: str) -> Any:
        if name == "classes":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Half(Rows):
    def __getattribute__(self, name: str) -> Any:
        if name == "where":
            raise AttributeError(name)
        return super().__getattribute__(name)


MISTAKES: dict[str, Any] = {
    "nothing": (None, {}, "returned NoneType; it must return two sets, training and validation"),
    "one set": ((Rows(),), {}, "returned 1 values; it must return two sets"),
    "of two kinds": ((Rows(), Drawn()), {}, "return two sources"),
    "half": (
        (Half(), Rows()),
        {},
        "the training set: .* AttributeError: where",
    ),
    "odd labels": (
        (Rows(), Rows([0.5, 1, 1, 1])),
        {},
        "the validation set: its labels are float64",
    ),
    "labels from 1": ((Rows([1, 2, 1, 2]), Rows()), {}, "its labels are .* 2 classes"),
    "a number": (
        (Drawn(), 3),
        {},
        "must be a source, or have __len__ and __getitem__: TypeError: object of type 'int'",
    ),
    "empty": ((Drawn(), Drawn(length=0)), {}, "the validation set is empty"),
    "no classes": (
        (Classless(), Rows()),
        {},
        "the training set: a source .* classes, labels, .*: TypeError: 'NoneType' object is",
    ),
    "ragged labels": (
        (Rows(), Rows([[0], [0, 1]])),
        {},
        "the validation set: a source .* classes, labels, .*: ValueError: setting an array",
    ),
    "longer": (
        (Longer(), Rows()),
        {},
        r"the training set: its labels are int64 \[4\], its length is 5",
    ),
    "half a label": (
        (Drawn(label=0.5), Drawn()),
        {},
        "the training set, sample 0: its label is 0.5, not a whole number from 0 to 1",
    ),
    "classes of none": (
        (Unnamed(), Drawn()),
        {},
        "its classes cannot be read: TypeError: 'NoneType' object is not iterable",
    ),
    "unordered source": (
        (Unordered(), Rows()),
        {},
        "its classes cannot be read: TypeError: ",
    ),
    "classes in a text": (
        (Texted(), Drawn()),
        {},
        "its classes cannot be read: TypeError: .* str$",
    ),
    "endless": (
        (Endless(), Drawn()),
        {},
        "the training set must be a source, or have __len__ .*: TypeError: unknown",
    ),
    "negative length": (
        (Drawn(length=-1), Drawn()),
        {},
        "the training set must be a source, or have __len__ .*: ValueError: __len__",
    ),
    "nameless": (
        (Nameless(), Drawn()),
        {},
        "the training set has no classes; ",
    ),
    "size": (
        (Drawn(torch.zeros(3, 9, 8)), Drawn()),
        {},
        r"sample 0: its image is float32 \[3, 9, 8\]; .* 8 x 8, or set data.image_size",
    ),
    "normalized": (
        (Drawn(torch.full((3, 8, 8), -2.0)), Drawn()),
        {},
        "-2 to -2, .*; leave Normalize .*data.mean",
    ),
    "flat": (
        (Drawn(torch.zeros(8, 8)), Drawn()),
        {},
        r"sample 0: .* float32 \[8, 8\]; ",
    ),
    "label": ((Drawn(label=2), Drawn()), {}, "its label is 2, not a whole number from 0 to 1"),
    "dictionary": ((Given({"image": 1, "label": 0}), Drawn()), {}, "a dict of image, label;"),
    "triple": ((Given((torch.zeros(3, 8, 8), 0, "1.png")), Drawn()), {}, " 3 values;"),
    "one-hot": (
        (Drawn(label=torch.eye(2)[1]), Drawn()),
        {},
        r"its label is torch.float32 \[2\]; return",
    ),
    "name": ((Drawn(label="cat"), Drawn()), {}, "its label is str; "),
    "raises": ((Drawn(KeyError("k")), Drawn()), {}, r"sample 0: KeyError: 'k' \(.*test_own.py:"),
}


@pytest.mark.parametrize(("splits", "settings", "error"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(
    opened: Callable[..., Splits], splits: Any, settings: dict[str, Any], error: str
) -> None:
    """It names the function as typed, the set and what is wrong with it, before training."""
    with pytest.raises(ConfigError, match=f"^data.name={NAME}: .*{error}[^\n]*$"):
        opened(splits, **settings)


@pytest.mark.parametrize(
    "splits", [(Rows(), Rows()), (Drawn(), Drawn())], ids=["source", "dataset"]
)
def test_a_cache_has_no_effect(opened: Callable[..., Splits], splits: Any) -> None:
    """It keeps files of folders, and is refused beside anything else."""
    with pytest.raises(
        ConfigError, match=f"^data.cache=ram has no effect with data={NAME}; leave it out$"
    ):
        opened(splits, cache=DataCache.ram)


def test_a_part_of_a_source_is_trained_on(opened: Callable[..., Splits]) -> None:
    """data.fraction takes from the training set alone."""
    splits = opened((Rows(), Rows()), fraction=0.5)
    assert isinstance(splits.train, ImageDataset)
    assert sorted(splits.train.source.labels) == [0, 1]
    assert len(splits.val) == 4
    number = int(splits.train.source.labels[1])
    assert splits.train.source.where(1) in {0: ("row 0", "row 3"), 1: ("row 1", "row 2")}[number]


def test_a_part_of_a_data_set_of_torchs_is_refused(opened: Callable[..., Splits]) -> None:
    """The user's function can give one. Its targets are the labels."""
    with pytest.raises(ConfigError, match=r"data.fraction=0.5: .* Dataset\b.* return a "):
        opened((Drawn(), Drawn()), fraction=0.5)
    whole = Drawn()
    whole.targets = [0, 1, 1, 1, 1, 0]  # type: ignore[attr-defined]
    part = torch.utils.data.Subset(whole, [5, 1])  # type: ignore[arg-type]
    labels = opened((part, Drawn())).labels
    assert labels is not None
    assert labels.tolist() == [0, 1]
    assert opened((Drawn(), Drawn())).labels is None


def odd_image(kind: str) -> tuple[Image.Image, dict[str, Any]]:
    """An image of 8 x 8 pixels that ``convert("RGB")`` changes, and arguments to save it."""
    ramp = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    if kind == "16 bits":
        return Image.fromarray(ramp.astype(np.uint16) * 257), {}
    if kind == "transparent":
        return Image.fromarray(np.dstack([ramp, ramp, ramp, ramp])), {}
    gray = Image.fromarray(ramp)
    if kind == "palette":
        return gray.convert("P"), {"transparency": 3}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return gray, {"exif": exif}


@pytest.mark.parametrize("kind", ["16 bits", "transparent", "palette", "turned"])
def test_images_of_pils_have_the_pixels_of_a_folder(
    opened: Callable[..., Splits], tmp_path: Path, kind: str
) -> None:
    """Of 16 bits, transparent, with a palette or an orientation, by the same settings."""
    image, arguments = odd_image(kind)
    image.save(tmp_path / "1.png", **arguments)
    settings = {"exif_orientation": True, "background": (10, 20, 30)}
    with Image.open(tmp_path / "1.png") as shown:
        splits = opened((Given((shown, 0)), Drawn()), **settings)
    found = np.empty((3, 8, 8), np.uint8)
    splits.train.fill(0, 0, found)  # type: ignore[union-attr]
    expected = decode((tmp_path / "1.png").read_bytes(), DataConfig(**settings))
    assert np.array_equal(found.transpose(1, 2, 0), expected)
