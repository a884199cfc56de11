"""The step clock by host time alone: what is counted and what is kept apart."""

import contextlib
import random
from collections.abc import Iterator

import pytest
import torch
from commands import python
from model_time import Hand, known, one_step

from harness.clock.clock import StepClock


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock(hand: Hand) -> StepClock:
    return StepClock("cpu", now=hand)


def test_a_window_holds_its_steps(clock: StepClock, hand: Hand) -> None:
    """Steps, images, rates and shares of a window are those of its steps."""
    clock.start_epoch()
    one_step(clock, hand, 5.0, 5.0)
    for _ in range(4):
        one_step(clock, hand, 0.03, 0.06, 0.01)
    window = known(clock.close_window())
    assert (window.steps, window.images, window.stall_basis) == (4, 16, "host")
    assert window.elapsed_s == pytest.approx(0.4)
    assert window.images_per_s == pytest.approx(40)
    assert window.data_wait_fraction == pytest.approx(0.3)
    assert window.stall_fraction == pytest.approx(0.3)
    assert window.shares.get("compute") == pytest.approx(0.6)
    assert known(window.step_ms).max == pytest.approx(100)
    assert known(window.data_wait_ms).max == pytest.approx(30)
    assert known(window.compute_ms).max == pytest.approx(60)
    assert window.shares == pytest.approx({"compute": 0.6, "starved": 0.3, "host": 0.1})
    assert window.starved_ms == window.data_wait_ms
    assert known(window.host_ms).max == pytest.approx(10)
    assert (window.copy_ms, window.gap_ms, window.exposed_copy_ms, window.launch_ms) == (None,) * 4


def test_total_does_not_end_the_open_window(clock: StepClock, hand: Hand) -> None:
    """Asking for the run's figures in between changes nothing."""
    for _ in range(3):
        one_step(clock, hand, 0.1, 0.1)
    assert clock.total() == clock.total()
    window = known(clock.close_window())
    assert window.steps == 2


def test_the_first_step_of_every_epoch_is_kept_apart(clock: StepClock, hand: Hand) -> None:
    """Start-up does not blur the spread; its time has a figure of its own."""
    for _ in range(3):
        clock.start_epoch()
        one_step(clock, hand, 2.0, 1.0)
        one_step(clock, hand, 0.0, 0.1)
    total = clock.total()
    assert (total.steps, total.first_steps, total.first_step_s) == (3, 3, pytest.approx(9.0))
    assert known(total.step_ms).max == pytest.approx(100)
    assert total.data_wait_fraction == 0.0


def test_pauses_are_kept_apart_by_name(clock: StepClock, hand: Hand) -> None:
    """Evaluation and checkpoints lengthen no step, between two steps or within one."""
    one_step(clock, hand, 0.0, 1.0)
    with clock.pause("evaluate"):
        hand.pass_(50.0)
    with clock.waiting(), clock.pause("checkpoint"):
        hand.pass_(7.0)
    with clock.pause("evaluate"):
        hand.pass_(1.0)
    one_step(clock, hand, 0.1, 0.1)
    window = known(clock.close_window())
    assert window.pauses_s == {"evaluate": 51.0, "checkpoint": 7.0}
    assert known(window.step_ms).max == pytest.approx(200)
    assert window.data_wait_fraction == pytest.approx(0.5)


def test_in_a_pause_in_a_pause_the_outer_counts(clock: StepClock, hand: Hand) -> None:
    """No second is booked twice."""
    with clock.pause("evaluate"):
        hand.pass_(1.0)
        with clock.pause("checkpoint"):
            hand.pass_(2.0)
    assert clock.total().pauses_s == {"evaluate": 3.0}


def test_what_is_told_in_a_pause_does_not_count(clock: StepClock, hand: Hand) -> None:
    """An evaluation that goes through the same code adds no steps, no waits and no first step."""
    one_step(clock, hand, 0.0, 1.0)
    hand.pass_(0.05)
    with clock.pause("evaluate"):
        clock.start_epoch()
        one_step(clock, hand, 3.0, 3.0)
        assert len(list(clock.watch([[0], [0]]))) == 2
    one_step(clock, hand, 0.0, 0.1)
    total = clock.total()
    assert (total.steps, total.first_steps, total.elapsed_s) == (1, 1, pytest.approx(0.15))
    assert total.data_wait_fraction == 0.0


@pytest.mark.parametrize(
    "error", [StopIteration, RuntimeError, KeyboardInterrupt], ids=lambda e: e.__name__
)
def test_an_exception_in_a_wait_leaves_the_clock_whole(
    clock: StepClock, hand: Hand, error: type[BaseException]
) -> None:
    """The wait that failed is counted once and the next one starts afresh."""
    one_step(clock, hand, 0.0, 1.0)
    with contextlib.suppress(error), clock.waiting():
        hand.pass_(0.2)
        raise error
    one_step(clock, hand, 0.1, 0.1)
    assert clock.total().data_wait_fraction == pytest.approx(0.75)


def test_a_wait_in_a_wait_counts_once(clock: StepClock, hand: Hand) -> None:
    """A feed that tells the clock itself may be wrapped by a loop that does too."""
    one_step(clock, hand, 0.0, 1.0)
    with clock.waiting(), clock.waiting():
        hand.pass_(0.1)
    hand.pass_(0.9)
    clock.step(1)
    assert clock.total().data_wait_fraction == pytest.approx(0.1)


def test_mps_has_no_compute_time(hand: Hand) -> None:
    """Where a call returns before its work is done, compute time is absent."""
    clock = StepClock("mps", now=hand)
    one_step(clock, hand, 0.1, 0.1)
    one_step(clock, hand, 0.1, 0.1)
    total = clock.total()
    assert (total.compute_ms, total.host_ms, total.launch_ms, total.stall_basis) == (
        None,
        None,
        None,
        "host",
    )
    assert total.shares == {"starved": pytest.approx(0.5)}


def test_a_device_of_another_type_has_no_figure(hand: Hand) -> None:
    """Nothing tells when it is at work: neither its stall nor its computing is known."""
    clock = StepClock("xpu", now=hand)
    for _ in range(30):
        one_step(clock, hand, 0.1, 0.1)
    for window in (clock.total(), known(clock.close_window())):
        assert (window.stall_fraction, window.shares, window.starved_ms) == (None, {}, None)
        assert (window.compute_ms, window.images_per_s) == (None, pytest.approx(20))


def test_all_time_is_accounted_for(hand: Hand) -> None:
    """Whatever happens, steps, first steps and pauses add up to the wall time."""
    clock = StepClock("cpu", now=hand)
    chance = random.Random(0)
    clock.start_epoch()
    began = hand.now
    for _ in range(500):
        if chance.random() < 0.05:
            clock.start_epoch()
        if chance.random() < 0.1:
            with clock.pause(chance.choice(["evaluate", "checkpoint"])):
                hand.pass_(chance.random())
        one_step(clock, hand, chance.random(), chance.random(), chance.random())
        if chance.random() < 0.2:
            clock.close_window()
    total = clock.total()
    accounted = total.elapsed_s + known(total.first_step_s) + sum(total.pauses_s.values())
    assert accounted == pytest.approx(hand.now - began)
    assert total.steps + total.first_steps == 500


class SlowLoader:
    """Batches of two images that take half a second each to come."""

    def __init__(self, hand: Hand, batches: int) -> None:
        self.hand = hand
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.batches):
            self.hand.pass_(0.5)
            yield torch.zeros(2, 3, 4, 4), torch.zeros(2)


def test_watch_gives_a_plain_loop_its_figures(clock: StepClock, hand: Hand) -> None:
    """next() is data wait, the loop's body is compute, and every batch is a step."""
    for images, _ in clock.watch(SlowLoader(hand, 5)):
        assert images.shape[0] == 2
        hand.pass_(1.5)
    total = clock.total()
    assert (total.steps, total.first_steps, total.images) == (4, 1, 8)
    assert total.data_wait_fraction == pytest.approx(0.25)
    assert total.shares.get("compute") == pytest.approx(0.75)
    assert total.images_per_s == pytest.approx(1.0)


def test_time_between_watched_loops_does_not_count(clock: StepClock, hand: Hand) -> None:
    """A library user's own evaluation between two epochs needs no pause."""
    for _ in range(2):
        for _batch in clock.watch(SlowLoader(hand, 3)):
            hand.pass_(1.0)
        hand.pass_(1000.0)
    total = clock.total()
    assert (total.steps, total.elapsed_s, total.first_step_s) == (
        4,
        pytest.approx(6.0),
        pytest.approx(3.0),
    )


def test_watch_survives_break_and_exceptions(clock: StepClock, hand: Hand) -> None:
    """The step that is left is not counted, and the next loop starts afresh."""
    for count, _ in enumerate(clock.watch(SlowLoader(hand, 9))):
        if count == 2:
            break
    with contextlib.suppress(KeyError):
        for _ in clock.watch(SlowLoader(hand, 9)):
            raise KeyError
    for _ in clock.watch(SlowLoader(hand, 3)):
        pass
    total = clock.total()
    assert (total.steps, total.first_steps) == (1 + 0 + 2, 1 + 0 + 1)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        pytest.param(torch.zeros(5, 3), 5, id="tensor"),
        pytest.param((torch.zeros(6, 3), torch.zeros(6)), 6, id="pair"),
        pytest.param({"images": torch.zeros(7, 3), "labels": torch.zeros(7)}, 7, id="dict"),
        pytest.param([(torch.zeros(8, 3), torch.zeros(8)), torch.zeros(8)], 8, id="nested"),
        pytest.param(((torch.zeros(3, 8, 9),) * 4, ({},) * 4), 4, id="pictures"),
        pytest.param([1, 2, 3], 3, id="list of numbers"),
        pytest.param([], 0, id="nothing"),
    ],
)
def test_watch_finds_the_number_of_images(batch: object, expected: int) -> None:
    """A batch has as many images as its first tensor is long, or as it has pictures."""
    clock = StepClock()
    list(clock.watch([batch, batch]))
    assert clock.total().images == expected


def test_the_clock_is_light_to_import() -> None:
    """Workers import the clock: neither torch nor numpy comes with it."""
    code = (
        "import sys, harness.clock.clock; sys.exit(bool({'torch', 'numpy', 'rich'} & "
        "set(sys.modules)))"
    )
    assert python(code).returncode == 0
