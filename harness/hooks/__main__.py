"""Runs a training script unchanged and reports its bottleneck.

    wellfed watch train.py --epochs 3
    wellfed watch -m package.train --epochs 3
    torchrun --nproc-per-node=2 -m wellfed watch train.py

The script keeps its output, files, exit code and signals. When it ends, even after Ctrl-C, an
error or SIGTERM, a summary on stderr names the bottleneck, and a folder contains the report.
"""

from __future__ import annotations

import argparse
import builtins
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from .. import BEGAN_S
from ..config import ConfigError
from ..runtime.errors import say, tell
from ..runtime.folder import is_first_rank, new_folder

_PYTHON = re.compile(r"(.*/)?python[\d.]*")
# modules that start a script in other processes
_LAUNCHERS = ("torch.distributed.", "accelerate.", "deepspeed.")


def main(arguments: Sequence[str]) -> int:
    """Runs the script; its exits and errors propagate."""
    parser = argparse.ArgumentParser(
        prog="wellfed watch", description=__doc__, usage="%(prog)s [options] SCRIPT [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("-m", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--out", type=Path, help="folder for the report; default outputs/DATE/TIME")
    parser.add_argument("--no-tensorboard", action="store_true", help="write no event file")
    parser.add_argument("--quiet", action="store_true", help="print nothing before the end")
    parser.add_argument(
        "--try", action="store_true", dest="tries",
        help="run the script for a minute of training, and again for each suggested change",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    typed = parser.parse_args(arguments)
    command = typed.command[typed.command[:1] == ["--"] :]
    if not command:
        parser.error("the following arguments are required: SCRIPT")
    sys.excepthook = _without_us
    try:
        ours = arguments[: len(arguments) - len(typed.command)]
        if launch := _launched(command, ours):
            os.execv(sys.executable, launch)
        module, code = _found(*command, is_module=typed.m)
    except ConfigError as error:
        return tell([error])
    from . import trial

    if typed.tries:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            parser.error("--try runs the script itself, in one process; omit the launcher")
        words = [*(["--no-tensorboard"] * typed.no_tensorboard), *(["-m"] * typed.m), *command]
        return trial.run(words, typed.out or Path(new_folder(Path("outputs"))))
    if is_first_rank():
        say(f"watching {command[0]}; the report follows when it exits")
    from .session import Session

    session = Session(command[0], typed.out, not typed.no_tensorboard, None, BEGAN_S)
    session.tells = not typed.quiet and sys.stderr.isatty()
    session.on_first_update = trial.begin()
    _report_ends(session)
    with session.watching():
        exec(code, vars(module))
    return 0


def _launched(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Returns the command to execute if ``command`` begins with this Python, or an empty list.

    Args:
        command: the script or module, and its arguments.
        options: wellfed options before it.

    Raises:
        ConfigError: it begins with another program; the message contains the command to type.
    """
    first = command[0]
    is_python = _PYTHON.fullmatch(first)
    watch = ["-m", "wellfed", "watch", *(word for word in options if word != "-m")]
    if "-m" in options:
        if not first.startswith(_LAUNCHERS):
            return []
        command = ["python", "-m", *command]
    elif first.endswith(".py") or (os.path.exists(first) and not is_python):
        return []
    if os.path.basename(first).startswith("deepspeed"):
        # DeepSpeed has no short form
        watch[0] = "--module"
    for place, (word, after) in enumerate(pairwise([*command, ""])):
        is_module = word in ("-m", "--module") and not after.startswith(_LAUNCHERS)
        if is_module or (word.endswith(".py") and not word.startswith("-")):
            found = [*command[:place], *watch, *command[place:]]
            own = os.path.realpath(shutil.which(first) or "")
            if is_python and own == os.path.realpath(sys.executable):
                return [sys.executable, *found[1:]]
            raise ConfigError(f"{first} starts the script itself; type {shlex.join(found)}")
    return []


def _found(name: str, *rest: str, is_module: bool) -> tuple[ModuleType, CodeType]:
    """Installs a new ``__main__`` as Python does, and returns it with its code.

    Raises:
        ConfigError: the script or module does not exist.
    """
    path = os.path.join(os.getcwd(), name)
    sys.argv = ["-m" if is_module else name, *rest]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(path if is_module else os.path.realpath(path))
    if is_module:
        dotted = name.removesuffix(".py").replace("/", ".")
        if name != dotted:
            raise ConfigError(f"{name}: -m takes a module; type -m {dotted}")
        try:
            # found in the same way as by pdb
            details = runpy._get_module_details  # type: ignore[attr-defined]
            _, spec, code = details(name, ConfigError)
        except ConfigError as error:
            raise ConfigError(f"-m {name}: {error}; start in the folder that contains it") from None
        module = module_from_spec(spec)
        module.__name__ = "__main__"
        sys.argv[0] = spec.origin
    else:
        code = compile(_source(name), path, "exec", dont_inherit=True)
        module = ModuleType("__main__")
        module.__loader__ = SourceFileLoader("__main__", path)
        vars(module).update(__file__=path, __cached__=None)
    vars(module).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module, code


def _source(name: str) -> bytes:
    """Returns the source of a script.

    Raises:
        ConfigError: it is not a readable Python script.
    """
    path = Path(name)
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{name}: watch a notebook from within: import wellfed, and write `for batch in "
            "wellfed.watched(loader):`"
        )
    why: object = "not a Python script"
    try:
        if path.suffix in ("", ".py", ".pyw"):
            return path.read_bytes()
    except OSError as error:
        why = error.strerror
    raise ConfigError(
        f"{name}: {why}; pass a script that ends in .py, or write `-m wellfed watch` before a "
        "script that another program starts"
    )


def _report_ends(session: Any) -> None:
    """Makes SIGTERM write the report."""

    def stop(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is not stop:
            # the script's own handler called this one, and decides what to do
            session.interrupted = True
            return
        session.finish("interrupted")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # a script's own handler replaces this one
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)


def _without_us(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Prints a script's traceback without the frames from this package and its callers."""
    each: BaseException | None = error
    seen: list[BaseException] = []
    while each is not None and each not in seen:
        seen.append(each)
        each.__traceback__ = _theirs(each.__traceback__)
        each = each.__cause__ or each.__context__
    sys.__excepthook__(kind, error, error.__traceback__)


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Returns a traceback's frames that are outside wellfed."""
    kept: list[TracebackType] = []
    while frames is not None:
        code = frames.tb_frame.f_code
        if code is main.__code__:
            kept.clear()
        elif not code.co_filename.startswith(str(Path(__file__).parents[1])):
            kept.append(frames)
        frames = frames.tb_next
    for frame in reversed(kept):
        frame.tb_next = frames
        frames = frame
    return frames


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
