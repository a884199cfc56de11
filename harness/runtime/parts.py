"""What a user brings: a function of their own, which a setting names as ``module:function``."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.runtime.errors import RunError, printable

_PACKAGE = str(Path(__file__).parents[1])


def is_own(name: str) -> bool:
    """Whether ``name`` is a user's function, such as ``my_module:build``, and none of ours."""
    return ":" in name


def call(setting: str, name: str, *given: Any, **more: Any) -> Any:
    """What the user's function ``name`` returns for ``given`` and those of ``more`` that it takes.

    Errors that have a line and an exit code of their own pass as they are.

    Raises:
        ConfigError: there is no such function, or it failed; the line names the ``setting``.
    """
    function = _found(setting, name)
    try:
        return function(*given, **_taken(function, more))
    except (RunError, ConfigError):
        raise
    except Exception as error:
        raise ConfigError(f"{setting}={name}: failed with {told(error)}") from error


def digest(name: str) -> str:
    """A digest of the file of the user's function ``name``, which has been called.

    What that file imports does not count.
    """
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


def told(error: Exception) -> str:
    """``error`` in one line, with the last line of the user's own code that it went through."""
    libraries = (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<")
    called = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in called if not frame.filename.startswith(libraries)]
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = str(error).strip().partition("\n")[0]
    return printable(f"{type(error).__name__}: {text}{where}")


def _found(setting: str, name: str) -> Callable[..., Any]:
    """The function ``name``, of the environment or the current folder."""
    module, _, path = name.partition(":")
    # Last, so that a file of the user's hides no library. Workers are given the same places.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: Any = import_module(module)
    except Exception as error:
        missing = getattr(error, "name", None)
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and missing and f"{module}.".startswith(f"{missing}."):
            reason = f"no module {missing} in the current folder or the environment"
        else:
            reason = f"importing {module} failed with {told(error)}"
        raise ConfigError(f"{setting}={name}: {reason}") from error
    where = getattr(found, "__file__", module)
    for part in path.split("."):
        if not hasattr(found, part):
            text = f"{setting}={name}: no {path or 'function'} in {where}"
            raise ConfigError(f"{text}; write {module}:FUNCTION")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{setting}={name}: {path} is of type {kind}, not a function ({where})")
    function: Callable[..., Any] = found
    return function


def _taken(function: Callable[..., Any], more: dict[str, Any]) -> dict[str, Any]:
    """Those of ``more`` that ``function`` takes by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return more
    return {name: value for name, value in more.items() if name in parameters}
