"""The command line of ``train.py`` and ``wellfed``: composes settings, starts jobs, tells errors."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness import __version__, answers, job
from harness import config as schema
from harness.runtime import folder, launch, signals
from harness.runtime.errors import printable, tell, tell_crashes, told
from harness.watch.figures import Tag

_failed: list[BaseException] = []  # of the jobs in this process
_settings: list[schema.Config] = []  # of this process' only run, once they are checked


def command() -> NoReturn:
    """Do what the command line says, and end this process.

    It says ``page``, ``compare`` or ``--version``; anything else is a run or a sweep.
    """
    first = sys.argv[1] if len(sys.argv) > 1 else None
    if "--version" in sys.argv:
        print(answers.version(__version__))
        sys.exit()
    if first == "page":
        from harness.page import __main__ as page

        sys.exit(page.main(sys.argv[2:]))
    if first == "compare":
        from harness.compare import __main__ as compare

        sys.exit(compare.main(sys.argv[2:]))
    with signals.caught(grace_s=0):
        signals.leave(cli())


def cli() -> int:
    """Run what the command line asks for and tell every error, in one line where its cause is
    known; the exit code.

    Called where signals are caught.
    """
    tell_crashes()
    _settings.clear()
    os.environ.setdefault(
        "HYDRA_FULL_ERROR", "1"
    )  # Hydra then raises what is wrong with the settings
    schema.register()
    OmegaConf.register_new_resolver("wellfed.run_dir", _run_folder)
    OmegaConf.register_new_resolver("wellfed.sweep_dir", folder.sweep_folder, use_cache=True)
    if not folder.is_first_rank():
        sys.argv.append("hydra.output_subdir=null")  # the first rank writes it for all
    if "hydra/sweeper=optuna" in sys.argv and not any(
        text.startswith("hydra.sweeper.direction=") for text in sys.argv
    ):
        sys.argv.append("hydra.sweeper.direction=maximize")  # what a job returns is its best top-1
    ended: list[BaseException] = []
    # Applied here, and not as a decorator: launchers then send ``main`` by its name.
    composing = hydra.main(version_base="1.3", config_path=str(schema.CONF), config_name="config")
    try:
        sys.argv[1:] = schema.prepared(_with_whole_path(sys.argv[1:]))
        composing(main)()
    except (Exception, KeyboardInterrupt) as error:
        ended.append(error)
    return tell(_failed or ended)


def _with_whole_path(arguments: list[str]) -> list[str]:
    """``arguments`` with a whole ``--config-path``: Hydra would look for it beside this file.

    It is in the current folder, or else where ``conf/`` is.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-path", "-cp")
    known, rest = parser.parse_known_args(arguments)
    # pkg://... is Hydra's
    if known.config_path is None or "://" in known.config_path:
        return arguments
    here = Path.cwd() / known.config_path
    beside = schema.CONF.parent / known.config_path
    return [f"--config-path={beside if beside.is_dir() and not here.is_dir() else here}", *rest]


def main(composed: DictConfig) -> float | None:
    """One job as Hydra composed it; a sweep's job has a process of its own.

    Returns the best top-1, for sweepers.
    """
    chosen, began_s = HydraConfig.get(), time.perf_counter()
    place, sweep = Path(chosen.runtime.output_dir), chosen.mode is RunMode.MULTIRUN
    try:
        signals.check()
        work = job.Job(
            _checked(composed) if sweep else _single(composed),
            place,
            schema.typed(chosen),
            began_s if sweep else launch.began_s(),
        )
        if folder.is_first_rank():
            print(f"run folder: {printable(os.path.relpath(place))}\nloading torch ...", flush=True)
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


def _run_folder(
    name: str | None, resume: str | None, mode: schema.Mode, *, _root_: DictConfig
) -> str:
    """Returns the folder of a single run, which is made once the settings are found to be good."""
    _single(_root_)
    return _folder(name, resume, mode)


@functools.cache
def _folder(name: str | None, resume: str | None, mode: schema.Mode) -> str:
    # Hydra asks more than once
    return folder.run_folder(name, resume, mode)


def _single(composed: DictConfig) -> schema.Config:
    """Returns the settings of this process' only run, checked once."""
    if not _settings:
        _settings.append(_checked(composed))
    return _settings[0]


def _checked(composed: DictConfig) -> schema.Config:
    config = schema.load(composed)
    job.check(config)
    return config


def _best_top1(place: Path) -> float | None:
    """Returns the highest validation top-1 of the run in ``place``, 0..1; None: it had no
    evaluation.
    """
    metrics = place / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return max(
        (line[Tag.VAL_TOP1] for line in map(json.loads, lines) if Tag.VAL_TOP1 in line),
        default=None,
    )
