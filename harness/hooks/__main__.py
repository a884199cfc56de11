"""Runs a training script unchanged, and reports its bottleneck.

    wellfed watch train.py --epochs 3
    wellfed watch -m package.train --epochs 3
    torchrun --nproc-per-node=2 -m wellfed watch train.py

The script's own output, files, exit code and signals stay. At the end, also after Ctrl-C, an error
or SIGTERM, some lines on stderr say what bounds its training, and a folder has the page.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

from .. import BEGAN_S
from ..config import ConfigError
from ..runtime.errors import printable, tell


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script; its own exit or error leaves this function as it left the script."""
    parser = argparse.ArgumentParser(
        prog="wellfed watch", description=__doc__, usage="%(prog)s [options] SCRIPT [ARGUMENT ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("-m", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("--out", type=Path, help="folder for the report; default outputs/DATE/TIME")
    parser.add_argument("--no-tensorboard", action="store_true", help="write no event file")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    typed = parser.parse_args(arguments)
    try:
        module, code = _found(typed.script, is_module=typed.m)
    except (OSError, SyntaxError, ImportError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return tell([ConfigError(f"{printable(typed.script)}: {why}; give a Python script")])
    from .session import Session

    sys.argv = [module.__file__ or typed.script, *typed.rest]
    sys.modules["__main__"] = module
    session = Session(typed.script, typed.out, not typed.no_tensorboard, BEGAN_S)
    _report_ends(session)
    with session.watching():
        exec(code, module.__dict__)
    return 0


def _found(name: str, *, is_module: bool) -> tuple[ModuleType, CodeType]:
    """Returns a new ``__main__`` for the script, and the script's code."""
    module = ModuleType("__main__")
    if is_module:
        sys.path.insert(0, os.getcwd())
        # as pdb finds it
        _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
        module.__spec__ = spec
        module.__package__ = spec.parent
        module.__file__ = spec.origin
        return module, code
    path = Path(name)
    code = compile(path.read_bytes(), name, "exec", dont_inherit=True)
    module.__file__ = name
    module.__dict__["__builtins__"] = __builtins__
    # as Python itself has it: the script's folder, not the current one
    sys.path[0] = str(path.resolve().parent)
    return module, code


def _report_ends(session: Any) -> None:
    """Has SIGTERM report, and a script's error told as Python tells it."""
    own = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is not stop:
            # the script's own handler calls the one that it found, and decides
            session.interrupted = True
            return
        if os.getpid() == own:
            session.finish("interrupted")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # a script that has a handler of its own puts it in this one's place
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)
    sys.excepthook = _without_us


def _without_us(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Prints a script's error without the frames of this package, and of what ran it."""
    each: BaseException | None = error
    seen: list[BaseException] = []
    while each is not None and each not in seen:
        seen.append(each)
        each.__traceback__ = _theirs(each.__traceback__)
        each = each.__cause__ or each.__context__
    sys.__excepthook__(kind, error, error.__traceback__)


def _theirs(frames: TracebackType | None) -> TracebackType | None:
    """Returns the frames of a traceback that are not ours."""
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
    sys.exit(main())
