"""Finds the checkpoint to resume from and restores its settings, weights and state."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch

from ..config import Config, DataConfig, Mode, adopted, shown, walk
from ..data.table import table_path
from ..feed.order import EpochRemainder, Lanes, Order
from ..monitor.console import say
from ..runtime import launch, user_code
from ..runtime.distributed import World
from ..runtime.errors import CheckpointError, listed
from ..runtime.folder import log
from . import checkpoint_read, models
from .checkpoint_read import NoCheckpoint, Saved
from .state import TrainState

_NETWORK = ("model.name", "model.args", "trainer.precision", "trainer.channels_last")
# settings that affect training; their differences are reported
_TRAINS = (
    *_NETWORK,
    "data.",
    "augment.",
    "optim.",
    "schedule.",
    "seed",
    "loader.batch_size",
    "loader.order",
    "loader.lanes",
    "loader.window_mb",
    "trainer.accumulate_steps",
    "trainer.epochs",
    "callbacks",
)
# modes that apply a trained network
_APPLIES = (Mode.evaluate, Mode.predict, Mode.export)
# data.* settings for unreadable images; their differences are not reported
_COMMANDS = {"data.on_error", "data.max_bad_fraction"}
# data.* settings that determine a network's input pixels
PIXELS = {*models.EXPECTED, "data.exif_orientation", "data.background"}
# data.* settings that select the evaluated images
_IMAGES = (
    "data.name", "data.root", "data.md5", "data.table", "data.columns.", "data.split_fraction",
    "data.fold", "data.generate.", "data.train ", "data.val ",
)  # fmt: skip


def find(config: Config, folder: Path, world: World) -> Saved | None:
    """Returns the checkpoint specified by ``resume``, or ``model.weights`` if nothing is trained.

    The first rank whose folder has the newest checkpoint reads it for all. Returns None if training
    starts from scratch.

    Raises:
        CheckpointError: the checkpoint is missing or corrupt.
        ConfigError: this network has no pretrained weights, or they cannot be downloaded.
    """
    applies = config.mode in _APPLIES
    if config.resume is None:
        if not applies or config.model.weights is None:
            return None
        return models.saved(config.model, config.data.image_size)
    path = folder if config.resume == "auto" else Path(config.resume)
    # if nodes do not share a folder, another rank may have saved
    past = checkpoint_read.records(path / "checkpoints")
    newest = world.gathered([each.step for each in past[-1:]])
    parts = attrgetter("where", "state", "in_run", "record")
    try:
        return Saved(
            *world.shared(newest.index(max(newest)), lambda: parts(checkpoint_read.read(path)))
        )
    except NoCheckpoint:
        if applies or config.resume != "auto":
            raise
    say("resume=auto: no checkpoint yet, starting at epoch 1")
    return None


def settings(
    config: Config,
    saved: Saved | None,
    typed: tuple[str, ...],
    ranks: int = 1,
    tell: Callable[[str], None] = say,
) -> Config:
    """Returns ``config`` with the settings from the checkpoint or, without one, pretrained weights.

    If nothing is trained, the checkpoint determines the settings that affect the result. Training
    uses its own settings but keeps the effective batch size: with a different number of ``ranks``,
    ``trainer.accumulate_steps`` or ``loader.batch_size`` changes if both match the checkpoint.
    Pretrained weights determine the image settings. Command-line settings (``typed``, such as
    ``data.image_size=48``) take precedence. ``tell`` receives every difference.

    Raises:
        CheckpointError: the checkpoint's settings cannot be used.
        ConfigError: there are no pretrained weights, or a typed setting conflicts with them.
    """
    model = config.model
    kept = set(map(launch.setting, typed))
    # data.columns={image: NAME} sets data.columns.image, and its siblings to their defaults
    whole = tuple(f"{launch.setting(each)}." for each in typed if "={" in each)
    kept |= {path for path, _, _ in walk(config) if path.startswith(whole)}
    if saved is None:
        # an evaluated checkpoint has its own settings
        if (config.resume and config.mode is not Mode.train) or not models.are_published(model):
            return config
        size = config.data.image_size if "data.image_size" in kept else None
        theirs = models.expected(model.name, size)
        return adopted(config, theirs, kept, f"the weights of {model.name}", tell)
    if config.mode in _APPLIES:
        return _applied(config, saved, kept, tell)
    trained = saved.trained
    if trained is None:
        return config
    theirs = {
        path: value
        for path, value, _ in walk(trained)
        if path.startswith(_TRAINS) and path not in _COMMANDS
    }
    used = adopted(config, theirs, theirs, "the checkpoint", tell)
    before = saved.state.get("ranks", ranks)
    batch = used.loader.batch_size
    each = used.trainer.accumulate_steps
    same = (batch, each) == (trained.loader.batch_size, trained.trainer.accumulate_steps)
    if ranks != before and same:
        images = batch * each * before
        if images % (batch * ranks) == 0:
            each = images // (batch * ranks)
        elif images % (each * ranks) == 0:
            batch = images // (each * ranks)
        tell(
            f"checkpoint: {before} ranks, now {ranks}: using loader.batch_size={batch} "
            f"trainer.accumulate_steps={each}: effective batch size {batch * each * ranks} "
            f"(was {images})"
        )
        used.loader.batch_size = batch
        used.trainer.accumulate_steps = each
    return used


def _applied(config: Config, saved: Saved, kept: set[str], tell: Callable[[str], None]) -> Config:
    """Returns ``config`` with the pixel and network settings from ``saved``, except those ``kept``.

    In a run folder, the checkpoint also decides which images are evaluated: these are read, but
    neither downloaded nor generated.
    """
    trained = saved.trained
    if trained is None:
        if not models.are_published(config.model):
            tell(
                f"{saved.where} contains no settings; data.*, model.name and trainer.precision "
                "are taken from this command"
            )
        return config
    reads = saved.in_run and config.mode is Mode.evaluate
    compared = (*PIXELS, *_NETWORK, *(_IMAGES if reads else ()))
    theirs = {path: value for path, value, _ in walk(trained) if f"{path} ".startswith(compared)}

    # chosen on the command line through a group
    if kept & {"model", "experiment"}:
        kept.add("model.name")
    if kept & {"data", "data.name", "experiment"} and config.data.name != trained.data.name:
        # other images: this command locates them, and the checkpoint determines their pixels
        kept |= {path for path, _, _ in walk(config) if path.startswith("data.")} - PIXELS
    located = {
        name: getattr(config.data, name) for name in ("root", "table") if f"data.{name}" in kept
    }
    if _place(replace(trained.data, **located)) != _place(trained.data):
        # no image from another folder or table was used for training
        kept |= {"data.split_fraction", "data.fold", "data.folds", "data.columns.group"}
        if "data.evaluate" not in kept:
            kept.add("data.columns.split")

    lines: list[str] = []
    used = adopted(config, theirs, kept, "the checkpoint", lines.append)
    typed_data = {"data", "data.name", "data.root", "experiment"} & kept
    if config.mode is Mode.evaluate and not (saved.in_run or typed_data):
        raise CheckpointError(
            f"{saved.where} is not in a run folder, so specify the images too. Its run used "
            f"data.name={trained.data.name} data.root={shown(trained.data.root)}"
        )
    if reads and not {"data.root", "data.download"} & kept:
        used.data.download = False
    # a shared file must not choose the code that is imported and called here
    needed = [
        f"{path}={name}"
        for path in ("model.name", "data.name")
        if ":" in (name := attrgetter(path)(used)) and name != attrgetter(path)(config)
    ]
    if needed:
        raise CheckpointError(
            f"{saved.where} needs your code; if you trust it, add {' '.join(needed)} (for "
            f"wellfed.load, model_name={used.model.name!r})"
        )
    for line in lines:
        tell(line)
    # no file is read; DEFAULT determines how googlenet and inception_v3 are built
    used.model.weights = "DEFAULT" if trained.model.weights == "DEFAULT" else saved.where
    return used


def _place(data: DataConfig) -> tuple[str, str]:
    """Returns the resolved paths of the image folder and the table."""
    root = os.path.realpath(os.path.expanduser(str(data.root)))
    return root, os.path.realpath(table_path(root, data))


def take_over(
    state: TrainState,
    saved: Saved | None,
    classes: tuple[str, ...],
    length: int,
    lanes: Lanes | None = None,
) -> EpochRemainder | None:
    """Loads ``saved`` into ``state``; returns the rest of its epoch, if any.

    ``length`` is the number of training images, and ``lanes`` is their order.

    Raises:
        CheckpointError: ``saved`` does not match this run, or the epoch cannot be resumed. Training
            never starts from scratch instead.
    """
    if saved is None:
        return None
    config = state.config
    held = saved.state
    if saved.classes not in (classes, ()):
        raise CheckpointError(
            f"{saved.where}: its classes differ from this dataset's: {listed(saved.classes)}, "
            f"not {listed(classes)}; choose its dataset with data= and data.root="
        )
    if config.mode is Mode.evaluate:
        models.take_over(state.network, saved, f"model.name={config.model.name}")
        state.epoch = held.get("epoch", 0)
        state.step = held.get("step", 0)
        say(f"evaluating {saved.where}")
        return None
    state.load(saved)
    threads = (held.get("num_threads"), torch.get_num_threads())
    if threads[0] != threads[1]:
        log.warning(
            "the checkpoint's run used %s torch threads, but this run uses %d: results will not be "
            "bitwise identical",
            *threads,
        )
    say(
        f"resumed {saved.where} after step {state.step}, {state.epoch} epochs"
        + f" and {state.samples} images in the next" * bool(state.samples)
    )
    return rest(saved, config, state.world, length, lanes) if state.samples else None


def rest(
    saved: Saved, config: Config, world: World, length: int, lanes: Lanes | None = None
) -> EpochRemainder:
    """Returns the rest of the epoch in which the run was saved.

    ``length`` and ``lanes`` are as in ``take_over``.

    Raises:
        CheckpointError: the images or their order differ, or there are too few samples for the
            ranks.
    """
    held = saved.state
    trained = saved.trained or config
    with user_code.explained(f"{saved.where}: cannot be used:", kind=CheckpointError):
        for name, then, now in (
            ("seed", trained.seed, config.seed),
            ("data.balance", trained.data.balance, config.data.balance),
            ("data.repeats", trained.data.repeats, config.data.repeats),
            ("number of training images", held["length"], length),
            ("loader.order", held.get("lanes", "uniform"), str(lanes or "uniform")),
        ):
            if then != now:
                raise CheckpointError(
                    f"{saved.where}: saved within an epoch with {name}={then}, but this run uses "
                    f"{now}, so the rest of the epoch would have different samples; use the same "
                    "value, an end-of-epoch checkpoint, or a different run.name"
                )
        left = EpochRemainder(held["epoch"], held["samples"], held["stop"])
        # raises if these ranks cannot share the rest
        Order(length, config.loader.batch_size, world_size=world.size, rest=left)
    return left
