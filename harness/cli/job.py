"""Runs one job: checks its settings, starts its ranks and connects the packages."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config as schema
from ..config import BackendName, Config, ConfigError, DistName, Mode, OnError, StartMethod, Wandb
from ..runtime import folder, signals, user_code, workers
from ..runtime.errors import CheckpointError, printable

if TYPE_CHECKING:
    from ..feed.feeds import Feeds
    from ..runtime.distributed import World
    from ..training.checkpoint_read import Saved
    from ..tuning.tuner import Tuned


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        config: its settings.
        folder: the folder for its files.
        overridden: its command-line overrides.
        written: the files in ``.hydra/`` by name, as YAML.
        began_s: its start time, on ``time.perf_counter``.
    """

    config: Config
    folder: Path
    overridden: tuple[str, ...]
    written: Mapping[str, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def goes_on(self) -> bool:
        """Whether the folder may contain a run to resume."""
        return self.config.mode is Mode.train and self.config.resume is not None


def check(config: Config) -> None:
    """Checks the names of networks, datasets and files without importing torch.

    Raises:
        ConfigError: a network or dataset does not exist, or ``dist`` does not fit the launcher.
        CheckpointError: a file does not exist.
        DataError: ``data.root`` is not a folder.
    """
    _check_launcher(config.dist.name)
    schema.check_names(config)
    for setting in user_code.PARTS:
        user_code.check(setting, attrgetter(setting)(config))
    for name in config.callbacks:
        user_code.check("callbacks", name)
    if config.watch.wandb is not Wandb.disabled:
        schema.installed("wandb", f"watch.wandb={config.watch.wandb.name}")
    root = config.data.root
    kinds = ("imagefolder", "imagenet", "table", "shards")
    if root is not None and config.data.name in kinds and "://" not in root:
        folder.check_folder(root)
    resume = config.resume
    weights = config.model.weights
    # the first rank reads it for all
    if folder.is_first_rank() and resume not in (None, "auto") and not os.path.exists(resume):
        raise CheckpointError(f"resume={resume}: no such checkpoint; use null, auto or a path")
    # a resumed run ignores the weights
    if resume is None and weights not in (None, "DEFAULT") and not os.path.exists(weights):
        raise CheckpointError(f"model.weights={weights}: no such file; use null, DEFAULT or a path")


def _check_launcher(kind: DistName) -> None:
    """Checks the launcher's variables; unsets what dist=single and dist=spawn would misread."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    if kind is DistName.torchrun:
        for name in (*names, "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            value = os.environ.get(name, "")
            if not value.isdecimal():
                raise ConfigError(
                    f"dist=torchrun: {name}={value} is not a number; start with `torchrun "
                    "--nproc-per-node N train.py ...`"
                )
    elif os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"dist={kind.name}: started by torchrun, but its ranks would not connect; add "
            "dist=torchrun, or unset WORLD_SIZE"
        )
    else:
        for name in (*names, "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)


def run(index: int, job: Job) -> None:
    """Runs one job in the processes that ``dist`` requires; ``index`` is 0."""
    if folder.is_first_rank():
        folder.own(job.folder)
        # hydra.run.dir and a sweep's run.name may specify any folder
        if not job.goes_on:
            folder.refuse_used(job.folder, job.config.mode is Mode.train)
        if not (job.goes_on and (job.folder / ".hydra").exists()):
            folder.write_settings(job.folder, job.written)
        # stdout may be closed
        with suppress(OSError):
            name = printable(os.path.relpath(job.folder))
            print(f"run folder: {name}\nloading torch ...", flush=True)
    from ..runtime import distributed

    with folder.logging_failure(job.folder):
        distributed.launch(main_worker, job, job.config)


def main_worker(local_rank: int, job: Job) -> None:
    """Runs one rank, either in its own process or in this one."""
    config = job.config
    loader = config.loader
    is_own = user_code.is_own(config.data.name)
    # for the fork server, whenever it starts; the transforms in a user's dataset need torchvision,
    # which each worker would otherwise import in every epoch
    preload = ["hydra", "wellfed.feed.processes", "wellfed.data.datasets"]
    forkserver.set_forkserver_preload(preload + ["torchvision"] * is_own)
    processes = is_own or schema.named_backend(config) is BackendName.processes
    if processes and loader.num_workers != 0 and loader.start_method is StartMethod.forkserver:
        # starts while torch is imported here
        workers.start_server()
    from ..monitor import console
    from ..monitor.monitor import refuse_hidden_gpu
    from ..runtime import distributed

    joined = distributed.joined(local_rank, config, job.folder)
    with (
        joined as world,
        folder.logging_to(job.folder, world.rank),
        console.speaking(world.is_main),
    ):
        refuse_hidden_gpu(config)
        if config.mode is Mode.verify:
            _verify(world, job)
            return
        from ..runtime import seeding
        from ..training import resume

        # before any use of the settings, and identical on every rank
        config = resume.settings(config, None, job.overridden)
        saved = resume.find(config, job.folder, world)
        if saved:
            config = resume.settings(config, saved, job.overridden, world.size)
        seeding.seed_everything(config.seed, config.trainer.deterministic)
        work = _apply if config.mode in (Mode.predict, Mode.export) else _wire
        work(world, replace(job, config=config), saved)


def _feeds(config: Config, saved: Saved | None, world: World) -> Feeds:
    """Opens the dataset."""
    from ..data import datasets
    from ..feed.feeds import Feeds

    # storage -> decode -> augment
    if config.mode is Mode.evaluate and saved:
        splits = datasets.load_evaluated(config.data, config.seed, saved.classes)
    else:
        splits = datasets.load(config.data, config.augment, config.seed, world.gathered)
    # order -> load -> pin -> copy
    return Feeds(splits, config, world)


def _verify(world: World, job: Job) -> None:
    """Reads every image in the dataset."""
    from ..data import datasets
    from ..diagnose.verify import verify
    from ..feed.feeds import Feeds
    from ..runtime import limits

    config = job.config
    signals.set_grace(config.checkpoint.grace_s)
    if user_code.is_own(config.data.name):
        # opening the dataset must not fail at the first bad sample
        config = replace(config, data=replace(config.data, on_error=OnError.skip))
    splits, sets = datasets.load_sets(config.data, config.seed, world.gathered)
    feeds = Feeds(splits, config, world)
    verify(feeds, sets, feeds.settings(limits.measure(world.local_size)), job.folder)


def _apply(world: World, job: Job, saved: Saved | None) -> None:
    """Predicts with a checkpoint's network or exports it."""
    from ..inference.loaded import export
    from ..inference.predict import predict

    # resume.find raises if there is none
    assert saved is not None
    signals.set_grace(job.config.checkpoint.grace_s)
    if job.config.mode is Mode.export:
        export(saved, job.config, job.folder)
    else:
        predict(saved, job.config, world, job.folder)


def _wire(world: World, job: Job, saved: Saved | None) -> None:
    """Connects the packages in data-flow order, from the disk to the report."""
    from ..monitor.monitor import watched
    from ..report.reporter import Reporter
    from ..runtime import accelerator, limits
    from ..training import callbacks, resume
    from ..training.engine import Engine
    from ..training.state import make_state
    from ..training.step import Step
    from ..tuning.training_steps import TrainingBenchmark

    config = job.config
    # imports are done, and the code below checks for signals
    signals.set_grace(config.checkpoint.grace_s)
    feeds = _feeds(config, saved, world)
    splits = feeds.splits
    counts = feeds.steps_per_epoch(), feeds.update_images()
    state = make_state(config, len(splits.classes), world, *counts, filled=bool(saved))
    called = callbacks.made(config.callbacks if config.mode is Mode.train else ())
    rest = resume.take_over(state, saved, splits.classes, len(splits.train), feeds.lanes)
    resumed = None if config.resume is None else state.step
    allowed = limits.measure(world.local_size, reserved_bytes=splits.reserved_bytes)
    first = schema.train_size(config.data, state.epoch)
    # the first size comes last, because the feeds keep the last one
    sizes = [*sorted({*schema.train_sizes(config.data)} - {first}), first]
    plans = {size: feeds.resize(size).settings(allowed) for size in sizes}
    val = feeds.val_settings(plans[first])
    signals.check()
    with watched(config, world, job.folder, job.began_s, resumed) as monitor:
        step = Step(state, len(splits.classes), splits.class_weights(config.optim))
        trials = TrainingBenchmark(step)
        if config.mode is Mode.diagnose:
            from ..diagnose.diagnosis import diagnose

            diagnose(feeds, trials, allowed, job.overridden, monitor.writer)
            return
        found: dict[int, Tuned] = {}
        for size in sizes if config.loader.autotune else ():
            from ..tuning.tuner import tuned

            found[size] = tuned(feeds.resize(size), trials, config, allowed, world, resumed)
            (report := found[size].report).publish(monitor.writer)
            monitor.timer.mark("tuning")
            plans[size], val = report.settings, report.val
        on_device = plans[first].backend == "arrays" and accelerator.get(world.device).has_streams
        if config.mode is Mode.train and on_device and (not found or report.reused):
            # first, a step allocates the network's memory; images get the rest
            with trials.preserved_state():
                trials.demand(feeds.noise(config.loader.batch_size), 0.0)
        # normalize -> step -> evaluate -> save
        sized = partial(feeds.sized, plans, rest)
        engine = Engine(step, sized, feeds.val(val), monitor, job.folder, splits.classes, called)
        # all checks have passed; a finished run keeps its settings
        if job.goes_on and world.is_main and engine.has_work:
            folder.write_settings(job.folder, job.written)
        if found:
            monitor.on_window.append(lambda *seen: found[engine.size].look(engine, *seen))
        summary = found[first].summary if found else None
        with Reporter(job.overridden, summary, allowed.cores, splits).reporting(engine):
            engine.fit()
