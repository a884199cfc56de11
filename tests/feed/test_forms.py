"""A rank's feeds: which form, which order, and what probes have read."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import samples
import torch

from harness.config import Config
from harness.data.datasets import FakeDataset, Splits
from harness.feed import forms
from harness.feed.forms import Feeds
from harness.feed.gauge import Gauge
from harness.feed.interface import Feed
from harness.feed.processes import ProcessFeed
from harness.feed.synthetic import SyntheticFeed
from harness.runtime.distributed import World

CPU = World(0, 1, 0, 1, torch.device("cpu"))
SETTINGS = samples.settings()  # batches of 4


@pytest.fixture
def feeds() -> Feeds:
    """Feeds over 20 training and 6 validation samples."""
    config = Config()
    config.loader.batch_size = 4
    train, val = samples.Noise(20), samples.Noise(6)
    return Feeds(Splits(train, val, ("a",), "noise", ""), config, CPU)  # type: ignore[arg-type]


def indices(feed: Feed, batches: int | None = None) -> list[int]:
    return [index for batch in islice(feed, batches) for index in batch.indices.tolist()]


def test_probes_read_disjoint_samples(feeds: Feeds) -> None:
    """Two probes together read each sample once, and probed() tells how often the set has been read."""
    assert feeds.probed() == 0.0
    first = indices(feeds.probe(SETTINGS), 2)
    assert feeds.probed() == pytest.approx(2 / 5)
    rest = indices(feeds.probe(SETTINGS), 3)
    assert sorted(first + rest) == list(range(20))
    indices(feeds.probe(SETTINGS), 1)
    assert feeds.probed() == pytest.approx(6 / 5)


def test_a_probe_may_read_again_what_was_read(feeds: Feeds) -> None:
    """again=True goes round what the last probe has given, and leaves what the next probe reads alone."""
    indices(feeds.probe(SETTINGS), 1)
    second = indices(feeds.probe(SETTINGS), 1)
    feeds.saw(1)
    assert indices(feeds.probe(SETTINGS, again=True), 2) == second * 2
    assert feeds.probed() == pytest.approx(2 / 5)
    first = second
    assert set(first).isdisjoint(indices(feeds.probe(SETTINGS), 3))


def test_what_a_probe_s_workers_have_asked_for_counts_as_read(feeds: Feeds) -> None:
    """Batches in flight when a probe ends are not asked for by the next one."""
    feed = feeds.probe(samples.settings(1, prefetch_factor=2))
    taken = indices(feed, 1)
    feed.close()
    assert feeds.probed() == pytest.approx(3 / 5)
    rest = indices(feeds.probe(SETTINGS), 2)
    assert len(rest) == 8 and set(taken).isdisjoint(rest)


def test_probes_leave_training_alone(feeds: Feeds) -> None:
    """The training feed's batches are the same before and after a probe."""

    def images() -> torch.Tensor:
        return torch.cat([batch.images for batch in feeds.train(SETTINGS)])

    before = images()
    indices(feeds.probe(SETTINGS), 3)
    assert torch.equal(images(), before)


def test_a_probe_fills_its_gauge(feeds: Feeds) -> None:
    """What the probe's samples took is in the gauge it was given."""
    gauge = Gauge(0)
    indices(feeds.probe(SETTINGS, gauge), 2)
    assert gauge.read().samples == 8


def test_feeds_measure_what_their_workers_do(feeds: Feeds) -> None:
    """The training and the validation feed have meters of their own."""
    train, val = feeds.train(SETTINGS), feeds.val(SETTINGS)
    indices(train)
    assert train.meter is not None and val.meter is not None
    assert (train.meter.read().samples, val.meter.read().samples) == (20, 0)


def test_the_bytes_of_a_batch_are_its_tensors(feeds: Feeds) -> None:
    """batch_bytes is what one batch's tensors hold."""
    batch = next(iter(feeds.train(SETTINGS)))
    assert feeds.batch_bytes(SETTINGS) == sum(tensor.nbytes for tensor in batch[:3])


def test_validation_goes_by_its_own_settings(feeds: Feeds) -> None:
    """val() takes the validation feed's settings, which val_settings() derives; every sample comes once, in order."""
    own = feeds.val_settings(replace(SETTINGS, batch_size=5))
    assert (own.batch_size, own.persistent_workers) == (5, False)
    feed = feeds.val(own)
    assert feed.settings == own and len(feed) == 2
    assert indices(feed) == list(range(6))


def test_the_form_is_the_one_that_the_settings_name(feeds: Feeds, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in FORMS is a form: it is among the names to choose from, and made where settings name it."""

    class Other(ProcessFeed):
        pass

    assert feeds.forms == ("processes",)
    monkeypatch.setitem(forms.FORMS, "other", Other)
    assert feeds.forms == ("processes", "other")
    assert type(feeds.train(replace(SETTINGS, backend="other"))) is Other
    assert type(feeds.train(SETTINGS)) is ProcessFeed


def test_a_data_set_that_does_not_exist_is_made_on_the_device(feeds: Feeds) -> None:
    """Over a FakeDataset every feed, an endless probe too, is the synthetic one."""
    fake = Feeds(Splits(FakeDataset(8, 4, 2), FakeDataset(4, 4, 2), ("a", "b"), "fake", ""), feeds.config, CPU)
    feed = fake.probe(SETTINGS, Gauge(0))
    assert isinstance(feed, SyntheticFeed) and feed.on_device
    assert len(indices(feed, 5)) == 20
    assert fake.batch_bytes(SETTINGS) == 4 * (3 * 4 * 4 + 16)
