"""Starts Python programs from a process that has torch imported, where each would take seconds.

    python zygote.py < requests

A request is a line of JSON: ``arguments`` (what follows ``python``), ``cwd`` and ``out``. The
program's two streams go to ``out``.stdout and ``out``.stderr, and its exit status is answered.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# of a program
LIMIT_S = 90


class Zygote:
    """The process that has torch imported; ends with the block."""

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs ``python`` with ``arguments`` to its end."""
        out = cwd / "out"
        process = self._process
        assert process.stdin and process.stdout
        request = {"arguments": arguments, "cwd": str(cwd), "out": str(out)}
        print(json.dumps(request), file=process.stdin, flush=True)
        status = os.waitstatus_to_exitcode(int(process.stdout.readline()))
        streams = (Path(f"{out}.{name}").read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, status, *streams)


def serve() -> dict[str, Any]:
    """Answers requests; in a child process returns the one that it is to run."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return request
        print(os.waitpid(child, 0)[1], flush=True)
    sys.exit()


def become(cwd: str, out: str, arguments: list[str]) -> None:
    """Runs a program in this process, as ``python`` does, and ends without taking torch down."""
    status = 0
    try:
        run(cwd, out, arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1 if isinstance(error, Exception) else -signal.SIGINT
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def run(cwd: str, out: str, arguments: list[str]) -> None:
    """Runs a program in this process."""
    signal.alarm(LIMIT_S)
    os.chdir(cwd)
    for number, path in enumerate((os.devnull, f"{out}.stdout", f"{out}.stderr")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(ROOT)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT))
    for module in ("torch._dynamo", "torchvision.models", "harness.hooks.own"):
        import_module(module)
    become(**serve())
