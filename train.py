"""Train, evaluate or diagnose an image classifier: composes the settings, then wires the rooms in the order of the data."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness import config as schema
from harness.config import Config, Mode, StartMethod
from harness.runtime import folder, launch, signals, workers
from harness.runtime.errors import printable, tell

_failed: list[tuple[Path, BaseException]] = []  # jobs that did not end well


@dataclass(frozen=True, slots=True)
class Job:
    """One run: its settings, its folder, what its command line set, and when it began on ``time.perf_counter``."""

    config: Config
    folder: Path
    overridden: tuple[str, ...]
    began_s: float = field(default_factory=time.perf_counter)


def main_worker(local_rank: int, job: Job) -> None:
    """One rank of a run, from the data on disk to the report."""
    config = job.config
    if config.loader.start_method is StartMethod.forkserver:
        workers.start_server(["hydra", "harness.feed.processes", "harness.data.datasets"])  # while torch is imported here
    from harness.data import datasets
    from harness.diagnose.stage import diagnose
    from harness.feed.forms import Feeds
    from harness.page import link, report
    from harness.runtime import distributed, limits, seeding
    from harness.training.engine import Engine, Place
    from harness.training.report import Page, Reporter
    from harness.training.state import make_state, resume
    from harness.training.step import Step
    from harness.training.trial import StepTrials
    from harness.tuning.stage import tuned
    from harness.watch import station

    with distributed.joined(local_rank, config) as world, folder.logging_to(job.folder, world.rank), station.quiet_ranks(world):
        station.refuse_hidden_gpu(config, world)
        seeding.seed_everything(config.seed, config.trainer.deterministic)
        splits = datasets.load(config.data, config.augment, config.seed, world.gathered)
        feeds = Feeds(splits, config, world)
        state = make_state(config, len(splits.classes), world, feeds.steps_per_epoch())
        resumed_step = resume(state, config, world, job.folder, splits.classes)
        with station.watched(config, world, job.folder, job.began_s, resumed_step) as watch:
            allowed = limits.measure(world.local_size, reserved_bytes=splits.reserved_bytes)
            step, train = Step(state, config, world, len(splits.classes)), feeds.settings(allowed)
            trials, val, tuning = StepTrials(step, config, world), feeds.val_settings(train), None
            if config.mode is Mode.diagnose:
                diagnose(feeds, trials, allowed, job.overridden, job.folder, watch.board)
                return
            if config.loader.autotune:
                tuning = tuned(feeds, trials, config, allowed, world).told(watch, job.folder)
                train, val = tuning.settings, tuning.val
            engine = Engine(config, world, step, feeds.train(train), feeds.val(val), watch, Place(job.folder, splits.classes))
            page, told = Page(link.pinned_link(), report.write_report), tuning.summary() if tuning else None
            with Reporter(config, job.overridden, told, allowed.cores, page, splits.cache).reporting(engine):
                engine.fit() if config.mode is Mode.train else engine.evaluate_only()


def run(index: int, job: Job) -> None:
    """One run, in the processes that ``dist=`` asks for; ``index`` is 0."""
    from harness.runtime import distributed

    if folder.is_first_rank():
        folder.own(job.folder)
    distributed.launch(main_worker, job, job.config)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> None:
    """One job as Hydra composed it; each job of a sweep has a process of its own. Errors are kept for ``cli``."""
    chosen, began_s = HydraConfig.get(), time.perf_counter()
    place, sweep = Path(chosen.runtime.output_dir), chosen.mode is RunMode.MULTIRUN
    try:
        signals.check()
        job = Job(schema.load(composed), place, schema.typed(chosen), began_s if sweep else launch.began_s())
        if folder.is_first_rank():
            print(f"run folder: {printable(os.path.relpath(place))}", flush=True)
        if sweep:
            launch.run_processes(run, job, 1)
        else:
            run(0, job)
    except (Exception, KeyboardInterrupt) as error:
        _failed.append((place, error))


def cli() -> int:
    """Run the command line and tell every error, in one line where its cause is known; the exit code."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what is wrong with the settings
    schema.register()
    OmegaConf.register_new_resolver("wellfed.run_dir", folder.run_folder, use_cache=True)
    OmegaConf.register_new_resolver("wellfed.sweep_dir", folder.sweep_folder, use_cache=True)
    if not folder.is_first_rank():
        sys.argv.append("hydra.output_subdir=null")  # the first rank writes it for all
    try:
        with signals.caught():
            main()
    except (Exception, KeyboardInterrupt) as error:
        _failed.append((Path(), error))
    return tell(_failed)


if __name__ == "__main__":
    sys.exit(cli())
