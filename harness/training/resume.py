"""What a run takes over from a checkpoint: all of it to train on, the network to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn

from harness.config import Config, Mode, adopted, shown, walk
from harness.feed.order import Order, Rest
from harness.runtime import launch
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, listed, printable
from harness.runtime.folder import log
from harness.training import checkpoint, models
from harness.training.checkpoint import Saved
from harness.training.state import TrainState
from harness.watch.console import say

_NETWORK = ("model.name", "trainer.precision", "trainer.channels_last")
# what training goes on by, besides data.* and the network
_TRAINS = (
    "augment.",
    "optim.",
    "schedule.",
    "seed",
    "loader.batch_size",
    "trainer.accumulate_steps",
    "trainer.epochs",
)
# what takes a network from a checkpoint, and trains no more
_APPLIES = (Mode.evaluate, Mode.predict, Mode.export)
# of data.*, what says how long a run puts up with bad images
_COMMANDS = {"data.on_error", "data.max_bad_fraction"}
# of data.*, what a network expects of its images
PIXELS = {*models.EXPECTED, "data.exif_orientation", "data.background"}
# of data.*, which images a run evaluated
_IMAGES = ("data.name", "data.root", "data.md5", "data.split_fraction", "data.generate.")


def find(config: Config, folder: Path) -> Saved | None:
    """Returns what ``resume`` names, or where nothing is trained ``model.weights``.

    None: training starts from nothing.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: there are no published weights of this network, or they cannot be fetched.
    """
    applies = config.mode in _APPLIES
    weights = config.model.weights
    if config.resume == "auto":
        found = checkpoint.newest(folder / "checkpoints")
    elif config.resume is not None:
        found = checkpoint.read(Path(config.resume))
    elif applies and weights is not None:
        held = models.held(config.model, config.data.image_size)
        return Saved(f"model.weights={printable(weights)}", held, _in_run(Path(weights)))
    else:
        return None
    if found is not None:
        record, state = found
        return Saved(printable(str(record.path)), state, _in_run(record.path))
    if applies:
        raise CheckpointError(
            f"{printable(str(folder))}: holds no checkpoint; name one with resume=PATH"
        )
    say("resume=auto: no checkpoint yet, starting at epoch 1")
    return None


def _in_run(path: Path) -> bool:
    path = path.resolve()
    return any((place / "train.log").is_file() for place in (path, *path.parents[:2]))


def settings(
    config: Config, saved: Saved, typed: tuple[str, ...], tell: Callable[[str], None] = say
) -> Config:
    """Returns ``config``; where nothing is trained, what decides the result is the checkpoint's.

    That is what decides pixels and the network, and, in a run's folder, which images it evaluated:
    these are read, but neither fetched nor generated. For predictions it is not which images there
    are. What the command line set (``typed``, as in ``data.image_size=48``) stays. Every difference
    is told by ``tell``.

    Raises:
        CheckpointError: the checkpoint's settings cannot be used.
    """
    applies = config.mode in _APPLIES
    trained = saved.trained
    if trained is None:
        if applies and not models.are_published(config.model):
            tell(
                f"{saved.where}: holds no settings; data.*, model.name and trainer.precision are "
                "those of this command"
            )
        return config
    reads = applies and saved.in_run and config.mode is not Mode.predict
    compared = ("data.", *_NETWORK, *_TRAINS)
    if applies:
        compared = (*PIXELS, *_NETWORK, *(_IMAGES if reads else ()))
    theirs = {
        path: value
        for path, value, _ in walk(trained)
        if path.startswith(compared) and path not in _COMMANDS
    }
    kept = _chosen(config, trained, typed) if applies else {*theirs}
    used = adopted(config, theirs, kept, "the checkpoint", tell)
    typed_data = {"data", "data.name", "data.root", "experiment"} & kept
    if config.mode is Mode.evaluate and not (saved.in_run or typed_data):
        raise CheckpointError(
            f"{saved.where}: is in no run's folder, so name the images, too. Those of its run: "
            f"data.name={trained.data.name} data.root={shown(trained.data.root)}"
        )
    if reads and not {"data.root", "data.download"} & kept:
        used.data.download = False
    for path in ("model.name", "data.name"):
        # a file that somebody gave away must not name what is imported and called here
        name = attrgetter(path)(used)
        if ":" in name and name != attrgetter(path)(config):
            raise CheckpointError(
                f"{saved.where}: needs code of yours; add {path}={name} if you trust it"
            )
    if applies:
        # no file is read: DEFAULT decides how googlenet and inception_v3 are built
        used.model.weights = "DEFAULT" if trained.model.weights == "DEFAULT" else saved.where
    return used


def _chosen(config: Config, trained: Config, typed: tuple[str, ...]) -> set[str]:
    """Returns the settings that the command line chose, by themselves or with their group."""
    chosen = set(map(launch.setting, typed))
    if chosen & {"model", "experiment"}:
        chosen.add("model.name")
    if chosen & {"data", "data.name", "experiment"} and config.data.name != trained.data.name:
        # other images: where they lie is this command's, what the network expects of them stays
        chosen |= {path for path, _, _ in walk(config) if path.startswith("data.")} - PIXELS
    roots = [Path(str(each.data.root)).expanduser().resolve() for each in (config, trained)]
    if "data.root" in chosen and roots[0] != roots[1]:
        # nothing of another tree was trained on
        chosen.add("data.split_fraction")
    return chosen


def rest(config: Config, saved: Saved, world: World, length: int) -> tuple[Config, Rest | None]:
    """Returns the settings with the checkpoint's global batch, and the rest of its epoch.

    Another number of ranks changes ``trainer.accumulate_steps`` or ``loader.batch_size`` where both
    are as they were, so that an update still has as many images. ``length`` is the number of
    training images. The rest is None for a checkpoint of an epoch's end.

    Raises:
        CheckpointError: the epoch cannot be continued: other images, another order, or too few
            samples for the ranks.
    """
    if config.mode is not Mode.train or "ranks" not in saved.state:
        return config, None
    state = saved.state
    trained = saved.trained or config
    with saved.in_use():
        config = _same_update(config, trained, state["ranks"], world.size)
        if not state["samples"]:
            return config, None
        for name, then, now in (
            ("seed", trained.seed, config.seed),
            ("data.balance", trained.data.balance, config.data.balance),
            ("number of training images", state["length"], length),
        ):
            if then != now:
                raise CheckpointError(
                    f"{saved.where}: was saved within an epoch; its {name} is {then}, this run's "
                    f"{now}: the rest of the epoch would be of other samples; go on with the same, "
                    "or from a checkpoint of an epoch's end"
                )
        left = Rest(state["epoch"], state["samples"], state["stop"])
        # an order that cannot be shared by these ranks refuses the rest
        Order(length, config.loader.batch_size, world_size=world.size, rest=left)
    return config, left


def _same_update(config: Config, trained: Config, ranks: int, size: int) -> Config:
    """Returns ``config`` for ``size`` ranks, with the images per update of ``ranks`` before."""
    batch = config.loader.batch_size
    parts = config.trainer.accumulate_steps
    before = (trained.loader.batch_size, trained.trainer.accumulate_steps)
    if ranks == size or (batch, parts) != before:
        return config
    images = batch * parts * ranks
    if images % (batch * size) == 0:
        parts = images // (batch * size)
    elif images % (parts * size) == 0:
        batch = images // (parts * size)
    say(
        f"checkpoint: {ranks} ranks, now {size}: loader.batch_size={batch} "
        f"trainer.accumulate_steps={parts}: an update has {batch * parts * size} images, before "
        f"{images}"
    )
    same = copy.deepcopy(config)
    same.loader.batch_size = batch
    same.trainer.accumulate_steps = parts
    return same


def take_over(
    state: TrainState, saved: Saved | None, config: Config, world: World, classes: tuple[str, ...]
) -> int | None:
    """Puts what ``saved`` holds into ``state``; returns the step to go on from, if any.

    Raises:
        CheckpointError: it does not fit, or the ranks do not see the same checkpoint. Training
            never starts from nothing in its place.
    """
    if saved is not None:
        held = saved.state
        if saved.classes not in (classes, ()):
            raise CheckpointError(
                f"{saved.where}: its classes are not this data set's: {listed(saved.classes)}, not "
                f"{listed(classes)}; choose its data set with data= and data.root="
            )
        if config.mode is Mode.evaluate:
            fill(state.network, saved, config.model.name)
            state.epoch = held.get("epoch", 0)
            state.step = held.get("step", 0)
            say(f"evaluating {saved.where}")
        else:
            state.load(saved)
            threads = (held.get("num_threads"), torch.get_num_threads())
            if threads[0] != threads[1]:
                log.warning("saved with %s torch threads, now %d: not bitwise the same", *threads)
            say(
                f"resumed {saved.where} after step {state.step}, {state.epoch} epochs and "
                f"{state.samples} images"
            )
    if len({*world.gathered(state.step)}) > 1:
        raise CheckpointError(
            "the ranks see different checkpoints; the run folder must be shared by all nodes"
        )
    return state.step if config.resume is not None else None


def fill(network: nn.Module, saved: Saved, name: str) -> None:
    """Puts the weights in ``saved`` into ``network``, which ``model.name`` names.

    Raises:
        CheckpointError: there are none, or they do not fit.
    """
    weights = checkpoint.weights_of(saved.state, saved.where)
    models.take_over(network, weights, f"{saved.where}: does not fit model.name={name}")
