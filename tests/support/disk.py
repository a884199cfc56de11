"""Tells the calls by which a save reaches the disk, one by one.

Each may fail, or end the process before or after it.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from io import BufferedWriter, FileIO
from typing import Any

NAMES = ("mkdir", "fsync", "replace", "symlink", "unlink", "write", "ftruncate")
# "before" or "after", and the call's name
Tell = Callable[[str, str], object]


def tell_calls(tell: Tell, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let ``tell`` know of every call, by attributes that ``put`` replaces."""

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*given: Any, **more: Any) -> Any:
            tell("before", name)
            found = call(*given, **more)
            tell("after", name)
            return found

        return around

    class Raw(FileIO):
        def __init__(self, *given: Any) -> None:
            told("open", super().__init__)(*given)

        def write(self, data: Any) -> int:
            return int(told("write", super().write)(data))

    real = builtins.open

    def opened(path: Any, mode: str = "r", *given: Any, **more: Any) -> Any:
        # as files that are written whole are opened
        if mode == "xb":
            return BufferedWriter(Raw(path, mode))
        return real(path, mode, *given, **more)

    for name in NAMES:
        put(os, name, told(name, getattr(os, name)))
    put(builtins, "open", opened)
