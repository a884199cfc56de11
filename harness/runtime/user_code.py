"""Imports and calls user functions, which settings specify as ``module:function``."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .. import suggestions
from ..config import ConfigError
from .errors import RunError, is_out_of_memory, printable, words

# settings that may name a user-defined function
PARTS = (
    "model.name", "data.name", "optim.name", "optim.loss", "augment.own", "augment.own_batch",
)  # fmt: skip
_PACKAGE = str(Path(__file__).parents[1])


def is_own(name: str | None) -> bool:
    """Whether ``name`` is a user function, such as ``my_module:build``, not a built-in name."""
    return ":" in (name or "")


def check(setting: str, name: str) -> None:
    """Rejects a function from a missing module, without importing any module.

    Raises:
        ConfigError: the module is missing; the message names the ``setting``.
    """
    if not is_own(name):
        return
    module = name.partition(":")[0].partition(".")[0]
    _look_here()
    # a loaded module may have no spec
    if module not in sys.modules and not find_spec(module or "?"):
        raise _missing(setting, name, module)


def call(
    setting: str,
    name: str,
    *given: Any,
    args: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Any:
    """Calls the user function ``name`` with ``given``, ``args``, and what it accepts of ``more``.

    Raises:
        ConfigError: there is no such function, or it failed; the message names the ``setting``.
    """
    function = found(setting, name)
    taken: dict[str, Any] = {}
    # a function written in C may have no signature
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        taken = {name: more[name] for name in more if takes_all or name in parameters}
    with explained(f"{setting}={name}: failed with", called=function):
        return function(*given, **{**taken, **args})


@contextmanager
def explained(
    begin: str, end: str = "", kind: type[Exception] = ConfigError, called: Any = None
) -> Iterator[None]:
    """A block whose errors are reported on one line, between ``begin`` and ``end``.

    Errors with their own line and exit code are not changed. ``called`` is the user's function or
    class.

    Raises:
        ConfigError: the block failed; raises ``kind`` instead if it is given.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RunError | kind) or is_out_of_memory(error):
            raise
        raise kind(f"{begin} {message(error, called)}{end}") from error


def digest(name: str) -> str:
    """Returns a digest of the source file of the called function ``name``.

    Its imports are not included.
    """
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def message(error: Exception, called: Any = None) -> str:
    """Returns ``error`` on one line, with the last location in the user's own code.

    If no frame is in the user's code, as with wrong arguments, uses the location of ``called``.
    """
    where = _place(traceback.extract_tb(error.__traceback__))
    if called is not None and not where:
        with suppress(TypeError, OSError):
            line = inspect.getsourcelines(called)[1]
            where = _place([traceback.FrameSummary(inspect.getfile(called), line, "")])
    text = words(error).strip().partition("\n")[0]
    return printable(f"{type(error).__name__}{text and ': '}{text}{where}")


def current_place(only: int | None = None) -> str:
    """Returns the location in the user's code that a thread is executing, or an empty string.

    ``only`` is a thread's identifier; None means any thread in this process.
    """
    for ident, frame in sys._current_frames().items():
        stack = traceback.extract_stack(frame)
        ours = [number for number, each in enumerate(stack) if each.filename.startswith(_PACKAGE)]
        # without the script that started the program
        if only in (None, ident) and ours and (where := _place(stack[ours[0] :])):
            return printable(where)
    return ""


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """Returns the last of ``frames`` that is in the user's own code, in parentheses."""
    libraries = (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f" ({os.path.relpath(own[-1].filename)}:{own[-1].lineno})" if own else ""


def found(setting: str, name: str) -> Any:
    """Returns the function ``name``, from the environment or the current folder.

    Raises:
        ConfigError: it does not exist; the message names the ``setting``.
    """
    module, _, path = name.partition(":")
    begin = f"{setting}={name}:"
    _look_here()
    with explained(f"{begin} importing {module} failed with"):
        try:
            holder = import_module(module)
        except ModuleNotFoundError as error:
            # that module, not one of its imports
            if f"{module}.".startswith(f"{error.name}."):
                raise _missing(setting, name, str(error.name)) from error
            raise
    where = getattr(holder, "__file__", module)
    try:
        function = attrgetter(path)(holder)
    except AttributeError:
        public = [each for each in vars(holder) if not each.startswith("_")]
        hint = suggestions.nearest(path, public) or f"; write {module}:FUNCTION"
        text = f"{begin} no {path or 'function'} in {where}{hint}"
        raise ConfigError(text) from None
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"{begin} {path} is of type {kind}, not a function ({where})")
    return function


def _look_here() -> None:
    """Makes modules in the current folder importable."""
    # last, so that a user's file cannot shadow a library; workers inherit the path
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _missing(setting: str, name: str, module: str) -> ConfigError:
    return ConfigError(
        f"{setting}={name}: there is no module {module} in the current folder or the environment"
    )
