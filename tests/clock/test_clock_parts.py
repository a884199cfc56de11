"""What the clock tells of a wait, of work between steps and of garbage collections."""

import gc
import threading
from collections.abc import Iterator

import pytest
from model_time import Hand, one_step

from harness.clock.clock import StepClock
from harness.clock.stages import Stamps


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock(hand: Hand) -> StepClock:
    return StepClock("cpu", now=hand)


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        pytest.param(
            (0.5, 0.6, 0.9),
            {"make": 0.5, "transport": 0.1, "pin": 0.3, "move": 0.1},
            id="made in the wait",
        ),
        pytest.param(
            (0.5, 0.6, 0.6),
            {"make": 0.5, "transport": 0.1, "pin": 0, "move": 0.4},
            id="not pinned",
        ),
        pytest.param(
            (-1.0, 0.6, 0.6),
            {"make": 0, "transport": 0.6, "pin": 0, "move": 0.4},
            id="made before",
        ),
        pytest.param(
            (-1.0, -0.5, 0.2),
            {"make": 0, "transport": 0, "pin": 0.2, "move": 0.8},
            id="received before",
        ),
        pytest.param(
            (-1.0, -0.5, -0.4),
            {"make": 0, "transport": 0, "pin": 0, "move": 1},
            id="there before",
        ),
    ],
)
def test_a_wait_is_divided_by_where_its_batch_was(
    clock: StepClock,
    hand: Hand,
    stamps: tuple[float, float, float],
    expected: dict[str, float],
) -> None:
    """To each stage goes what the batch that ended the wait spent there meanwhile."""
    one_step(clock, hand, 9.0, 1.0)
    began = hand.now
    with clock.waiting():
        hand.pass_(1.0)
        clock.arrived(Stamps(*(began + at for at in stamps)))
    clock.step(1)
    assert clock.total().wait_parts == pytest.approx(expected)


def test_waits_that_nobody_explains_are_left_out(clock: StepClock, hand: Hand) -> None:
    """Stamps count for the wait that they end, and not in a first step."""
    late = Stamps(hand.now + 1000, hand.now + 1000, hand.now + 1000)
    with clock.waiting():
        clock.arrived(late)
        hand.pass_(1.0)
    clock.step(1)
    clock.arrived(late)
    one_step(clock, hand, 1.0, 1.0)
    assert clock.total().wait_parts == {}
    with clock.waiting():
        clock.arrived(Stamps(0.0, 0.0, 0.0))
        hand.pass_(0.5)
    one_step(clock, hand, 7.0, 1.0)
    assert clock.total().wait_parts == {"make": 0.0, "transport": 0.0, "pin": 0.0, "move": 1.0}


def test_work_between_steps_has_a_name(clock: StepClock, hand: Hand) -> None:
    """Noted work is told by name, in the steps alone; of work in work the outer counts."""
    with clock.noted("before"):
        hand.pass_(1.0)
    one_step(clock, hand, 0.0, 1.0)
    for _ in range(2):
        with clock.noted("logging"):
            hand.pass_(0.2)
            with clock.noted("callback"):
                hand.pass_(0.1)
            with clock.pause("checkpoint"):
                hand.pass_(5.0)
        one_step(clock, hand, 0.0, 1.0)
    clock.start_epoch()
    with clock.noted("set-up"):
        hand.pass_(3.0)
    one_step(clock, hand, 0.0, 1.0)
    total = clock.total()
    assert total.host_parts_s == {"logging": pytest.approx(0.6), "gc": 0.0}
    assert total.shares["host"] == pytest.approx(0.6 / 2.6)


@pytest.fixture
def slow_gc(clock: StepClock, hand: Hand) -> Iterator[None]:
    """Collections take a quarter of a second; they come only when asked for."""

    def collect(phase: str, info: object) -> None:
        hand.pass_(0.25 if phase == "start" else 0.0)

    gc.disable()
    gc.callbacks.append(collect)
    yield
    gc.callbacks.remove(collect)
    gc.enable()


@pytest.mark.usefixtures("slow_gc")
def test_garbage_collections_are_timed(clock: StepClock, hand: Hand) -> None:
    """Those in a step count, also in named work; those in pauses and first steps do not."""
    gc.collect(0)
    one_step(clock, hand, 0.0, 1.0)
    with clock.noted("logging"):
        hand.pass_(0.1)
        gc.collect(0)
        with clock.pause("checkpoint"):
            gc.collect(0)
    with clock.computing():
        gc.collect(0)
    with clock.pause("evaluate"):
        gc.collect(0)
    clock.step(1)
    total = clock.total()
    assert total.host_parts_s == {"logging": pytest.approx(0.1), "gc": 0.5}
    assert total.elapsed_s == pytest.approx(0.6)


@pytest.mark.usefixtures("slow_gc")
def test_collections_are_no_computing_on_a_cpu(clock: StepClock, hand: Hand) -> None:
    """Where the host computes, a collection is Python's time and not the network's."""
    for _ in range(3):
        with clock.computing():
            hand.pass_(0.75)
            gc.collect(0)
        clock.step(1)
    assert clock.total().shares == {"compute": 0.75, "starved": 0.0, "host": 0.25}


@pytest.mark.usefixtures("slow_gc")
def test_garbage_collections_of_other_threads_are_theirs(clock: StepClock, hand: Hand) -> None:
    """A thread that collects beside the loop is not the loop's garbage collection."""
    one_step(clock, hand, 0.0, 1.0)
    thread = threading.Thread(target=gc.collect, args=(0,))
    thread.start()
    thread.join()
    one_step(clock, hand, 0.0, 1.0)
    assert clock.total().host_parts_s["gc"] == 0.0


def test_a_clock_that_is_gone_listens_no_more() -> None:
    """What a clock adds to the interpreter's callbacks goes with it."""
    before = len(gc.callbacks)
    clock = StepClock()
    assert len(gc.callbacks) == before + 1
    del clock
    assert len(gc.callbacks) == before
