"""A plugin of pytest that takes away what only Linux has: ``-p tests.support.portable``.

Calls are absent as on macOS, and our own code finds no ``/proc`` and no ``/sys``.
Descriptors keep their names, which macOS tells by ``fcntl``; psutil, which knows macOS, all of it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

_OWN = str(Path(__file__).parents[2] / "harness")
_ABSENT = (
    "memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "pidfd_open",
    "eventfd", "splice", "posix_fallocate",
)  # fmt: skip
_LINUX = re.compile(r"/(proc(?!/\d+/fd/)|sys)(/|$)")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir", "glob.glob"):
        return
    path = arguments[0]
    if not isinstance(path, str) or not _LINUX.match(path):
        return
    frame = sys._getframe(1)
    # pathlib's own
    while frame.f_back and "pathlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_OWN):
        raise FileNotFoundError(2, "No such file or directory", path)


for _name in _ABSENT:
    if hasattr(os, _name):
        delattr(os, _name)
sys.addaudithook(_refuse)
