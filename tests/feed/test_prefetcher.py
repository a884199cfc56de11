"""DataPrefetcher on the CPU: values, ends, errors, and a thread that is never more than one batch
ahead.
"""

from __future__ import annotations

import gc
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.clock.clock import StepClock
from harness.clock.stages import Stamps
from harness.feed import nest
from harness.feed.base import HostBatch
from harness.feed.prefetcher import DataPrefetcher

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
WAIT_S = 10.0  # for an event that comes at once unless the test fails


class Loader:
    """Gives ``batches`` in every pass, calling ``before(k)`` before batch k; counts passes and what
    it was asked for.
    """

    def __init__(
        self, batches: list[HostBatch], before: Callable[[int], object] = lambda k: None
    ) -> None:
        self.batches, self.before = batches, before
        self.passes = self.asked = self.ended = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[HostBatch]:
        self.passes += 1
        try:
            for k, batch in enumerate(self.batches):
                self.asked += 1
                self.before(k)
                yield batch
        finally:
            self.ended += 1


def host_batches(sizes: tuple[int, ...] = (4, 4, 3)) -> list[HostBatch]:
    generator = torch.Generator().manual_seed(1)
    return [
        HostBatch(
            torch.randint(0, 256, (n, 3, 5, 5), dtype=torch.uint8, generator=generator),
            torch.arange(n) + 10 * k,
            torch.arange(n),
        )
        for k, n in enumerate(sizes)
    ]


def test_batches_reach_a_device_of_another_type(caplog: pytest.LogCaptureFixture) -> None:
    """They are copied and normalized there as they are asked for; a line says so."""
    device = torch.device("meta")
    images, labels = next(DataPrefetcher(Loader(host_batches()), device, mean=MEAN, std=STD))
    assert (images.device, images.dtype, labels.device) == (device, torch.float32, device)
    assert len(caplog.records) == 1


Make = Callable[..., DataPrefetcher]


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[DataPrefetcher] = []

    def make_one(loader: Any, **more: Any) -> DataPrefetcher:
        made.append(DataPrefetcher(loader, "cpu", ahead=request.param, **more))
        return made[-1]

    yield make_one
    for batches in made:
        batches.close()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert prefetch_threads() == []


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def labels(batches: DataPrefetcher) -> list[int]:
    return [int(batch_labels[0]) for _, batch_labels in batches]


def test_values_are_those_of_a_plain_loop(make: Make) -> None:
    """Every batch comes once, in order, the short last one as short as it is, in each of two
    passes.
    """
    loader = Loader(host_batches())
    batches = make(loader)
    for _ in range(2):
        given = list(batches)
        assert len(given) == len(loader) == len(batches) == 3
        for (images, batch_labels), host in zip(given, loader.batches, strict=True):
            assert torch.equal(images, host.images.float())
            assert torch.equal(batch_labels, host.labels)
    assert (loader.passes, loader.ended) == (2, 2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 5e-7), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
    ids=str,
)
def test_normalization(make: Make, dtype: torch.dtype, tolerance: float) -> None:
    """Images are (value / 255 - mean) / std in ``dtype``, within its rounding of the same sum in
    float64.
    """
    loader = Loader(host_batches())
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(shape) for values in (MEAN, STD))
    for (images, _), host in zip(
        make(loader, mean=MEAN, std=STD, dtype=dtype), loader.batches, strict=True
    ):
        expected = (host.images.double() / 255 - mean) / std
        assert images.dtype == dtype
        assert ((images.double() - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()


@pytest.mark.parametrize("given", [torch.uint8, torch.float32], ids=str)
def test_without_mean_values_stay_as_they_are(make: Make, given: torch.dtype) -> None:
    """Integers keep their type, floats are cast to ``dtype``; the loader's own stay as they are."""
    own = (255 * torch.rand(2, 3, 4, 4)).to(given)
    before = own.clone()
    (images, _), *_ = make([(own, torch.zeros(2))], dtype=torch.float16)
    assert images.dtype == (torch.float16 if given.is_floating_point else torch.uint8)
    assert torch.equal(images, before.to(images.dtype)) and torch.equal(own, before)


@pytest.mark.parametrize("normalized", [True, False])
def test_channels_last(make: Make, normalized: bool) -> None:
    """channels_last gives NHWC strides with the same values."""
    more = {"mean": MEAN, "std": STD} if normalized else {}
    plain = list(make(Loader(host_batches()), **more))
    last = list(make(Loader(host_batches()), channels_last=True, **more))
    for (images, _), (expected, _) in zip(last, plain, strict=True):
        assert images.is_contiguous(memory_format=torch.channels_last) and expected.is_contiguous()
        assert torch.equal(images, expected)


def pixels(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("images", "told"),
    [
        pytest.param(
            pixels(2, 3, 4, 4, dtype=torch.float32), r"torch.float32 \[2, 3, 4, 4\]", id="floats"
        ),
        pytest.param(pixels(2, 1, 4, 4), r"torch.uint8 \[2, 1, 4, 4\]", id="gray"),
        pytest.param(pixels(3, 4, 4), r"torch.uint8 \[3, 4, 4\]", id="one image"),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True], ids=["NCHW", "NHWC"])
def test_images_that_mean_and_std_do_not_fit_are_refused(
    make: Make, images: Tensor, told: str, channels_last: bool
) -> None:
    """Only uint8 of as many channels is divided by 255 and normalized; all else says what came and
    the ways out.
    """
    batches = make([(images, torch.zeros(2))], mean=MEAN, std=STD, channels_last=channels_last)
    with pytest.raises(
        ValueError,
        match=rf"^DataPrefetcher: images are {told}; .* torch.uint8 \[N, 3, H, W\].*omit mean "
        r"and std$",
    ):
        next(batches)


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        *((MEAN, None), (None, STD), (MEAN, (0.5,)), ((0.5,), STD), ((), STD)),
        *(((0.5,), (0.0,)), ((0.5,), (-1.0,)), ((0.5,), (math.nan,)), ((math.inf,), (1.0,))),
        *(((10**400,), (1,)), ("a", "b"), (0.5, 0.5), ((0.5,), (None,))),
    ],
    ids=[
        *("no std", "no mean", "one std", "one mean", "empty mean"),
        *("std 0", "negative std", "std NaN", "infinite mean"),
        *("huge mean", "letters", "no lists", "std None"),
    ],
)
def test_mean_and_std_that_do_not_fit_each_other_are_refused(
    make: Make, mean: object, std: object
) -> None:
    """One without the other, or of another length, is refused before anything is loaded; both are
    named.
    """
    told = re.escape(f"DataPrefetcher: mean={mean} and std={std}: ")
    with pytest.raises(ValueError, match=told):
        make([], mean=mean, std=std)


def test_mean_and_std_may_be_arrays(make: Make) -> None:
    """NumPy's and torch's are as good as tuples."""
    batch = (torch.full((2, 1, 4, 4), 51, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    for kind in (np.array, torch.tensor):
        (images, _), *_ = make([batch], mean=kind([0.1]), std=kind([0.5]))
        assert images[0, 0, 0, 0].item() == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.complex64], ids=str)
def test_types_without_fractions_are_refused(make: Make, dtype: torch.dtype) -> None:
    """They would cut normalized values off."""
    with pytest.raises(ValueError, match=f"^DataPrefetcher: dtype={dtype}: use float32"):
        make([], mean=MEAN, std=STD, dtype=dtype)


class Pair(NamedTuple):
    images: Tensor
    labels: Tensor


IMAGES = torch.rand(2, 3, 4, 4)
LABELS = torch.arange(2)


@dataclass(frozen=True)
class Sample:
    images: Tensor
    targets: list[dict[str, Tensor]]
    paths: list[str]


# of every form, with the name of its images
BATCHES = [
    pytest.param((IMAGES, LABELS), None, id="tuple"),
    pytest.param([IMAGES, LABELS, ["a", "b"]], None, id="three"),
    pytest.param(Pair(IMAGES, LABELS), "images", id="named tuple"),
    pytest.param({"label": LABELS, "image": IMAGES}, "image", id="dictionary"),
    pytest.param((LABELS, {"image": IMAGES}), None, id="nested"),
    pytest.param(Sample(IMAGES, [{"boxes": LABELS}], ["a"]), "images", id="dataclass"),
    pytest.param(IMAGES, None, id="tensor"),
]


@pytest.mark.parametrize(("batch", "name"), BATCHES)
def test_a_batch_keeps_its_form(make: Make, batch: Any, name: str | None) -> None:
    """Every tensor is there, in its place, and whatever is none; without a name too."""
    for images in (name, None):
        (found,) = make([batch], images=images)
        assert type(found) is type(batch)
        assert str(found) == str(batch)


@pytest.mark.parametrize(("batch", "name"), BATCHES)
def test_named_images_are_normalized(make: Make, batch: Any, name: str | None) -> None:
    """And no other tensor is."""
    pixels = (255 * IMAGES).to(torch.uint8)
    given = nest.changed(batch, lambda each: pixels if each is IMAGES else each)
    mean, std = (0.0,) * 3, (1.0,) * 3
    if isinstance(batch, tuple) and batch[0] is LABELS:
        with pytest.raises(ValueError, match="images are torch.int64"):
            next(make([given], images=name, mean=mean, std=std))
        return
    (found,) = make([given], images=name, mean=mean, std=std)
    tensors: list[Tensor] = []
    nest.changed(found, tensors.append)
    (image,) = (each for each in tensors if each.ndim == 4)
    assert torch.allclose(image, pixels / 255, atol=1e-6)
    assert all(torch.equal(each, LABELS) for each in tensors if each.ndim != 4)


@pytest.mark.parametrize(
    ("batch", "images"),
    [
        ({"image": IMAGES}, None),
        ({"image": IMAGES}, "pixels"),
        ((IMAGES, LABELS), 2),
        ((IMAGES, LABELS), "pixels"),
        ((), None),
        (None, None),
        (Sample(IMAGES, [], []), "paths"),
    ],
)
def test_a_batch_without_the_named_images_is_refused(make: Make, batch: Any, images: Any) -> None:
    with pytest.raises(TypeError, match=r"^DataPrefetcher: images="):
        next(make([batch], images=images, mean=MEAN, std=STD))


def test_an_empty_loader(make: Make) -> None:
    """A pass over nothing ends at once, in both ways of asking."""
    batches = make([])
    assert list(batches) == []
    assert batches.next() == (None, None)


def test_next_is_apexs(make: Make) -> None:
    """next() gives (None, None) at the end of a pass, and then begins the next pass."""
    batches = make(Loader(host_batches()))
    for _ in range(2):
        seen = []
        images, batch_labels = batches.next()
        while images is not None:
            assert batch_labels is not None
            seen.append(int(batch_labels[0]))
            images, batch_labels = batches.next()
        assert seen == [0, 10, 20]
        assert batch_labels is None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loop_over_one_without_a_name_is_whole(ahead: bool) -> None:
    """Nothing but the loop holds the prefetcher."""
    found = [y.tolist() for _, y in DataPrefetcher(Loader(host_batches()), "cpu", ahead=ahead)]
    assert len(found) == len(host_batches())


def test_a_new_loop_after_a_break_is_a_new_pass(make: Make) -> None:
    """What was ahead at a break is dropped, the pass that was left is ended, and the next one is
    whole.
    """
    loader = Loader(host_batches())
    batches = make(loader)
    for _ in batches:
        break
    assert labels(batches) == [0, 10, 20]
    assert (loader.passes, loader.ended) == (2, 2)


class Broken(Exception):
    pass


def test_an_error_comes_in_place_of_its_batch(make: Make) -> None:
    """What the loader raises surfaces after the batches before it, as itself; the next loop is a
    new pass.
    """

    def fail_once(k: int) -> None:
        if k == 2 and loader.passes == 1:
            raise Broken("third")

    loader = Loader(host_batches(), fail_once)
    batches = make(loader)
    seen: list[tuple[Tensor, Tensor]] = []
    with pytest.raises(Broken, match="third"):
        seen.extend(batches)
    assert len(seen) == 2
    assert labels(batches) == [0, 10, 20]


def test_an_error_of_iter_surfaces(make: Make) -> None:
    """A loader whose iter() fails, fails in next()."""

    class Unready:
        def __iter__(self) -> Iterator[Any]:
            raise Broken("iter")

    with pytest.raises(Broken, match="iter"):
        make(Unready()).next()


def test_close_ends_the_pass(make: Make) -> None:
    """close() ends the loader's iterator with the pass; it may be called again, and the next loop
    begins anew.
    """
    loader = Loader(host_batches())
    batches = make(loader)
    next(batches)
    batches.close()
    assert loader.ended == 1 and prefetch_threads() == []
    batches.close()
    assert labels(batches) == [0, 10, 20]


def test_garbage_takes_the_thread_along() -> None:
    """A prefetcher that is dropped half-way leaves no thread and no open pass."""
    loader = Loader(host_batches())
    batches = DataPrefetcher(loader, "cpu", ahead=True)
    next(batches)
    assert len(prefetch_threads()) == 1
    del batches
    gc.collect()
    assert prefetch_threads() == []
    assert loader.ended == 1


def test_a_ready_batch_is_handed_out_while_the_loader_blocks() -> None:
    """The consumer gets batch k while the loader has not come back with batch k + 1."""
    second_asked = threading.Event()
    second_may_come = threading.Event()

    def before(k: int) -> None:
        if k == 1:
            second_asked.set()
            assert second_may_come.wait(WAIT_S)

    batches = DataPrefetcher(Loader(host_batches(), before), "cpu", ahead=True)
    assert int(next(batches)[1][0]) == 0
    assert second_asked.wait(WAIT_S)
    assert not second_may_come.is_set()
    second_may_come.set()
    assert int(next(batches)[1][0]) == 10
    batches.close()


def test_never_more_than_one_batch_ahead() -> None:
    """When the consumer has taken k batches, the loader was asked for k + 1 at most."""
    taken = 0
    too_far = threading.Event()

    def before(k: int) -> None:
        # the k-th is asked for when the one before it is being taken, the first with nothing taken
        if k > taken + 1:
            too_far.set()

    batches = DataPrefetcher(Loader(host_batches((2,) * 6), before), "cpu", ahead=True)
    for _ in batches:
        taken += 1
        assert not too_far.wait(0.02)
    assert taken == 6


def test_augment_has_the_images_as_they_come(make: Make) -> None:
    """Augment is given the loader's own uint8 images, in their memory format, with their batch;
    what it gives is normalized.
    """
    loader = Loader(
        [
            batch._replace(images=batch.images.contiguous(memory_format=torch.channels_last))
            for batch in host_batches()
        ]
    )
    seen: list[Any] = []

    def augment(images: Tensor, batch: HostBatch) -> Tensor:
        seen.append((images, batch))
        return 255 - images

    batches = make(loader, mean=MEAN, std=STD, augment=augment)
    turned = [batch._replace(images=255 - batch.images) for batch in loader.batches]
    for (images, _), (expected, _) in zip(
        batches, make(Loader(turned), mean=MEAN, std=STD), strict=True
    ):
        assert torch.equal(images, expected)
    assert [batch for _, batch in seen] == loader.batches
    for images, batch in seen:
        assert images.dtype == torch.uint8 and torch.equal(images, batch.images)
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_mix_has_the_last_word(make: Make) -> None:
    """Mix is given what would have been handed out, with the loader's batch; what it gives is
    handed out in its place.
    """
    loader = Loader(host_batches())
    seen = []

    def mix(images: Tensor, labels: Tensor, batch: HostBatch) -> tuple[Tensor, Tensor]:
        seen.append((images.clone(), labels, batch))
        return images * 2, labels + 0.5

    given = list(make(loader, mean=MEAN, std=STD, mix=mix))
    plain = list(make(loader, mean=MEAN, std=STD))
    assert [batch for _, _, batch in seen] == loader.batches
    for (images, mixed), (had, had_labels, _), (expected, expected_labels) in zip(
        given, seen, plain, strict=True
    ):
        assert torch.equal(had, expected) and torch.equal(had_labels, expected_labels)
        assert torch.equal(images, expected * 2) and torch.equal(mixed, expected_labels + 0.5)


def test_without_being_ahead_nothing_is_asked_early() -> None:
    """ahead=False asks the loader for a batch when the consumer does."""
    loader = Loader(host_batches())
    batches = DataPrefetcher(loader, "cpu", ahead=False)
    for k, _ in enumerate(batches):
        assert loader.asked == k + 1


def test_the_clock_hears_when_a_batch_was_made(make: Make) -> None:
    """A wait for a batch with stamps is divided by them; one for a batch without says nothing."""
    loader = Loader(host_batches())
    seen = time.perf_counter()
    loader.batches[1] = loader.batches[1]._replace(
        stamps=Stamps(seen, math.inf, math.inf)
    )  # never received
    clock = StepClock()
    batches = make(loader, clock=clock)
    for _ in range(3):
        with clock.waiting():
            next(batches)
        clock.step(1)
    assert clock.total().wait_parts == {"make": 0.0, "transport": 1.0, "pin": 0.0, "move": 0.0}


def test_on_the_cpu_there_is_no_thread() -> None:
    """ahead=None needs a CUDA device."""
    loader = Loader(host_batches())
    batches = DataPrefetcher(loader, "cpu")
    next(batches)
    assert prefetch_threads() == []
    batches.close()


def test_a_program_ends_with_a_pass_half_way() -> None:
    """A program that forgets close() ends in silence although a thread waits."""
    script = (
        "import torch\n"
        "from harness.feed.prefetcher import DataPrefetcher\n"
        "batches = DataPrefetcher([(torch.zeros(1, 3, 2, 2), torch.zeros(1))] * 3, 'cpu', "
        "ahead=True)\n"
        "print(len(next(batches)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
