"""Feed settings as derived from the user's."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from harness.config import LoaderConfig, StartMethod, ValLoaderConfig
from harness.feed.interface import FeedSettings, HostBatch, train_settings, val_settings
from harness.runtime.limits import Limits
from harness.watch.stages import Stamps


def limits(cores: float) -> Limits:
    return Limits(cores=cores, memory_bytes=2**30, shm_bytes=None, open_files=1024)


def train(loader: LoaderConfig, cores: float = 4.0, pinnable: bool = True) -> FeedSettings:
    return train_settings(loader, limits(cores), pinnable)


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 1), (1.0, 1), (2.0, 2), (3.7, 3), (64.0, 16)])
def test_workers_are_derived_from_the_cores(cores: float, workers: int) -> None:
    """num_workers=null is one worker a usable core, at least one and at most 16."""
    assert train(LoaderConfig(), cores).num_workers == workers


@pytest.mark.parametrize(
    ("pin_memory", "pinnable", "pinned"),
    [
        (None, True, True),
        (None, False, False),
        (True, True, True),
        (True, False, False),
        (False, True, False),
    ],
)
def test_memory_is_pinned_where_that_has_a_use(
    pin_memory: bool | None, pinnable: bool, pinned: bool
) -> None:
    """pin_memory=null pins where there is a CUDA device; nothing pins without one."""
    assert train(LoaderConfig(pin_memory=pin_memory), pinnable=pinnable).pin_memory is pinned


def test_explicit_settings_are_kept() -> None:
    """What the user set is what the feed gets."""
    loader = LoaderConfig(
        batch_size=7,
        num_workers=3,
        pin_memory=False,
        prefetch_factor=5,
        persistent_workers=False,
        timeout_s=9.0,
        start_method=StartMethod.spawn,
    )
    assert asdict(train(loader)) == {
        "batch_size": 7,
        "num_workers": 3,
        "pin_memory": False,
        "prefetch_factor": 5,
        "persistent_workers": False,
        "timeout_s": 9.0,
        "start_method": "spawn",
        "backend": "processes",
    }


def test_validation_follows_the_training_feed() -> None:
    """Left null, the validation feed has the training feed's settings, but its workers live for one
    evaluation.
    """
    loader = LoaderConfig(batch_size=7, num_workers=3)
    settings = train(loader)
    val = val_settings(loader, settings)
    assert asdict(val) == {**asdict(settings), "persistent_workers": False}


def test_validation_has_settings_of_its_own() -> None:
    """loader.val.* replaces what the training feed has."""
    loader = LoaderConfig(
        num_workers=3, val=ValLoaderConfig(batch_size=100, num_workers=1, prefetch_factor=4)
    )
    val = val_settings(loader, train(loader))
    assert (val.batch_size, val.num_workers, val.prefetch_factor) == (100, 1, 4)


def test_torch_pins_a_batch_and_then_its_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own pinning keeps what is no tensor, and stamps the batch after the last tensor."""
    times = itertools.count(10.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    monkeypatch.setattr("torch.Tensor.pin_memory", lambda tensor: tensor + next(times))
    images, labels, indices = torch.zeros(3, 1).unbind()
    batch = HostBatch(
        images, labels, indices, (("cats/7.jpg", "empty file"),), 7, Stamps(1.0, 2.0, 3.0, 3.0)
    )
    pinned = pin_memory(batch)
    assert type(pinned) is HostBatch
    assert [tensor.item() for tensor in pinned[:3]] == [10.0, 11.0, 12.0]
    assert (pinned.failures, pinned.epoch) == (batch.failures, 7)
    assert pinned.stamps == Stamps(1.0, 2.0, 3.0, 13.0)
    assert pin_memory(batch._replace(stamps=None)).stamps is None


@pytest.mark.parametrize(
    ("num_workers", "text"),
    [
        (0, "num_workers=0 pin_memory=false"),
        (2, "num_workers=2 pin_memory=false prefetch_factor=2"),
    ],
)
def test_settings_print_as_the_user_would_type_them(num_workers: int, text: str) -> None:
    """str() names each setting that has an effect."""
    settings = train(LoaderConfig(num_workers=num_workers), pinnable=False)
    assert str(settings) == text
    assert str(replace(settings, backend="other")) == f"{text} backend=other"
