"""Opening the decoded cache: place, size, sharing, and no pixel changed."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oddities
import pytest
from oddities import Plant
from PIL import Image

from harness.config import AugmentConfig, ConfigError, DataCache, DataConfig, Interpolation
from harness.data import cache
from harness.data.cache import PixelCache, open_caches
from harness.data.datasets import ImageDataset, Splits, crop_error, load
from harness.data.storage import ArraySource
from harness.runtime import limits

RAM = DataCache.ram
DISK = DataCache.disk


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six training and two validation images, and a cache folder."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for part, name, count in (
        ("train", "cat", 3),
        ("train", "dog", 3),
        ("val", "cat", 1),
        ("val", "dog", 1),
    ):
        (tmp_path / "set" / part / name).mkdir(parents=True)
        for i in range(count):
            image = Image.fromarray(rng.integers(0, 256, (40 + i, 60, 3), dtype=np.uint8))
            image.save(tmp_path / "set" / part / name / f"{i}.{'png' if i else 'jpg'}")
    return tmp_path / "set"


def loaded(
    root: Path,
    kind: DataCache,
    gathered: Callable[[Any], list[Any]] = lambda value: [value],
    **changes: Any,
) -> Splits:
    settings = {"cache_gb": 0.001, **changes}
    if kind is DataCache.none:
        settings["cache_gb"] = None
    return load(
        DataConfig(name="imagefolder", root=str(root), image_size=24, cache=kind, **settings),
        AugmentConfig(),
        0,
        gathered,
    )


def batch(dataset: object, epoch: int) -> np.ndarray:
    """A whole set, filled in order: uint8 ``[N, 3, S, S]`` in channels_last memory."""
    assert isinstance(dataset, ImageDataset)
    out = np.empty((len(dataset), 24, 24, 3), np.uint8).transpose(0, 3, 1, 2)
    for i in range(len(dataset)):
        dataset.fill(epoch, i, out[i])
    return out


def kept_by(splits: Splits) -> PixelCache | None:
    found = splits.train.cache  # type: ignore[union-attr]
    assert found is None or isinstance(found, PixelCache)
    return found


def images(splits: Splits) -> int:
    found = kept_by(splits)
    assert found is not None
    return found.stats()["images"]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The content of the files that are decoded."""
    from harness.data import datasets as module

    found: list[bytes] = []
    real = module.decoded
    monkeypatch.setattr(
        module, "decoded", lambda data, options: found.append(data) or real(data, options)
    )
    return found


@pytest.mark.parametrize("kind", [RAM, DISK], ids=["ram", "disk"])
def test_a_cache_changes_no_pixel(root: Path, kind: DataCache, decoded: list[bytes]) -> None:
    """Every epoch has the pixels of one that decodes everything; only the first of them decodes."""
    plain = loaded(root, DataCache.none)
    kept = loaded(root, kind)
    for epoch in range(3):
        for name in ("train", "val"):
            expected = batch(getattr(plain, name), epoch)
            before = len(decoded)
            assert np.array_equal(batch(getattr(kept, name), epoch), expected)
            assert len(decoded) - before == (len(expected) if epoch == 0 else 0)
    assert images(kept) == 8


def test_without_a_cache_there_is_none(root: Path) -> None:
    """By default nothing is kept, in memory or on disk."""
    assert kept_by(loaded(root, DataCache.none)) is None
    assert not (root.parent / "cache/decoded").exists()


def test_workers_share_the_memory(root: Path) -> None:
    """A pickled data set has the same cache, and takes no image along."""
    kept = loaded(root, RAM)
    sent = pickle.dumps(kept.train)
    batch(pickle.loads(sent), 0)
    assert images(kept) == 6
    assert len(sent) < 5000


def test_memory_that_the_cache_will_fill_is_reserved(root: Path) -> None:
    """Memory still to be filled is promised; filled memory and a disk's are not."""
    kept = loaded(root, RAM, cache_gb=0.01)
    before = kept.reserved_bytes
    batch(kept.train, 0)
    assert 9e6 < before <= 1e7
    assert kept.reserved_bytes < before - 6 * 3000
    assert loaded(root, DISK).reserved_bytes == loaded(root, DataCache.none).reserved_bytes == 0


def test_the_next_run_finds_the_disk(
    root: Path, decoded: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Pixels on the disk outlive the run, and the next one decodes nothing."""
    first = loaded(root, DISK)
    expected = batch(first.train, 0)
    del first
    decoded.clear()
    second = loaded(root, DISK, split_fraction=None)
    assert np.array_equal(batch(second.train, 0), expected)
    assert decoded == []
    assert "decoded cache: 6 of 8 images" in capsys.readouterr().out


def add(root: Path) -> dict[str, Any]:
    (root / "train/cat/9.jpg").write_bytes((root / "train/cat/0.jpg").read_bytes())
    return {}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda root: {"exif_orientation": True}, id="exif"),
        pytest.param(lambda root: {"background": (0, 0, 0)}, id="background"),
        pytest.param(lambda root: {"max_pixels": 10_000}, id="limit"),
        pytest.param(lambda root: {"cache_max_side": 50}, id="longest side"),
        pytest.param(add, id="another file"),
    ],
)
def test_other_pixels_take_the_place_of_the_first(
    root: Path, change: Callable[[Path], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """What the pixels or their order depend on replaces the file by another."""
    first = loaded(root, DISK)
    batch(first.train, 0)
    del first
    changes = change(root)
    changed = loaded(root, DISK, **changes)
    assert "rebuilding" in caplog.text
    # with a longest side, the training images have been looked at
    assert images(changed) == (6 if "cache_max_side" in changes else 0)
    assert len(list((root.parent / "cache/decoded").iterdir())) == 1


def test_a_second_run_only_reads(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It uses all images that the first run has written, and those written meanwhile; with other
    settings, it decodes all itself, and still shrinks.
    """
    first = loaded(root, DISK)
    batch(first.val, 0)
    second = loaded(root, DISK)
    kept = kept_by(second)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert images(second) == 2
    batch(first.train, 0)
    plain = batch(loaded(root, DataCache.none).train, 0)
    assert kept is not None and all(kept.get(i) is not None for i in range(6))
    assert np.array_equal(batch(second.train, 0), plain)
    smaller = loaded(root, DISK, cache_max_side=50)
    batch(smaller.train, 0)
    assert images(smaller) == 0
    in_memory = loaded(root, RAM, cache_max_side=50)
    assert np.array_equal(batch(smaller.train, 0), batch(in_memory.train, 0))
    # a reader changes nothing, and does not keep the next run from writing
    del first
    assert images(loaded(root, DISK)) == 8


def test_a_cache_that_cannot_be_written_is_refused(root: Path) -> None:
    """With no cache there, and none to be made, the setting has no effect."""
    (root.parent / "cache").mkdir()
    (root.parent / "cache/decoded").write_text("in the way")
    with pytest.raises(
        ConfigError,
        match=r"^data\.cache=disk: .*decoded/.*; free space, set WELLFED_CACHE to ",
    ):
        loaded(root, DISK)


def test_a_cache_that_could_not_be_made_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next run takes no empty file for a damaged one."""

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError):
            loaded(root, DISK)
    loaded(root, DISK)
    assert caplog.text == ""


def test_half_of_the_memory_is_the_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the cache takes half of what all ranks may take together."""
    found = replace(limits.measure(), memory_bytes=10_000_000)
    monkeypatch.setattr(cache.limits, "measure", lambda: found)
    kept = kept_by(loaded(root, RAM, cache_gb=None))
    assert kept is not None
    assert kept.stats()["limit"] == 5_000_000
    more = kept_by(loaded(root, RAM, cache_gb=0.02))
    assert more is not None and more.stats()["limit"] == 10_000_000


def test_half_of_the_free_disk_is_the_most(root: Path) -> None:
    """What the file has already counts as free, so that the next run has as much."""
    free = os.statvfs(root)
    for _ in range(2):
        kept = kept_by(loaded(root, DISK, cache_gb=None))
        assert kept is not None
        assert kept.stats()["limit"] == pytest.approx(free.f_bavail * free.f_frsize / 2, rel=0.05)
        del kept


def test_pixels_in_memory_need_no_cache() -> None:
    """Arrays have nothing to decode."""
    source = ArraySource(np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2), ["a"], "zeros")
    data = DataConfig(name="zeros", cache=RAM)
    with pytest.raises(ConfigError, match=r"data\.cache=ram\b.*data=zeros"):
        open_caches((source, source), data, lambda value: [value])


@pytest.mark.parametrize("name", ["digits", "cifar10", "fake"])
def test_a_cache_without_effect_is_refused(name: str) -> None:
    """So do the data sets that hold pixels, or numbers alone."""
    with pytest.raises(
        ConfigError, match=rf"^data\.cache=ram has no effect with data={name}; .*leave it out$"
    ):
        load(DataConfig(name=name, cache=RAM), AugmentConfig(), 0)


class Ranks:
    """What two ranks tell each other, the first of which has been there already."""

    def __init__(self, machine: str | None = None) -> None:
        self.told: list[Any] = []
        self.machine = machine

    def first(self, value: Any) -> list[Any]:
        """The first rank, in a process of another number."""
        if isinstance(value[0], str):
            self.told.append((self.machine or value[0], -1))
            return [value]
        self.told.append(value)
        return [value]

    def second(self, value: Any) -> list[Any]:
        """The second rank; this process."""
        return [self.told[0 if isinstance(value[0], str) else 1], value]


@pytest.mark.parametrize("kind", [RAM, DISK], ids=["ram", "disk"])
def test_ranks_of_a_machine_share_a_cache(root: Path, kind: DataCache) -> None:
    """The second rank maps the first one's file, whatever it is, and both fill it."""
    ranks = Ranks()
    first = loaded(root, kind, ranks.first)
    second = loaded(root, kind, ranks.second)
    batch(second.val, 0)
    batch(first.train, 0)
    assert images(first) == images(second) == 8


def test_ranks_of_two_machines_have_a_cache_each(root: Path) -> None:
    """What another machine holds cannot be mapped, nor is it tried."""
    ranks = Ranks("another machine")
    first = loaded(root, RAM, ranks.first)
    second = loaded(root, RAM, ranks.second)
    batch(first.train, 0)
    assert (images(first), images(second)) == (6, 0)


@pytest.mark.parametrize("machine", [None, "another machine"], ids=["one machine", "two machines"])
def test_what_one_rank_is_refused_all_are(root: Path, machine: str | None) -> None:
    """No rank goes on, to wait for one that ended."""
    ranks = Ranks(machine)
    cache_root = root.parent / "cache"
    cache_root.mkdir()
    (cache_root / "decoded").touch()
    with pytest.raises(ConfigError, match=r"^data\.cache=disk: "):
        loaded(root, DISK, ranks.first)
    (cache_root / "decoded").unlink()
    with pytest.raises(ConfigError, match=r"^data\.cache=disk: "):
        loaded(root, DISK, ranks.second)


def test_shrunk_images_say_how_far_they_change(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change by a longest side is measured and told; later epochs are equal."""
    kept = loaded(root, RAM, cache_max_side=32)
    out = capsys.readouterr().out
    assert isinstance(kept.train, ImageDataset)
    error = crop_error(kept.train)
    assert (
        f"data.cache_max_side=32: training crops change by {error:.2f} gray levels per pixel"
    ) in out
    plain = loaded(root, DataCache.none)
    assert 1 < error < 80
    first = batch(kept.train, 0)
    assert images(kept) == 6
    assert np.array_equal(batch(kept.train, 0), first)
    assert not np.array_equal(first, batch(plain.train, 0))


def test_only_shrunk_images_depend_on_the_filter(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another data.interpolation finds what is kept whole, and makes shrunk images again."""
    bicubic = Interpolation.bicubic
    first = loaded(root, DISK)
    batch(first.train, 0)
    del first
    assert images(loaded(root, DISK, interpolation=bicubic)) == 6
    small = loaded(root, DISK, cache_max_side=32)
    pixels = batch(small.train, 0)
    del small
    other = loaded(root, DISK, cache_max_side=32, interpolation=bicubic)
    assert "rebuilding" in caplog.text
    assert not np.array_equal(batch(other.train, 0), pixels)
    assert images(other) == 6


def test_images_that_are_small_enough_do_not_change(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longest side that no image exceeds changes nothing."""
    loaded(root, RAM, cache_max_side=64)
    assert "training crops change by 0.00 gray" in capsys.readouterr().out


@pytest.mark.timeout(60)
@oddities.every
def test_an_odd_cache_is_made_again(
    root: Path, plant: Plant, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever lies in the place of the pixels gives way, with one warning."""
    first = loaded(root, DISK)
    expected = batch(first.train, 0)
    del first
    place = next(path for path in (root.parent / "cache/decoded").iterdir() if not path.suffix)
    oddities.put(plant, place)
    second = loaded(root, DISK)
    assert np.array_equal(batch(second.train, 0), expected)
    assert images(second) == 6 and oddities.untouched(place)
    told = [text for text in caplog.messages if str(place) in text]
    # an empty file is as good as none
    assert len(told) <= 1 and all("rebuilding" in text for text in told)


def test_pixels_of_another_folder_are_not_used(root: Path) -> None:
    """Not even of equal names, sizes and times: a cache under another's name is made again."""
    other = root.with_name("other")
    for path in root.rglob("*.*"):
        Image.new("RGB", (9, 9)).save(path, "bmp")
        there = other / path.relative_to(root)
        there.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), "white").save(there, "bmp")
        for each in (path, there):
            os.utime(each, (1e9, 1e9))
    first = loaded(root, DISK)
    assert not batch(first.train, 0).any()
    del first
    decoded = root.parent / "cache/decoded"
    (place,) = (path for path in decoded.iterdir() if not path.suffix)
    assert (batch(loaded(other, DISK).train, 0) == 255).all()
    (theirs,) = {path for path in decoded.iterdir() if not path.suffix} - {place}
    shutil.copyfile(place, theirs)
    assert (batch(loaded(other, DISK).train, 0) == 255).all()
