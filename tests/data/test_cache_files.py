"""Opening the decoded cache: place, size, sharing, and no pixel changed."""

from __future__ import annotations

import errno
import fcntl
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oddities
import pytest
import samples
from oddities import Plant
from PIL import Image

from harness.config import AugmentConfig, ConfigError, DataCache, DataConfig, Interpolation
from harness.data import cache, cache_files, download
from harness.data.cache import PixelCache
from harness.data.cache_files import open_caches
from harness.data.datasets import Splits, crop_error, load
from harness.data.decode import DecodeOptions
from harness.data.images import ImageDataset
from harness.data.storage import ArraySource
from harness.feed.order import Order
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime import limits, signals
from harness.runtime.errors import Interrupted

RAM = DataCache.ram
DISK = DataCache.disk


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six training and two validation images, old enough to be kept, and a cache folder."""
    monkeypatch.setattr(cache, "_RACY_S", 0.0)
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
    from harness.data import images as module

    found: list[bytes] = []
    real = module.decode
    monkeypatch.setattr(
        module, "decode", lambda data, options: found.append(data) or real(data, options)
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


@pytest.mark.parametrize("form", [ProcessFeed, ThreadFeed], ids=["processes", "threads"])
def test_a_feed_fills_and_reads_the_cache(
    root: Path, form: type[ProcessFeed] | type[ThreadFeed]
) -> None:
    """Batches of two workers are those of an uncached feed, in both epochs."""
    plain = loaded(root, DataCache.none)
    kept = loaded(root, RAM)
    assert isinstance(kept.train, ImageDataset)
    feed = form(
        kept.train, Order(6, 2, seed=3), samples.settings(2, batch_size=2, start_method="fork")
    )
    try:
        for epoch in range(2):
            feed.set_epoch(epoch)
            expected = batch(plain.train, epoch)
            seen = []
            for found in feed:
                assert np.array_equal(found.images.numpy(), expected[found.indices.numpy()])
                seen += found.indices.tolist()
            assert (sorted(seen), images(kept)) == ([0, 1, 2, 3, 4, 5], 6)
    finally:
        feed.close()


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
    assert "made again" in caplog.text
    # with a longest side, the training images have been looked at
    assert images(changed) == (6 if "cache_max_side" in changes else 0)
    assert len(list((root.parent / "cache/decoded").iterdir())) == 1


def test_a_second_run_only_reads(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While one run fills the file, another takes what is there, and adds nothing."""
    first = loaded(root, DISK)
    batch(first.val, 0)
    second = loaded(root, DISK)
    assert "another process fills it; what is in it is used, nothing is added" in caplog.text
    assert np.array_equal(batch(second.train, 0), batch(loaded(root, DataCache.none).train, 0))
    assert images(first) == images(second) == 2
    batch(first.train, 0)
    assert images(second) == 8
    # of the room that the first needs
    assert images(loaded(root, DISK, cache_gb=1e6)) == 8
    other = loaded(root, DISK, exif_orientation=True)
    assert kept_by(other) is None
    assert "another process fills it; of other pixels: nothing is kept in this run" in caplog.text
    advice = "free space, set WELLFED_CACHE to another folder, or use data.cache=ram"
    with pytest.raises(ConfigError, match=rf"^data\.cache=disk: .* process fills it; {advice}$"):
        loaded(root, DISK, cache_max_side=50)  # without the cache its images would be larger


def test_a_second_run_waits_until_the_file_is_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes while the first run makes the file has it as well."""
    came = threading.Event()
    seconds = []
    set_budget = cache.set_budget
    flock = fcntl.flock
    late = threading.Thread(target=lambda: seconds.append(loaded(root, DISK)))

    def slow_set_budget(*args: Any) -> None:
        late.start()
        assert came.wait(60)
        set_budget(*args)

    def told_flock(fd: Any, how: int) -> None:
        if threading.current_thread() is late:
            came.set()
        flock(fd, how)

    monkeypatch.setattr(cache, "set_budget", slow_set_budget)
    monkeypatch.setattr(fcntl, "flock", told_flock)
    first = loaded(root, DISK)
    late.join()
    batch(first.train, 0)
    assert images(first) == images(seconds[0]) == 6


def test_room_of_changed_files_is_given_back(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file mostly of changed images is made again when a run opens it next."""

    def kept_after_a_run() -> int:
        splits = loaded(root, DISK, cache_gb=7e-5)
        batch(splits.train, 0)
        batch(splits.val, 0)
        return images(splits)

    assert kept_after_a_run() == 8
    for image in root.glob("*/*/*.*"):
        os.utime(image, (1e9, 1e9))
    assert kept_after_a_run() < 2
    assert "made again" not in caplog.text
    assert [kept_after_a_run(), kept_after_a_run()] == [8, 8]
    assert caplog.text.count("made again") == 1


def test_a_folder_that_cannot_be_written_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished cache may lie where this run may not write."""
    first = loaded(root, DISK)
    batch(first.train, 0)
    del first
    real = cache_files.open_regular

    def read_only(path: Path, flags: int = os.O_RDONLY) -> int:
        if flags != os.O_RDONLY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(cache_files, "open_regular", read_only)
    second = loaded(root, DISK)
    assert images(second) == 6
    batch(second.val, 0)
    assert images(second) == 6


def test_a_cache_that_cannot_be_written_is_refused(root: Path) -> None:
    """With no cache there, and none to be made, the setting has no effect."""
    (root.parent / "cache").mkdir()
    (root.parent / "cache/decoded").write_text("in the way")
    with pytest.raises(
        ConfigError,
        match=r"^data\.cache=disk: .*decoded/.*; free space, set WELLFED_CACHE to another folder",
    ):
        loaded(root, DISK)


@pytest.mark.parametrize(("is_full", "cache_gb"), [(True, 0.001), (False, 1e6)])
def test_a_cache_that_could_not_be_made_leaves_nothing(
    root: Path,
    is_full: bool,
    cache_gb: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next run takes no empty file for a damaged one."""

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if is_full:
            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError):
            loaded(root, DISK, cache_gb=cache_gb)
    assert list((root.parent / "cache/decoded").iterdir()) == []
    loaded(root, DISK)
    assert caplog.text == ""


def test_half_of_the_memory_is_the_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the cache takes half of what all ranks may take together."""
    found = replace(limits.measure(), memory_bytes=10_000_000)
    monkeypatch.setattr(cache_files.limits, "measure", lambda: found)
    kept = kept_by(loaded(root, RAM, cache_gb=None))
    assert kept is not None
    assert kept.stats()["limit"] == 5_000_000
    with pytest.raises(
        ConfigError,
        match=r"data\.cache_gb=0\.02: only 0\.0 GB are free \(of memory: .*\); lower it",
    ):
        loaded(root, RAM, cache_gb=0.02)


def test_half_of_the_free_disk_is_the_most(root: Path) -> None:
    """What the file has already counts as free, so that the next run has as much."""
    free = os.statvfs(root)
    for _ in range(2):
        kept = kept_by(loaded(root, DISK, cache_gb=None))
        assert kept is not None
        assert kept.stats()["limit"] == pytest.approx(free.f_bavail * free.f_frsize / 2, rel=0.05)
        del kept
    with pytest.raises(
        ConfigError,
        match=r"data\.cache_gb=1e\+06: only .* GB are free \(on the disk of .*decoded\); lower it",
    ):
        loaded(root, DISK, cache_gb=1e6)


def test_a_file_that_is_too_large_is_not_cut(root: Path) -> None:
    """A limit below what is there already is for the user to decide."""
    first = loaded(root, DISK)
    batch(first.train, 0)
    del first
    with pytest.raises(
        ConfigError,
        match=r"data\.cache_gb=1e-05: .* has 0\.0 GB already; raise it, or delete that file",
    ):
        loaded(root, DISK, cache_gb=1e-5)


def test_pixels_in_memory_need_no_cache() -> None:
    """Arrays have nothing to decode."""
    source = ArraySource(np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2), ["a"], "zeros")
    data = DataConfig(name="zeros", cache=RAM)
    with pytest.raises(ConfigError, match=r"data\.cache=ram: has no effect with data=zeros"):
        open_caches((source, source), data, DecodeOptions(), lambda value: [value])


def test_a_hidden_proc_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is opened again by a path in /proc."""
    monkeypatch.setattr(cache_files.os.path, "exists", lambda path: "/proc" not in path)
    with pytest.raises(ConfigError, match=r"data\.cache=ram: needs /proc, which is hidden"):
        loaded(root, RAM)


@pytest.mark.parametrize("name", ["digits", "cifar10", "fake"])
def test_a_cache_without_effect_is_refused(name: str) -> None:
    """So do the data sets that hold pixels, or numbers alone."""
    with pytest.raises(
        ConfigError, match=rf"^data\.cache=ram has no effect with data={name}; leave it out"
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
    for rank, cache_gb in ((ranks.first, 1e6), (ranks.second, 0.001)):
        with pytest.raises(ConfigError, match=r"^data\.cache_gb=1e\+06: only .* GB are free"):
            loaded(root, RAM, rank, cache_gb=cache_gb)


def test_shrunk_images_say_how_far_they_change(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change by a longest side is measured and told; later epochs are equal."""
    kept = loaded(root, RAM, cache_max_side=32)
    out = capsys.readouterr().out
    assert isinstance(kept.train, ImageDataset)
    error = crop_error(kept.train)
    assert (
        "data.cache_max_side=32: crops of some training images change by "
        f"{error:.2f} grey levels a pixel"
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
    assert "made again" in caplog.text
    assert not np.array_equal(batch(other.train, 0), pixels)
    assert images(other) == 6


def test_images_that_are_small_enough_do_not_change(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longest side that no image exceeds changes nothing."""
    loaded(root, RAM, cache_max_side=64)
    assert "crops of some training images change by 0.00 grey" in capsys.readouterr().out


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
    (told,) = (text for text in caplog.messages if str(place) in text)
    assert told.startswith(f"{place}: ") and "made a" in told


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


@pytest.mark.timeout(60)
@oddities.every
def test_an_odd_turn_gives_way(root: Path, plant: Plant, caplog: pytest.LogCaptureFixture) -> None:
    """Anything may lie in place of the lock: nobody waits for it, nothing is lost."""
    turn = root.parent / "cache/decoded/opening"
    oddities.put(plant, turn)
    found = loaded(root, DISK)
    batch(found.train, 0)
    assert images(found) == 6 and oddities.untouched(turn)
    assert [text for text in caplog.messages if str(turn) in text] in (
        [],
        [f"{turn}: not a regular file: made again"],
    )


def test_a_turn_that_is_not_given_up_is_waited_for_aloud(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that waits for a stopped one says so, and a signal ends the wait."""
    turn = root.parent / "cache/decoded/opening"
    turn.parent.mkdir(parents=True)
    looks = iter(range(10_000))

    def check() -> None:
        # the first ones are in the listing of folders
        if next(looks) == 50:
            raise Interrupted(15)

    monkeypatch.setattr(download, "_POLL_S", 0.001)
    with turn.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr(signals, "check", check)
        with pytest.raises(Interrupted):
            loaded(root, DISK)
    assert f"Waiting for the process that holds {turn}" in capsys.readouterr().out


def test_a_turn_is_not_waited_for_without_end(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its time a run reads what there is, and says why it adds nothing."""
    first = loaded(root, DISK)
    batch(first.train, 0)
    del first
    monkeypatch.setattr(cache_files, "_WAIT_S", 0.0)
    with (root.parent / "cache/decoded/opening").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert images(loaded(root, DISK)) == 6
    assert (
        "still held by another process after 0 s; what is in it is used, nothing is added"
        in caplog.text
    )
