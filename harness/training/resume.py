"""What a run takes over from a checkpoint: the whole state to go on training, the network to
evaluate.
"""

from __future__ import annotations

import copy
import logging
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.config import Config, Mode, from_plain, shown, to_plain, walk
from harness.feed.order import Order, Rest
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.folder import LOGGER
from harness.training import checkpoint, contents, models
from harness.training.state import TrainState
from harness.watch.console import say

_NETWORK = {"model.name", "trainer.precision", "trainer.channels_last"}
# What training goes on by, besides data.* and the network.
_TRAINS = (
    "augment.",
    "optim.",
    "schedule.",
    "seed",
    "loader.batch_size",
    "trainer.accumulate_steps",
    "trainer.epochs",
)
# Of data.*, what a network expects of its images; the rest says which images.
_PIXELS = {
    f"data.{name}"
    for name in ("image_size", "eval_resize", "mean", "std", "exif_orientation", "background", "max_pixels")
}  # fmt: skip

_log = logging.getLogger(LOGGER)


class Saved(NamedTuple):
    """What a file holds: a run's whole state, or weights alone."""

    where: str
    state: dict[str, Any]


def find(config: Config, folder: Path) -> Saved | None:
    """Returns what ``resume`` names, or in evaluation ``model.weights``; None: training starts from
    nothing.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: there are no published weights of this network, or they cannot be fetched.
    """
    if config.resume is not None:
        auto = config.resume == "auto"
        found = (
            checkpoint.newest(folder / "checkpoints")
            if auto
            else checkpoint.read(Path(config.resume))
        )
        if found is None:
            if config.mode is Mode.evaluate:
                raise CheckpointError(
                    f"{printable(str(folder))}: holds no checkpoint; name one with resume=PATH"
                )
            say("resume=auto: no checkpoint yet, starting at epoch 1")
            return None
        record, state, damaged = found
        for text in damaged:
            _log.warning("%s; falling back to %s", text, record.path.name)
        return Saved(printable(str(record.path)), state)
    weights = config.model.weights
    if config.mode is not Mode.evaluate or weights is None:
        return None
    where = f"model.weights={printable(weights)}"
    if weights != "DEFAULT":
        return Saved(where, checkpoint.read_any(Path(weights)))
    models.check(config.model, config.data.image_size)
    return Saved(where, {"model": models.published(config.model.name)})


def settings(config: Config, saved: Saved | None, typed: tuple[str, ...]) -> Config:
    """Returns ``config``; in evaluation, with what decides pixels, labels and the network from the
    checkpoint.

    What the command line set (``typed``, such as ``data.image_size=48``) stays. Every difference is
    printed.

    Raises:
        CheckpointError: the checkpoint's settings cannot be used.
    """
    evaluating = config.mode is Mode.evaluate
    if saved is None or "settings" not in saved.state:
        if saved is not None and evaluating:
            say(
                f"{saved.where}: holds no settings; data.*, model.name and trainer.precision are "
                "those of this command"
            )
        return config
    try:
        trained = _trained(saved.state)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{saved.where}: its settings cannot be used: {error}") from error
    used = copy.deepcopy(config)
    taken = []
    kept = _kept(config, trained, typed)
    theirs = {path: value for path, value, _ in walk(trained)}
    for path, own, _ in walk(config):
        shows = path.startswith("data.") or path in _NETWORK
        if own == theirs[path] or not (shows or (not evaluating and path.startswith(_TRAINS))):
            continue
        if evaluating and path not in kept:
            if path in ("model.name", "data.name") and ":" in theirs[path]:
                # a file that somebody gave away must not name what is imported and called here
                raise CheckpointError(
                    f"{saved.where}: needs code of yours; add {path}={theirs[path]} if you trust it"
                )
            group, _, name = path.rpartition(".")
            setattr(attrgetter(group)(used), name, theirs[path])
            taken.append(f"{path}={shown(theirs[path])}")
        else:
            say(f"checkpoint: {path} {shown(theirs[path])}, now {shown(own)}")
    if taken:
        say(f"from the checkpoint: {' '.join(taken)}")
    if evaluating:
        # It is not read: DEFAULT decides how googlenet and inception_v3 are built.
        used.model.weights = "DEFAULT" if trained.model.weights == "DEFAULT" else saved.where
    return from_plain(to_plain(used))


def rest(
    config: Config, saved: Saved | None, world: World, length: int
) -> tuple[Config, Rest | None]:
    """Returns the settings with the checkpoint's global batch, and what is left of the epoch that
    it was saved in.

    Another number of ranks changes ``trainer.accumulate_steps`` or ``loader.batch_size`` where both
    are as they were, so that an update still has as many images. ``length`` is the number of
    training images.

    Raises:
        CheckpointError: the epoch cannot be continued: other images, another order, or too few
            samples for the ranks.
    """
    if saved is None or config.mode is not Mode.train or "ranks" not in saved.state:
        return config, None
    state = saved.state
    contents.check(state, saved.where)
    config = _same_update(config, _trained(state), state["ranks"], world.size)
    if not state["samples"]:
        return config, None
    seed = state["settings"]["seed"]
    for name, then, now in (
        ("seed", seed, config.seed),
        ("number of training images", state["length"], length),
    ):
        if then != now:
            raise CheckpointError(
                f"{saved.where}: was saved within an epoch; its {name} is {then}, this run's "
                f"{now}: the rest of the epoch "
                "would be of other samples; go on with the same, or from a checkpoint of an "
                "epoch's end"
            )
    left = Rest(state["epoch"], state["samples"], state["stop"])
    try:
        Order(length, config.loader.batch_size, world_size=world.size, rest=left)
    except ValueError as error:
        raise CheckpointError(f"{saved.where}: {error}") from error
    return config, left


def _trained(state: dict[str, Any]) -> Config:
    """The settings of the run that saved ``state``; its ``resume=auto`` may be one that only its
    launcher could take.
    """
    return from_plain({**state["settings"], "resume": None})


def _same_update(config: Config, trained: Config, ranks: int, size: int) -> Config:
    """``config`` for ``size`` ranks, with as many images in an update as ``trained`` had on so many
    ``ranks``.
    """
    batch = config.loader.batch_size
    parts = config.trainer.accumulate_steps
    if ranks == size or (batch, parts) != (
        trained.loader.batch_size,
        trained.trainer.accumulate_steps,
    ):
        return config
    images = batch * parts * ranks
    same = copy.deepcopy(config)
    if images % (batch * size) == 0:
        same.trainer.accumulate_steps = images // (batch * size)
    elif images % (parts * size) == 0:
        same.loader.batch_size = images // (parts * size)
    else:
        say(
            f"checkpoint: {ranks} ranks, now {size}: they cannot share {images} images; an update "
            f"has {batch * parts * size}"
        )
        return config
    used = (
        f"loader.batch_size={same.loader.batch_size} "
        f"trainer.accumulate_steps={same.trainer.accumulate_steps}"
    )
    say(
        f"checkpoint: {ranks} ranks, now {size}: {used}, so that an update still has {images} "
        "images"
    )
    return same


def _kept(config: Config, trained: Config, typed: tuple[str, ...]) -> set[str]:
    """The settings that the command line chose, by themselves or with their group."""
    keys = {text.partition("=")[0].lstrip("+") for text in typed}
    kept = set(keys)
    if keys & {"model", "experiment"}:
        kept.add("model.name")
    if keys & {"data", "data.name", "experiment"} and config.data.name != trained.data.name:
        # other images: where they lie is this command's, what the network expects of them stays
        kept |= {path for path, _, _ in walk(config) if path.startswith("data.")} - (_PIXELS - keys)
    return kept


def take_over(
    state: TrainState, saved: Saved | None, config: Config, world: World, classes: tuple[str, ...]
) -> int | None:
    """Puts what ``saved`` holds into ``state``; returns the step to go on from, None for a run that
    begins.

    Raises:
        CheckpointError: it does not fit, or the ranks do not see the same. Training never starts
            anew in its place.
    """
    if saved is not None:
        contents.check(saved.state, saved.where)
        trained = tuple(saved.state.get("classes", classes))
        if trained != classes:
            raise CheckpointError(
                f"{saved.where}: its classes are not this data set's: {_listed(trained)}, not "
                f"{_listed(classes)}; "
                "choose its data set with data= and data.root="
            )
        if config.mode is Mode.evaluate:
            weights = checkpoint.weights_of(saved.state, saved.where)
            models.take_over(
                state.network,
                weights,
                f"{saved.where}: does not fit model.name={config.model.name}",
            )
            if "settings" in saved.state:
                state.epoch = int(saved.state["epoch"])
                state.step = int(saved.state["step"])
            say(f"evaluating {saved.where}")
        else:
            state.load_dict(saved.state, saved.where, config.trainer.precision)
            threads = saved.state.get("num_threads")
            if threads != torch.get_num_threads():
                _log.warning(
                    "saved with %s torch threads, now %d: not bitwise the same",
                    threads,
                    torch.get_num_threads(),
                )
            amid = f", {state.samples} images of the next" if state.samples else ""
            say(
                f"resumed {saved.where}: {state.epoch} epochs{amid} and {state.step} steps are done"
            )
    if world.smallest(state.step) != world.largest(state.step)[0]:
        raise CheckpointError(
            "the ranks see different checkpoints; the run folder must be shared by all nodes"
        )
    return state.step if config.resume is not None else None


def _listed(names: tuple[str, ...]) -> str:
    return printable(", ".join(names[:5]) + (f" ... ({len(names)})" if len(names) > 5 else ""))
