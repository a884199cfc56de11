"""The promises of each backend with workers: the same batches, typed ends, a next pass."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import samples
import torch
from samples import assert_same, passes, primed, random_states

from harness.feed.base import HostBatch
from harness.feed.order import Cursor, Order, ProbeOrder
from harness.feed.processes import ProcessFeed
from harness.feed.threads import ThreadFeed
from harness.runtime.errors import BadSample, LoaderError

LENGTH = 19
ORDER = Order(LENGTH, 4, seed=3)
BACKENDS = {"processes": ProcessFeed, "threads": ThreadFeed}
AnyFeed = ProcessFeed | ThreadFeed
MakeFeed = Callable[..., AnyFeed]

with_and_without_workers = pytest.mark.parametrize("num_workers", [0, 2])
persistent_or_not = pytest.mark.parametrize(
    "persistent_workers", [False, True], ids=["own workers", "persistent"]
)


@pytest.fixture(params=BACKENDS)
def make_feed(request: pytest.FixtureRequest) -> Iterator[MakeFeed]:
    """Makes feeds of each backend."""
    with samples.making(BACKENDS[request.param], LENGTH) as make:
        yield make


def reference(epochs: int = 1, dataset: samples.Noise | None = None) -> list[HostBatch]:
    """The batches that the trainer itself makes."""
    dataset = dataset or samples.Noise(LENGTH)
    return passes(ProcessFeed(dataset, Order(len(dataset), 4, seed=3), samples.settings(0)), epochs)


@with_and_without_workers
def test_a_batch_is_what_the_data_set_fills(make_feed: MakeFeed, num_workers: int) -> None:
    """Images are uint8 [N, 3, S, S] in channels_last memory, labels and indices int64 [N], in the
    order of the epoch.
    """
    feed = make_feed(num_workers)
    dataset = samples.Noise(LENGTH)
    batches = list(feed)
    assert [len(batch.labels) for batch in batches] == [4, 4, 4, 4, 3]
    assert np.array_equal(torch.cat([batch.indices for batch in batches]).numpy(), ORDER.indices(0))
    pixels = np.empty((3, 4, 4), np.uint8)
    for image, label, index in zip(
        batches[1].images, batches[1].labels, batches[1].indices, strict=True
    ):
        assert dataset.fill(0, int(index), pixels) == label
        assert np.array_equal(image.numpy(), pixels)
    assert [tensor.dtype for tensor in batches[0][:3]] == [torch.uint8, torch.int64, torch.int64]
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)
    assert {batch.epoch for batch in batches} == {0}


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "persistent_workers"),
    [
        pytest.param(0, 1, False, id="none"),
        pytest.param(1, 2, False, id="one"),
        pytest.param(2, 2, True, id="two persistent"),
        pytest.param(3, 4, False, id="three with prefetch 4"),
        pytest.param(7, 1, True, id="seven persistent with prefetch 1", marks=pytest.mark.slow),
    ],
)
def test_no_setting_changes_the_pixels(
    make_feed: MakeFeed, num_workers: int, prefetch_factor: int, persistent_workers: bool
) -> None:
    """Two epochs are bitwise those that the trainer makes by itself, whatever the loader settings
    and the backend.
    """
    feed = make_feed(
        num_workers, prefetch_factor=prefetch_factor, persistent_workers=persistent_workers
    )
    assert_same(passes(feed), reference(2))


def test_epochs_differ_in_order_and_in_pixels(make_feed: MakeFeed) -> None:
    """Each epoch draws the same sample anew, and an epoch that is asked for twice is the same
    twice.
    """
    feed = make_feed()
    images = []
    for epoch in (0, 1, 0):
        feed.set_epoch(epoch)
        batches = list(feed)
        order = torch.cat([batch.indices for batch in batches]).argsort()
        images.append(torch.cat([batch.images for batch in batches])[order])
    assert all(not torch.equal(a, b) for a, b in zip(images[0], images[1], strict=True))
    assert torch.equal(images[0], images[2])


@with_and_without_workers
def test_a_probe_s_order_goes_on_where_the_last_one_ended(
    make_feed: MakeFeed, num_workers: int
) -> None:
    """An order without an end is asked for no more than what is given out and ahead; a pass may be
    left at any batch.
    """
    feed = make_feed(num_workers)
    cursor = Cursor()
    feed = type(feed)(samples.Noise(LENGTH), ProbeOrder(ORDER, cursor), feed.settings)
    batches = iter(feed)
    given = [next(batches) for _ in range(7)]
    batches.close()  # type: ignore[attr-defined]
    feed.close()
    wanted = itertools.islice(ProbeOrder(ORDER, Cursor()).batches(0), 7)
    assert all(
        np.array_equal(batch.indices.numpy(), indices)
        for batch, indices in zip(given, wanted, strict=True)
    )
    assert 7 <= cursor.asked <= 7 + max(1, 2 * num_workers)


@with_and_without_workers
def test_a_pass_leaves_the_global_generators_alone(make_feed: MakeFeed, num_workers: int) -> None:
    """Python's, numpy's and torch's global random states are after a pass what they were before."""
    before = random_states()
    list(make_feed(num_workers))
    assert random_states() == before


@with_and_without_workers
def test_a_bad_sample_arrives_as_one(make_feed: MakeFeed, num_workers: int) -> None:
    """BadSample comes with where and reason, after the batches before it."""
    given: list[HostBatch] = []
    with pytest.raises(BadSample, match=r"^cats/7.jpg: empty file$") as caught:
        given.extend(make_feed(num_workers, samples.Troubled(LENGTH, 5, samples.refuse)))
    assert len(given) == np.flatnonzero(ORDER.indices(0) == 5)[0] // 4
    assert (caught.value.where, caught.value.reason) == ("cats/7.jpg", "empty file")


@with_and_without_workers
def test_of_several_bad_samples_the_first_is_told(make_feed: MakeFeed, num_workers: int) -> None:
    """Errors of one batch come in the order of its samples, whoever met them first."""
    with pytest.raises(BadSample, match=f"^sample {ORDER.indices(0)[0]}: refused$"):
        list(make_feed(num_workers, samples.Refused(LENGTH)))


@with_and_without_workers
@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        pytest.param(
            samples.raise_unpicklable, "^sample 5: Local: cannot travel$", id="unpicklable"
        ),
        pytest.param(samples.stop, "^sample 5: StopIteration: ", id="StopIteration"),
    ],
)
def test_any_exception_of_a_sample_is_a_bad_sample(
    make_feed: MakeFeed, num_workers: int, trouble: Callable[[], object], text: str
) -> None:
    """An exception that cannot be pickled, or would end the epoch in silence, is told with its
    sample and type.
    """
    with pytest.raises(BadSample, match=text):
        list(make_feed(num_workers, samples.Troubled(LENGTH, 5, trouble)))


@with_and_without_workers
def test_out_of_memory_is_no_sample_s_fault(make_feed: MakeFeed, num_workers: int) -> None:
    """A MemoryError comes out of next() as itself."""
    with pytest.raises(MemoryError, match="no room"):
        list(make_feed(num_workers, samples.Troubled(LENGTH, 5, samples.exhaust)))


@with_and_without_workers
def test_a_short_epoch_is_an_error(
    make_feed: MakeFeed, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that ends before its last batch raises LoaderError and says how many are missing."""
    feed = make_feed(num_workers)
    monkeypatch.setattr(type(feed), "__len__", lambda feed: 6)
    with pytest.raises(LoaderError, match="ended after 5 of 6 batches"):
        list(feed)


@pytest.mark.parametrize("polled", [False, True], ids=["plain", "polled"])
def test_a_hanging_sample_is_a_loader_error(
    make_feed: MakeFeed, tmp_path: Path, polled: bool
) -> None:
    """No batch within loader.timeout_s names the setting; the worker that
    hangs is not waited for.
    """
    feed = make_feed(
        1, samples.Troubled(LENGTH, 5, partial(samples.wait_for, tmp_path / "open")), timeout_s=0.3
    )
    begin = time.monotonic()
    with pytest.raises(
        LoaderError, match="no batch within loader.timeout_s=0.3: .* loader.num_workers=0"
    ):
        list(feed.polled(0.05) if polled else feed)
    assert time.monotonic() - begin < 5
    (tmp_path / "open").touch()  # a thread goes home


@persistent_or_not
def test_after_an_early_break_the_next_epoch_is_whole(
    make_feed: MakeFeed, persistent_workers: bool
) -> None:
    """Batches that were asked for before a break never show up in the epoch after it."""
    feed = make_feed(2, persistent_workers=persistent_workers, prefetch_factor=4)
    for _ in feed:
        break
    feed.set_epoch(1)
    assert_same(list(feed), reference(2)[5:])


def test_a_new_pass_ends_the_one_before_it(make_feed: MakeFeed) -> None:
    """The earlier one ends with an error and takes no batch of the new one, which is whole."""
    feed = make_feed(2, persistent_workers=True)
    first = iter(feed)
    second = iter(feed)
    next(first)
    given = [next(second)]
    with pytest.raises(LoaderError):
        list(first)
    assert_same([*given, *second], reference())


def test_a_closed_feed_serves_again(make_feed: MakeFeed) -> None:
    """close() may be called at any time, also twice; the next pass is whole."""
    feed = make_feed(2, persistent_workers=True)
    feed.close()
    list(feed)
    feed.close()
    feed.close()
    assert_same(list(feed), reference())


def test_polled_comes_back_without_a_batch(make_feed: MakeFeed, tmp_path: Path) -> None:
    """While a sample takes its time, polled() gives None, again and again, and then the batch."""
    gate = tmp_path / "open"
    feed = make_feed(1, samples.Troubled(LENGTH, 5, partial(samples.wait_for, gate)))
    expected = reference()
    late = next(place for place, batch in enumerate(expected) if 5 in batch.indices)
    batches = feed.polled(0.02)
    given = [next(batch for batch in batches if batch is not None) for _ in range(late)]
    assert [next(batches) for _ in range(5)] == [None] * 5
    gate.touch()
    assert_same([*given, *(batch for batch in batches if batch is not None)], expected)


@pytest.mark.parametrize(
    ("num_workers", "start_method"),
    [(0, "fork"), (2, "forkserver"), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)],
)
def test_the_meter_counts_what_each_worker_makes(
    make_feed: MakeFeed, num_workers: int, start_method: str
) -> None:
    """Through two passes with new workers, every sample and batch counts once, and the stages add
    up to the busy time.
    """
    feed = make_feed(num_workers, samples.Staged(LENGTH), start_method=start_method)
    assert_same(passes(feed), reference(2))
    assert feed.meter is not None
    totals = feed.meter.read()
    assert totals.samples == 2 * LENGTH
    shared = ["share"] if num_workers and isinstance(feed, ProcessFeed) else []
    assert list(totals.stages) == ["draw", "label", "collate", *shared]
    assert sum(cost.wall_s for cost in totals.stages.values()) == pytest.approx(totals.busy_s)
    assert totals.stages["draw"].wall_s > 0 and totals.stages["draw"].cpu_s > 0


@pytest.mark.parametrize(
    "dataset",
    [samples.Staged(8, bad=5), samples.Troubled(8, 5, samples.refuse)],
    ids=["staged", "plain"],
)
def test_the_time_of_a_sample_that_fails_is_not_lost(
    make_feed: MakeFeed, dataset: samples.Noise
) -> None:
    """A batch with an error in it counts with all its samples and all its time."""
    feed = make_feed(0, dataset, batch_size=8)
    with pytest.raises(BadSample):
        list(feed)
    assert feed.meter is not None
    totals = feed.meter.read()
    assert totals.samples == 8
    assert sum(cost.wall_s for cost in totals.stages.values()) == pytest.approx(totals.busy_s)


def test_a_feed_does_without_shared_memory_for_its_meter(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes have none then, threads never share it; the batches come all the same, and their
    stamps with them.
    """

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.Tensor.share_memory_", refuse)
        feed = make_feed(1, samples.Staged(LENGTH))
    assert (feed.meter is None) == isinstance(feed, ProcessFeed)
    batches = list(feed)
    assert_same(batches, reference())
    assert all(batch.stamps is not None for batch in batches)


@with_and_without_workers
def test_stamps_follow_a_batch_from_its_worker(make_feed: MakeFeed, num_workers: int) -> None:
    """A batch is begun, made, received and given out in this order, on one clock."""
    for batch in make_feed(num_workers):
        now_s = time.perf_counter()
        stamps = batch.stamps
        assert stamps is not None
        assert stamps.made_s <= stamps.received_s == stamps.pinned_s < now_s


@persistent_or_not
def test_a_primed_pass_gives_the_same_batches(
    make_feed: MakeFeed, persistent_workers: bool
) -> None:
    """Workers begin before iter(), which goes on with what they have
    made: no sample is made twice.
    """
    given = []
    feed = make_feed(2, times_samples=True, persistent_workers=persistent_workers)
    for epoch in (0, 1):
        primed(feed, epoch).prime(epoch)  # a second time changes nothing
        feed.set_epoch(epoch)
        given += list(feed)
    assert_same(given, reference(2))
    assert feed.meter.work().samples == 2 * LENGTH


def test_a_pass_primed_for_another_epoch_is_dropped(make_feed: MakeFeed) -> None:
    """iter() gives the epoch that was chosen, whatever was primed."""
    feed = primed(make_feed(2, times_samples=True, persistent_workers=True), 5)
    assert_same(passes(feed), reference(2))


def test_without_workers_priming_does_nothing(make_feed: MakeFeed) -> None:
    """There is nobody to begin; the pass comes all the same."""
    feed = make_feed(0)
    feed.prime(0)
    assert samples.at_work() == []
    assert_same(list(feed), reference())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_data_set_gives_no_batch(make_feed: MakeFeed, num_workers: int) -> None:
    """A pass over nothing ends at once."""
    assert list(make_feed(num_workers, samples.Noise(0))) == []


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_batch_may_be_larger_than_the_set(make_feed: MakeFeed, num_workers: int) -> None:
    """Without drop_last a set smaller than a batch is one short batch, also with more workers than
    samples.
    """
    (batch,) = make_feed(num_workers, samples.Noise(2), batch_size=8)
    assert sorted(batch.indices.tolist()) == [0, 1]
