"""What the hooks make of loops of many shapes, on a clock that the loops move."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from model_time import Hand
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader

from harness.clock.clock import StepClock
from harness.clock.figures import Window
from harness.feed.processes import Loader
from harness.hooks import loops as loops_module
from harness.hooks import patches
from harness.hooks.loops import LoopTracker

BATCH = 4
WAIT_S = BATCH * 0.01
STEP_S = 0.03


class Slow(Dataset[Tensor]):
    """Samples that take 10 ms each."""

    def __init__(self, time: Hand, count: int) -> None:
        self.time = time
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.time.pass_(WAIT_S / BATCH)
        return torch.full((2,), float(index))


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Hand:
    found = Hand()
    monkeypatch.setattr(loops_module, "StepClock", partial(StepClock, now=found))
    return found


@pytest.fixture
def loops(time: Hand, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopTracker]:
    found = LoopTracker()
    monkeypatch.setattr(found, "on_window", lambda clock: clock.close_window())
    with patches.installed(found):
        yield found


class Training:
    """A weight and what trains it."""

    def __init__(self, time: Hand) -> None:
        self.time = time
        self.weight = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def __call__(self, batch: Tensor, updates: bool = True) -> None:
        self.time.pass_(STEP_S)
        (batch * self.weight).sum().backward()
        if updates:
            self.optimizer.step()


def loader(time: Hand, batches: int = 6, **more: Any) -> DataLoader[Tensor]:
    return DataLoader(Slow(time, batches * BATCH), BATCH, **more)


def told(loops: LoopTracker) -> Window:
    loops.end(completed=True)
    assert loops.clock
    return loops.clock.total()


def check(total: Window, steps: int, wait_s: float = WAIT_S, step_s: float = STEP_S) -> None:
    """Each of so many steps waits and computes so long, and nothing else."""
    assert total.steps == steps
    assert total.elapsed_s == pytest.approx(steps * (wait_s + step_s))
    assert total.shares["starved"] == pytest.approx(wait_s / (wait_s + step_s))


def test_each_update_is_a_step(loops: LoopTracker, time: Hand) -> None:
    """The first step of each epoch is kept apart, and time between epochs is none of a step's."""
    train = Training(time)
    batches = loader(time)
    for _ in range(3):
        for batch in batches:
            train(batch)
        time.pass_(7.0)
    total = told(loops)
    check(total, 15)
    assert (total.images, total.first_steps, loops.updates) == (15 * BATCH, 3, 18)
    assert [each.trains for each in loops.followed] == [True]


def test_what_follows_the_update_is_python_s(loops: LoopTracker, time: Hand) -> None:
    """Time between an optimizer's step and the next batch is the host's."""
    train = Training(time)
    for batch in loader(time):
        train(batch)
        time.pass_(0.05)
    total = told(loops)
    assert total.shares["host"] == pytest.approx(0.05 / (WAIT_S + STEP_S + 0.05))


def test_batches_without_an_update_belong_to_the_next(loops: LoopTracker, time: Hand) -> None:
    """With accumulation a step has several waits."""
    train = Training(time)
    for number, batch in enumerate(loader(time, 12), 1):
        train(batch, updates=number % 3 == 0)
    total = told(loops)
    check(total, 3, 3 * WAIT_S, 3 * STEP_S)
    assert total.images == 3 * 3 * BATCH


@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
@pytest.mark.parametrize("left", [False, True], ids=["to its end", "left early"])
def test_an_evaluation_amid_an_epoch_is_no_step(
    loops: LoopTracker, time: Hand, grad: bool, left: bool
) -> None:
    """Its waits and its work are no training's."""
    train = Training(time)
    val = loader(time, 5)
    for number, batch in enumerate(loader(time), 1):
        train(batch)
        if number == 3:
            with torch.set_grad_enabled(grad):
                for seen, _ in enumerate(val, 1):
                    time.pass_(0.5)
                    if left and seen == 3:
                        break
    total = told(loops)
    check(total, 5)
    spent_s = (3 if left else 5) * (WAIT_S + 0.5)
    assert total.pauses_s["evaluate"] == pytest.approx(spent_s)
    assert [each.trains for each in loops.followed] == [True, False]


def test_an_evaluation_before_training_is_none(loops: LoopTracker, time: Hand) -> None:
    """Nothing is known of the training before the first update."""
    val = loader(time, 2)
    with torch.no_grad():
        for _ in val:
            break
    train = Training(time)
    for batch in loader(time):
        train(batch)
    check(told(loops), 5)
    assert [each.trains for each in loops.followed] == [False, True]


def test_two_loaders_feed_one_step(loops: LoopTracker, time: Hand) -> None:
    """Waits for both add up; a short one that begins again within the epoch ends none."""
    train = Training(time)
    short = loader(time, 2)
    others = iter(short)
    for batch in loader(time):
        try:
            other = next(others)
        except StopIteration:
            others = iter(short)
            other = next(others)
        train(batch + other)
    check(told(loops), 5, 2 * WAIT_S)
    assert [each.trains for each in loops.followed] == [True, True]


def test_two_optimizers_make_one_step(loops: LoopTracker, time: Hand) -> None:
    """The computing of a step ends with its last update."""
    first, second = Training(time), Training(time)
    for batch in loader(time):
        first(batch)
        second(batch)
        time.pass_(0.01)
    total = told(loops)
    assert total.steps == 5
    assert total.shares["compute"] == pytest.approx(2 * STEP_S / (WAIT_S + 2 * STEP_S + 0.01))


def in_backward(train: Training) -> Callable[[Tensor], None]:
    """Each of two parameters has an optimizer, which steps within backward."""
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for weight in weights:
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return lambda batch: (batch * weights[0] * weights[1]).sum().backward()


def around_another(train: Training) -> Callable[[Tensor], None]:
    """An optimizer steps the training's, as SAM does."""

    class Around(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            train.optimizer.step()

    own = Around([train.weight], lr=0.1)

    def step(batch: Tensor) -> None:
        train(batch, updates=False)
        own.step()

    return step


def twice(train: Training) -> Callable[[Tensor], None]:
    """A batch is trained on two times."""

    def step(batch: Tensor) -> None:
        train(batch)
        train(batch)

    return step


@pytest.mark.parametrize("kind", [in_backward, around_another, twice])
def test_several_optimizer_steps_for_a_batch_are_one(
    loops: LoopTracker, time: Hand, kind: Callable[[Training], Callable[[Tensor], None]]
) -> None:
    """The same from the first pass on, in the clock and in the count."""
    step = kind(Training(time))
    for _ in range(2):
        for batch in loader(time):
            step(batch)
    assert told(loops).steps == 10 and loops.updates == 12


@pytest.mark.parametrize("kind", [in_backward, around_another])
def test_steps_without_a_loader(
    loops: LoopTracker, time: Hand, kind: Callable[[Training], Callable[[Tensor], None]]
) -> None:
    """One ends where an optimizer steps again."""
    step = kind(Training(time))
    for _ in range(6):
        step(torch.ones(BATCH, 2))
    assert loops.updates == 6


@pytest.mark.parametrize(("persistent", "again"), [(False, False), (False, True), (True, False)])
def test_starts_of_workers(loops: LoopTracker, time: Hand, persistent: bool, again: bool) -> None:
    """Passes after the first begin with one, unless the workers stay."""
    train = Training(time)
    more = {"num_workers": 1, "persistent_workers": persistent}
    batches = loader(time, **more)
    for _ in range(3):
        for batch in loader(time, **more) if again else batches:
            time.pass_(1.0)
            train(batch)
    (found,) = loops.followed
    assert (found.starts, found.remade) == (0 if persistent else 2, again)


def test_a_loader_made_again_is_the_same(loops: LoopTracker, time: Hand) -> None:
    """With a new data set for each epoch, too: what is kept does not grow."""
    train = Training(time)
    for _ in range(5):
        for batch in loader(time):
            train(batch)
    check(told(loops), 25)
    assert [(each.passes, each.batches) for each in loops.followed] == [(5, 30)]


class Stream(IterableDataset[Tensor]):
    """Samples in a row, all of them in each worker."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(2 * BATCH, 2))


def test_a_stream_is_told_from_a_data_set_with_indices(loops: LoopTracker, time: Hand) -> None:
    """Of a stream more workers may give samples twice."""
    train = Training(time)
    for each in (loader(time), DataLoader(Stream(), BATCH)):
        for batch in each:
            train(batch)
    assert [each.streams for each in loops.followed] == [False, True]


def test_a_loader_of_another_thread_is_not_counted(loops: LoopTracker, time: Hand) -> None:
    """Where a thread of the script's prefetches, its waits are nobody's; one of tune's is not
    mentioned.
    """
    train = Training(time)
    for other in (loader(time, 3), Loader(torch.zeros(8, 2), 2)):
        thread = threading.Thread(target=list, args=(other,))
        thread.start()
        thread.join()
    for batch in loader(time):
        train(batch)
    check(told(loops), 5)
    assert [each.elsewhere for each in loops.followed] == [True, False, False]


def test_a_forked_process_has_no_hooks(loops: LoopTracker, time: Hand) -> None:
    """A child that trains too tells nobody."""
    child = os.fork()
    if not child:
        train = Training(time)
        for batch in loader(time):
            train(batch)
        os._exit(loops.updates)
    assert os.waitpid(child, 0)[1] == 0


def test_hooks_leave_torch_as_it_was(time: Hand) -> None:
    """After the block every function is torch's own, also after an error."""

    def hooked() -> list[Any]:
        base = dataloader._BaseDataLoaderIter
        loader = dataloader.DataLoader
        return [loader.__init__, loader.__iter__, base.__next__, Tensor.to]

    before = hooked()
    found = LoopTracker()
    with pytest.raises(ZeroDivisionError):
        _fail_within(found, time)
    assert hooked() == before


def _fail_within(loops: LoopTracker, time: Hand) -> None:
    with patches.installed(loops):
        for batch in loader(time):
            Training(time)(batch)
            raise ZeroDivisionError


def test_a_fault_of_ours_ends_the_watching_alone(
    loops: LoopTracker, time: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script goes on as if nobody watched."""
    train = Training(time)

    def fail(batch: Any) -> int:
        raise LookupError("a batch of a new kind")

    monkeypatch.setattr(loops_module, "images_in", fail)
    count = 0
    for _ in range(2):
        for batch in loader(time):
            train(batch)
            count += 1
    assert count == 12
    assert loops.fault == "internal error in wellfed, LookupError: a batch of a new kind"
    assert loops.updates == 0
