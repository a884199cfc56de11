"""What a run takes over from a checkpoint: the whole state to go on training, the network to evaluate."""

from __future__ import annotations

import copy
import logging
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness.config import Config, Mode, from_plain, shown, to_plain, walk
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.folder import LOGGER
from harness.training import checkpoint, models
from harness.training.state import TrainState
from harness.watch.console import say

_NETWORK = {"model.name", "trainer.precision", "trainer.channels_last"}
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
    """Returns what ``resume`` names, or in evaluation ``model.weights``; None: training starts from nothing.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: there are no published weights of this network, or they cannot be fetched.
    """
    if config.resume == "auto":
        found = checkpoint.newest(folder / "checkpoints")
        if found is None:
            if config.mode is Mode.evaluate:
                raise CheckpointError(f"{printable(str(folder))}: holds no checkpoint; name one with resume=PATH")
            say("resume=auto: no checkpoint yet, starting at epoch 1")
            return None
        record, state, damaged = found
        for text in damaged:
            _log.warning("%s; falling back to %s", text, record.path.name)
        return Saved(printable(str(record.path)), state)
    if config.resume is not None:
        record, state = checkpoint.read(Path(config.resume))
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
    """Returns ``config``; in evaluation, with what decides pixels, labels and the network from the checkpoint.

    What the command line set (``typed``, such as ``data.image_size=48``) stays. Every difference is printed.

    Raises:
        CheckpointError: the checkpoint's settings cannot be used.
    """
    evaluating = config.mode is Mode.evaluate
    if saved is None or "settings" not in saved.state:
        if saved is not None and evaluating:
            say(f"{saved.where}: holds no settings; data.*, model.name and trainer.precision are those of this command")
        return config
    try:
        trained = from_plain(saved.state["settings"])
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{saved.where}: its settings cannot be used: {error}") from error
    used, taken = copy.deepcopy(config), []
    kept = _kept(config, trained, typed)
    theirs = {path: value for path, value, _ in walk(trained)}
    for path, own, _ in walk(config):
        if own == theirs[path] or not (path.startswith("data.") or path in _NETWORK):
            continue
        if evaluating and path not in kept:
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


def take_over(state: TrainState, saved: Saved | None, config: Config, world: World, classes: tuple[str, ...]) -> int | None:
    """Puts what ``saved`` holds into ``state``; returns its step, None where training starts anew.

    Raises:
        CheckpointError: it does not fit, or the ranks do not see the same. Training never starts anew in its place.
    """
    if saved is not None:
        trained = tuple(saved.state.get("classes", classes))
        if trained != classes:
            raise CheckpointError(
                f"{saved.where}: its classes are not this data set's: {_listed(trained)}, not {_listed(classes)}; "
                "choose its data set with data= and data.root="
            )
        if config.mode is Mode.evaluate:
            weights = checkpoint.weights_of(saved.state, saved.where)
            models.take_over(state.network, weights, f"{saved.where}: does not fit model.name={config.model.name}")
            if "settings" in saved.state:
                state.epoch, state.step = int(saved.state["epoch"]), int(saved.state["step"])
            say(f"evaluating {saved.where}")
        else:
            state.load_dict(saved.state, saved.where, config.trainer.precision)
            threads = saved.state.get("num_threads")
            if threads != torch.get_num_threads():
                _log.warning("saved with %s torch threads, now %d: not bitwise the same", threads, torch.get_num_threads())
            say(f"resumed {saved.where}: {state.epoch} epochs and {state.step} steps are done")
    if world.smallest(state.step) != world.largest(state.step):
        raise CheckpointError("the ranks see different checkpoints; the run folder must be shared by all nodes")
    return state.step if state.step else None


def _listed(names: tuple[str, ...]) -> str:
    return printable(", ".join(names[:5]) + (f" ... ({len(names)})" if len(names) > 5 else ""))
