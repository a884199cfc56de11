"""Tells the calls by which a save reaches the disk, one by one.

Each may fail, or end the process before or after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import FileIO
from typing import Any

from harness.training import saver

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

    for name in NAMES:
        put(os, name, told(name, getattr(os, name)))
    put(saver, "FileIO", Raw)
