"""Train, evaluate or diagnose an image classifier: composes the settings, starts the jobs and tells every error."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness import config as schema
from harness import job
from harness.runtime import folder, launch, signals
from harness.runtime.errors import printable, tell, tell_crashes, told
from harness.watch.figures import Tag

_failed: list[BaseException] = []  # of the jobs in this process


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """One job as Hydra composed it; a sweep's job has a process of its own. Returns the best top-1, for sweepers."""
    chosen, began_s = HydraConfig.get(), time.perf_counter()
    place, sweep = Path(chosen.runtime.output_dir), chosen.mode is RunMode.MULTIRUN
    try:
        signals.check()
        work = job.Job(schema.load(composed), place, schema.typed(chosen), began_s if sweep else launch.began_s())
        if folder.is_first_rank():
            print(f"run folder: {printable(os.path.relpath(place))}", flush=True)
        if not sweep:
            job.run(0, work)
            return None
        launch.run_processes(job.run, work, 1, work.config.checkpoint.grace_s)
    except (Exception, KeyboardInterrupt) as error:
        if not sweep:
            _failed.append(error)
            return None
        text, code = told(error)
        failure = launch.ProcessError(f"{printable(os.path.relpath(place))}: {text}", code)
        _failed.append(failure)
        # A launcher may have started this process: what is raised reaches the command line's.
        raise failure from error
    return _best_top1(place)


def _best_top1(place: Path) -> float | None:
    """Returns the highest validation top-1 of the run in ``place``, 0..1; None: it had no evaluation."""
    metrics = place / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return max((line[Tag.VAL_TOP1] for line in map(json.loads, lines) if Tag.VAL_TOP1 in line), default=None)


def cli() -> int:
    """Run the command line and tell every error, in one line where its cause is known; the exit code.

    Called where signals are caught.
    """
    tell_crashes()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises what is wrong with the settings
    schema.register()
    OmegaConf.register_new_resolver("wellfed.run_dir", folder.run_folder, use_cache=True)
    OmegaConf.register_new_resolver("wellfed.sweep_dir", folder.sweep_folder, use_cache=True)
    if not folder.is_first_rank():
        sys.argv.append("hydra.output_subdir=null")  # the first rank writes it for all
    if "hydra/sweeper=optuna" in sys.argv and not any(text.startswith("hydra.sweeper.direction=") for text in sys.argv):
        sys.argv.append("hydra.sweeper.direction=maximize")  # what a job returns is its best top-1
    ended: list[BaseException] = []
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        ended.append(error)
    return tell(_failed or ended)


if __name__ == "__main__":
    with signals.caught(grace_s=0):
        signals.leave(cli())
