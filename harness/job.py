"""One run from its settings to its report, importable by every process that a launcher starts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.config import (
    Backend,
    Config,
    Mode,
    StartMethod,
    TunerName,
    check_names,
    form_asked_for,
)
from harness.runtime import folder, signals, workers
from harness.runtime.errors import CheckpointError, printable


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its settings, its folder, what its command line set, and when it began on
    ``time.perf_counter``.
    """

    config: Config
    folder: Path
    overridden: tuple[str, ...]
    began_s: float = field(default_factory=time.perf_counter)


def check(config: Config) -> None:
    """Refuses names of networks, data sets and files that there are not, before torch is imported.

    Raises:
        ConfigError: there is no such network or data set.
        CheckpointError: there is no such file.
    """
    check_names(config)
    resume, weights = config.resume, config.model.weights
    if resume not in (None, "auto") and not Path(resume).exists():
        raise CheckpointError(f"{printable(resume)}: no such checkpoint")
    # a run that goes on reads no other weights
    if resume is None and weights not in (None, "DEFAULT") and not Path(weights).exists():
        raise CheckpointError(
            f"model.weights={printable(weights)}: no such file; use null, DEFAULT or a path"
        )


def _needs_processes(config: Config) -> bool:
    """Whether worker processes are likely to start; with the data sets here, threads and tuner=auto
    may do without any.
    """
    is_own = ":" in config.data.name
    searched = config.loader.autotune and config.tuner.name is TunerName.grid
    return is_own or searched or form_asked_for(config.loader) is Backend.processes


def main_worker(local_rank: int, job: Job) -> None:
    """One rank of a run, from the data on disk to the report."""
    config = job.config
    if config.loader.start_method is StartMethod.forkserver:
        workers.plan_server(["hydra", "harness.feed.processes", "harness.data.datasets"])
        if _needs_processes(config):
            # while torch is imported here
            workers.start_server()
    from harness.data import datasets
    from harness.diagnose.stage import diagnose
    from harness.feed.forms import Feeds
    from harness.page import link, report
    from harness.runtime import distributed, limits, seeding
    from harness.training import resume
    from harness.training.engine import Engine
    from harness.training.report import Page, Reporter
    from harness.training.saving import Place
    from harness.training.state import make_state
    from harness.training.step import Step
    from harness.training.trial import StepTrials
    from harness.tuning.stage import tuned
    from harness.watch import station

    with (
        distributed.joined(local_rank, config) as world,
        folder.logging_to(job.folder, world.rank),
        station.quiet_ranks(world),
    ):
        signals.set_grace(config.checkpoint.grace_s)
        station.refuse_hidden_gpu(config, world)
        saved = resume.find(config, job.folder)
        config = resume.settings(config, saved, job.overridden)
        seeding.seed_everything(config.seed, config.trainer.deterministic)
        splits = datasets.load(config.data, config.augment, config.seed, world.gathered)
        config, rest = resume.rest(config, saved, world, len(splits.train))
        feeds = Feeds(splits, config, world)
        state = make_state(
            config, len(splits.classes), world, feeds.steps_per_epoch(), filled=saved is not None
        )
        resumed_step = resume.take_over(state, saved, config, world, splits.classes)
        with station.watched(config, world, job.folder, job.began_s, resumed_step) as watch:
            allowed = limits.measure(world.local_size, reserved_bytes=splits.reserved_bytes)
            step, train = Step(state, config, world, len(splits.classes)), feeds.settings(allowed)
            trials, val, found = StepTrials(step, config, world), feeds.val_settings(train), None
            if config.mode is Mode.diagnose:
                diagnose(feeds, trials, allowed, job.overridden, job.folder, watch.board)
                return
            if config.loader.autotune:
                found = tuned(feeds, trials, config, allowed, world, resumed_step)
                train, val = found.told(watch, job.folder)
            if (
                config.mode is Mode.train
                and feeds.on_device(train)
                and not (found and not found.report.reused)
            ):
                # a step first takes what the network needs, so that the images get of the rest;
                # tuning has made steps
                with trials.kept():
                    trials.demand(feeds.noise(train.batch_size), 0.0)
            place = Place(job.folder, splits.classes)
            feed, val_feed = feeds.train(train, rest), feeds.val(val)
            if found is not None:
                found.follow(feed, val_feed, watch, state.step)
            engine = Engine(config, world, step, feed, val_feed, watch, place)
            page, summary = (
                Page(link.pinned_link(), report.write_report),
                found.summary if found else None,
            )
            with Reporter(
                config, job.overridden, summary, allowed.cores, page, splits.cache
            ).reporting(engine):
                engine.fit() if config.mode is Mode.train else engine.evaluate_only()


def run(index: int, job: Job) -> None:
    """One run, in the processes that ``dist=`` asks for; ``index`` is 0."""
    from harness.runtime import distributed

    if folder.is_first_rank():
        folder.own(job.folder)
    with folder.logging_failure(job.folder):
        distributed.launch(main_worker, job, job.config)
