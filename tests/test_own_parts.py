"""Augmentation and callbacks of a user's own: same weights everywhere, errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import run_here, trained
from run_state import digest, lines, wrong_lines
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from harness.cli import job
from harness.config import Config, ConfigError
from harness.data import datasets
from harness.data.augment import BatchRng
from harness.feed.feeds import Feeds
from harness.report.page.course import course, read_windows
from harness.runtime.distributed import World
from harness.runtime.errors import LoaderError
from harness.training import checkpoint_read

Composed = Callable[..., Config]
Write = Callable[[str, str], None]
COMMON = (
    "data=digits", "device=cpu", "trainer.num_threads=1", "loader.batch_size=256",
    "schedule.warmup_epochs=0", "trainer.epochs=2",
)  # fmt: skip
AUGMENT = ("augment.own=mine:noise", "augment.own_batch=mine:darken")
CALLBACKS = "callbacks=[mine:Noise,mine:Log]"
MODULE = """
import time

import torch


def noise(image, rng):
    image[:] = image // 2 + rng.integers(0, 120, image.shape, dtype=image.dtype)
    return image[::-1]


def darken(images, rng):
    images.mul_(0.5 + rng.uniform(1).view(-1, 1, 1, 1) / 2 > 0.6)
    return images


class Signs(torch.optim.Optimizer):
    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                p.sub_(average.sign(), alpha=group["lr"])


class Broken(Signs):
    def step(self, closure=None):
        raise ValueError("no step")


def absolute(logits, labels):
    return (logits.softmax(1) - torch.nn.functional.one_hot(labels, 10)).abs().mean()


def nothing(image, rng):
    image[:] = 0


def smaller(image, rng):
    return image[1:]


def other_type(image, rng):
    return image / 255


def fails(image, rng):
    return 1 // 0


def blocks(image, rng):
    time.sleep(3)


class Noise:
    def on_start(self, run):
        run.optimizer.register_step_pre_hook(self.add)

    def add(self, optimizer, *_):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad += 0.01 * torch.randn_like(weight.grad)


class Log:
    calls = []

    def on_start(self, run):
        self.calls.append(("start", run.step, run.epoch))
        facts = (run.rank, run.world_size, run.device.type, len(run.classes), run.config.seed)
        self.calls.append(facts)

    def on_step(self, run):
        run.log("step", run.step)
        self.calls.append(("step", run.step, run.epoch))

    def on_window(self, run, figures):
        run.log("loss", figures["train/loss"])
        self.calls.append(("window", run.step, run.epoch))

    def on_epoch(self, run, evaluation):
        run.log("top1", evaluation.top1)
        self.calls.append(("epoch", run.step, run.epoch))

    def on_end(self, run):
        run.log("weights", sum(weight.numel() for weight in run.network.parameters()))
        self.calls.append(("end", run.step, run.epoch))


class Misspelt:
    def on_batch(self, run):
        pass


class Empty:
    pass


class Unmade:
    def __init__(self, wanted):
        pass


class Fails:
    def on_step(self, run):
        if run.step == 3:
            raise ValueError("three")

    def on_window(self, run, figures):
        raise ValueError("later")
"""

pytestmark = pytest.mark.usefixtures("kept_globals")


@pytest.fixture
def module(write_module: Write) -> None:
    """Writes the user's module into the current folder."""
    write_module("mine", MODULE)


def line_of(text: str) -> int:
    """The number of the line of the module in which ``text`` stands first."""
    return MODULE[: MODULE.index(text)].count("\n") + 1


@pytest.mark.slow
@pytest.mark.usefixtures("module")
def test_no_setting_changes_what_is_trained(
    composed: Composed, tmp_path: Path, stop_at: Callable[[int | None], None]
) -> None:
    """One hash with threads, processes, the trainer itself and a stop within an epoch."""
    typed = (*COMMON, *AUGMENT, CALLBACKS)
    for name, *way in (
        ("trainer", "loader.num_workers=0"),
        ("threads", "loader.num_workers=2"),
        ("processes", "loader.num_workers=1", "loader.backend=processes"),
    ):
        run_here(composed(*typed, *way), tmp_path / name)
    stop_at(3)
    run_here(composed(*typed), tmp_path / "parts", stopped=True)
    stop_at(None)
    run_here(composed(*typed, "resume=auto"), tmp_path / "parts")
    names = ("trainer", "threads", "processes", "parts")
    assert len({digest(tmp_path / name) for name in names}) == 1
    run_here(composed(*COMMON, CALLBACKS), tmp_path / "plain")
    assert digest(tmp_path / "plain") != digest(tmp_path / "trainer")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_such_parts_alike(tmp_path: Path) -> None:
    """All parts and a policy, by other backends and stopped within an epoch: one hash."""
    (tmp_path / "mine.py").write_text(MODULE)
    typed = (
        *COMMON, *AUGMENT, "loader.batch_size=128", "augment.auto=trivial", "data.repeats=3",
        "optim.name=mine:Signs", "optim.lr=1e-3", "optim.loss=mine:absolute", "dist=spawn",
        "dist.nprocs=2",
    )  # fmt: skip

    def command(name: str, *more: str) -> None:
        done = trained(tmp_path, *typed, f"run.name={name}", *more, timeout_s=280)
        assert done.returncode == 0, done.stderr

    command("whole", "loader.backend=processes", "loader.num_workers=1")
    command("parts", "loader.backend=threads", "trainer.max_steps=3")
    command("parts", "resume=auto", "loader.num_workers=0")
    outputs = tmp_path / "outputs"
    assert digest(outputs / "parts") == digest(outputs / "whole")


@pytest.mark.usefixtures("module")
def test_a_checkpoint_names_no_code(
    composed: Composed, tmp_path: Path, write_module: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is resumed without the user's parts, unless they are typed, and says so."""
    short = (*COMMON, "loader.num_workers=0", "trainer.max_steps=1")
    run_here(composed(*short, *AUGMENT, CALLBACKS), tmp_path / "run")
    write_module("mine", "raise RuntimeError")
    on = (*short, "trainer.max_steps=2", "resume=auto")
    assert run_here(composed(*on), tmp_path / "run")["steps"] == 2
    told = capsys.readouterr().out
    assert [name in told for name in ("augment.own ", "augment.own_batch ", "callbacks ")] == [
        True
    ] * 3


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("typed", "place"),
    [
        ("augment.own=mine:fails", "return 1 // 0"),
        ("augment.own=mine:nothing", "def nothing"),
        ("augment.own=mine:smaller data.on_error=skip", "def smaller"),
        ("augment.own=mine:other_type", "def other_type"),
        ("augment.own_batch=mine:smaller", "def smaller"),
        ("augment.own_batch=mine:fails", "return 1 // 0"),
        ("optim.name=mine:Broken", 'raise ValueError("no step")'),
        ("callbacks=[mine:Fails]", 'raise ValueError("three")'),
        pytest.param(
            "augment.own=mine:fails loader.backend=processes data.on_error=skip",
            "return 1 // 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_part_that_fails_is_named_with_its_line(
    composed: Composed, tmp_path: Path, typed: str, place: str
) -> None:
    """In one line, with the exit code of settings; an update that is whole is saved."""
    with pytest.raises(ConfigError) as caught:
        run_here(composed(*COMMON, "loader.num_workers=1", *typed.split()), tmp_path / "run")
    said = str(caught.value)
    assert said.startswith(f"{typed.split()[0].replace('[', '').replace(']', '')}: ")
    assert said.endswith(f"(mine.py:{line_of(place)})")
    assert (said.count("\n"), caught.value.exit_code) == (0, 2)
    if "callbacks" in typed:
        record = checkpoint_read.read(tmp_path / "run").record
        assert record is not None and record.step == 3


@pytest.mark.usefixtures("module")
def test_a_function_that_blocks_ends_the_run(composed: Composed, tmp_path: Path) -> None:
    """After loader.timeout_s, with the line that the worker executes."""
    typed = ("augment.own=mine:blocks", "loader.num_workers=1", "loader.timeout_s=0.5")
    with pytest.raises(LoaderError, match=rf"\(mine.py:{line_of('time.sleep(3)')}\)"):
        run_here(composed(*COMMON, *typed), tmp_path / "run")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("name", ["Misspelt", "Empty", "Unmade", "Absent"])
def test_a_class_that_is_no_callback_is_refused(
    composed: Composed, tmp_path: Path, name: str
) -> None:
    """Before training."""
    with pytest.raises(ConfigError, match=f"^callbacks=mine:{name}: "):
        run_here(composed(*COMMON, f"callbacks=[mine:{name}]"), tmp_path / "run")
    assert not lines(tmp_path / "run")


@pytest.mark.parametrize(
    "typed", ["augment.own=absent:f", "augment.own_batch=absent:f", "callbacks=[absent:F]"]
)
def test_a_missing_module_is_refused_at_once(composed: Composed, typed: str) -> None:
    """Before torch is imported."""
    with pytest.raises(ConfigError, match="no module absent"):
        job.check(composed("data=digits", typed))


@pytest.mark.usefixtures("module")
def test_callbacks_are_called_in_order_and_log(composed: Composed, tmp_path: Path) -> None:
    """Their figures reach metrics.jsonl, TensorBoard and the page, those of the end too."""
    typed = ("loader.num_workers=0", "watch.window_steps=4", CALLBACKS)
    report = run_here(composed(*COMMON, *typed), tmp_path / "run")
    steps = [("step", step, 1 + (step > 5)) for step in range(1, 11)]
    for place, name in ((4, "window"), (6, "window"), (7, "epoch")):
        steps.insert(place, (name, 4 if place == 4 else 5, 1))
    steps[11:11] = [("window", 8, 2)]
    steps += [("window", 10, 2), ("epoch", 10, 2), ("end", 10, 2)]
    calls = sys.modules["mine"].Log.calls
    assert calls == [("start", 0, 0), (0, 1, "cpu", 10, 0), *steps]
    found = lines(tmp_path / "run")
    windows = [line for line in found if "user/step" in line]
    assert [line["user/step"] for line in windows] == [4, 5, 8, 10]
    assert [line["user/loss"] == line["train/loss"] for line in windows] == [True] * 4
    top1 = [line["user/top1"] for line in found if "user/top1" in line]
    assert top1 == [line["val/top1"] for line in found if "val/top1" in line]
    assert [line["step"] for line in found if "user/weights" in line] == [10]
    assert wrong_lines(tmp_path / "run") == []
    events = event_accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    assert {"user/step", "user/top1", "user/weights"} <= {*events.Tags()["scalars"]}
    drawn = course(read_windows(tmp_path / "run" / "metrics.jsonl"), 400)
    assert drawn is not None and drawn["columns"]["user/step"]["mean"][-1] == 10
    assert {"callbacks"} <= report["host_parts_s"].keys()
    assert "callbacks" in {part["name"] for part in report["goodput"]["rest"]}


def test_numbers_of_a_batch_are_each_image_s_own() -> None:
    """In [0, 1), the same in any batch, others in another call, epoch or seed."""

    def rng(*indices: int, seed: int = 0, epoch: int = 0) -> BatchRng:
        batch = SimpleNamespace(indices=torch.tensor(indices), epoch=epoch)
        return BatchRng(seed, batch, torch.device("cpu"))

    whole = rng(3, 8).uniform(3)
    assert (whole.dtype, whole.shape) == (torch.float32, (2, 3))
    parts = rng(8, 5, 3)
    first, second = parts.uniform(1), parts.uniform(2)
    assert torch.equal(torch.cat((first, second), dim=1)[[2, 0]], whole)
    others = [rng(3, 8, seed=1).uniform(3), rng(3, 8, epoch=1).uniform(3)]
    assert not any((whole == other).any() for other in others)
    many = rng(*range(4096)).uniform(256)
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 1e-3


@pytest.mark.usefixtures("module")
def test_the_stage_is_timed_and_arrays_are_left_out(composed: Composed) -> None:
    """The function is a stage of loading; no array holds what it makes."""
    typed = (*COMMON, "augment.crop=center", "loader.autotune=true", "loader.backend=auto")
    world = World(0, 1, 0, 1, torch.device("cpu"))
    chosen = []
    for more in (), ("augment.own=mine:noise",):
        config = composed(*typed, *more)
        splits = datasets.load(config.data, config.augment, config.seed)
        assert isinstance(splits.train, datasets.ImageDataset)
        has_arrays = "arrays" in Feeds(splits, config, world).backends
        chosen.append((splits.train.stages[3:], has_arrays))
    assert chosen == [((), True), (("augment.own",), False)]
    laps: list[str] = []
    out = np.empty((32, 32, 3), np.uint8)
    splits.train.fill(0, 0, out.transpose(2, 0, 1), laps.append)
    assert laps == ["read", "decode", "resize", "augment.own"]
    with pytest.raises(ConfigError, match="^augment.own="):
        composed(*COMMON, "augment.own=mine:noise", "loader.backend=arrays")
    # an experiment's file also serves its evaluation
    composed("mode=evaluate", "model.weights=x", "callbacks=[mine:Log]")
