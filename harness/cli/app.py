"""Runs the command line of ``train.py`` and ``wellfed``, and exits with a code."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hydra import version
from hydra._internal.utils import _run_hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from .. import BEGAN_S, __version__
from .. import config as schema
from ..runtime import folder, launch, signals
from ..runtime.errors import described, message, tell, tell_crashes
from ..runtime.files import read_written
from . import compose, job

_COMMANDS = {
    "watch": "hooks.__main__", "page": "report.page.__main__", "compare": "report.compare.__main__",
    "shrink": "data.shrink", "table": "data.table", "pack": "data.pack",
}  # fmt: skip
# errors from the jobs in this process
_failed: list[BaseException] = []
# the checked settings and the folder for this process's only run
_only_run: list[tuple[schema.Config, str]] = []


def command() -> NoReturn:
    """Runs the command line and exits.

    The first argument may be ``page``, ``compare``, ``watch``, ``shrink``, ``table`` or ``pack``.
    Anything except these and ``--version`` starts a run or a sweep.
    """
    for name in ("stdin", "stdout", "stderr"):
        # if it is closed, one of the run's files would get its descriptor
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    arguments = sys.argv[1:]
    if "--version" in arguments:
        # imported here because it takes 30 ms
        from importlib import metadata

        torch = metadata.version("torch")
        print(f"wellfed {__version__}, torch {torch}, Python {platform.python_version()}")
        sys.exit()
    first = arguments[0] if arguments else ""
    if first in _COMMANDS:
        if first in ("page", "compare", "table"):
            # the reader may stop early, like head
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.exit(import_module(f"..{_COMMANDS[first]}", __package__).main(arguments[1:]))
    try:
        with signals.handle_signals(grace_s=0):
            signals.leave(cli())
    except RuntimeError as error:
        # due to a limit on threads or memory
        sys.exit(tell([error]))


def cli() -> int:
    """Runs the command line and reports every error; returns the exit code.

    An error with a known cause is reported in one line. Signals must already be handled.
    """

    def run_folder(*, _root_: DictConfig) -> str:
        # created once the settings are valid; Hydra asks more than once
        if not _only_run:
            config = _checked(_root_)
            place = folder.run_folder(config.run.name, config.resume, config.mode)
            _only_run.append((config, place))
        return _only_run[0][1]

    def sweep_folder(name: str | None) -> str:
        return f"multirun/{name}" if name else str(folder.new_folder(Path("multirun")))

    tell_crashes()
    # makes Hydra raise settings errors
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    OmegaConf.register_new_resolver("wellfed.run_dir", run_folder)
    OmegaConf.register_new_resolver("wellfed.sweep_dir", sweep_folder, use_cache=True)
    version.setbase("1.3")
    read = None
    try:
        read = compose.prepared(sys.argv[1:])
        compose.register(helps=read.help)
        _run_hydra(read, compose.args_parser(), main, str(schema.CONF), "config")
    except SystemExit as ended:
        # with --cfg, no job runs: Hydra has reported an unknown --package
        raise SystemExit(2 if ended.code and read and read.cfg else ended.code) from None
    except BrokenPipeError:
        return tell(_failed) or 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        # a job's own error is more informative
        _failed[:] = _failed or [_composing(error)]
    if compose.sweeps and folder.is_first_rank():
        from ..report import sweep

        sweep.conclude(compose.sweeps[0].hydra.sweep)
    return tell(_failed)


def _composing(error: BaseException) -> BaseException:
    """Returns the exception to report for an ``error`` in Hydra or its callees before any job."""
    if described(error):
        return error
    if isinstance(error, OSError) and error.filename:
        # the folder that hydra.run.dir specifies
        return folder.unusable(Path(error.filename), error)
    why = str(error).partition("\n")[0]
    if isinstance(error, RecursionError):
        why = "circular or too deeply nested defaults in the config files"
    elif not isinstance(error, ValueError | OSError):
        return error
    return schema.ConfigError(f"the settings cannot be read: {why}")


def main(composed: DictConfig) -> float | None:
    """Runs one job composed by Hydra; each job in a sweep has its own process.

    Returns the best top-1 accuracy, for sweepers.
    """
    chosen = HydraConfig.get()
    place = Path(chosen.runtime.output_dir)
    is_sweep = chosen.mode is RunMode.MULTIRUN
    texts = {
        "config.yaml": OmegaConf.to_yaml(composed),
        "hydra.yaml": OmegaConf.to_yaml(HydraConfig.instance().cfg),
        "overrides.yaml": OmegaConf.to_yaml(chosen.overrides.task),
    }
    try:
        signals.check()
        # hydra.job.chdir does not change paths: settings, modules and commands are relative to here
        os.chdir(chosen.runtime.cwd)
        # there is none yet if hydra.run.dir was set
        config = _only_run[0][0] if _only_run and not is_sweep else _checked(composed)
        began_s = time.perf_counter() if is_sweep else BEGAN_S
        work = job.Job(config, place, compose.cli_overrides(chosen), texts, began_s)
        if not is_sweep:
            job.run(0, work)
            return None
        # a user-defined folder may contain an earlier run
        if config.run.name is None and "${wellfed." in OmegaConf.to_yaml(chosen.sweep):
            folder.refuse_auto(config.resume)
        launch.run_processes(job.run, work, 1, config.checkpoint.grace_s)
    except (Exception, KeyboardInterrupt) as error:
        if not is_sweep:
            _failed.append(error)
            # errors in settings, dataset or checkpoint; folders set by the user are kept
            if _only_run and getattr(error, "exit_code", 1) in (2, 3, 4):
                folder.discard(place)
            return None
        from ..report import sweep

        text, code = message(error)
        sweep.report_failure(place, text, compose.cli_overrides(chosen))
        failure = launch.ProcessError(f"{os.path.relpath(place)}: {text}", code)
        _failed.append(failure)
        # a launcher may have started this process; the exception reaches the command line's
        raise failure from error
    return _best_top1(place)


def _checked(composed: DictConfig) -> schema.Config:
    config = schema.load(composed)
    job.check(config)
    return config


def _best_top1(place: Path) -> float | None:
    """Returns the highest validation top-1 of the run in ``place``, 0..1; None if not evaluated."""
    report = place / "report.json"
    best: float | None = read_written(report).get("best_top1") if report.exists() else None
    return best
