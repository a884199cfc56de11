"""Tries changes to a watched script: a minute without them, and a minute with each one."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..runtime.errors import rounded, say
from ..runtime.files import read_json

# the change that wraps a loader's dataset
FASTER = "dataset = wellfed.faster(dataset)"
# training time in each run
_LIMIT_S = 60.0
# grace period for scripts that handle SIGTERM
_GRACE_S = 20.0
# passes a trial's time limit and change to its script
_VARIABLE = "WELLFED_TRY"


def run(words: Sequence[str], out: Path) -> int:
    """Runs the script without and with each change; returns the exit code.

    Args:
        words: the script and its arguments, as for ``wellfed watch``.
        out: the folder for the reports.
    """
    say(
        f"running the script for {_LIMIT_S:.0f} s of training, and again with each change that "
        "the report suggests; its files are written each time"
    )
    before = _measured(words, out / "before", {})
    if before is None:
        return 1
    tried = [text for text in before["expected"] if text.startswith(("DataLoader(", FASTER))]
    if not tried:
        found = before["expected"] or [before["verdict"]["sentence"]]
        say(f"there is no change to try from outside the script: {found[0]}")
        return 0
    change = before.get("change") or {}
    where = change.get("where") or before["loaders"][0]["where"]
    runs = {"before": before}
    for text in tried:
        faster = text.startswith(FASTER)
        name = "faster" if faster else "after"
        arguments = None if faster else change["arguments"]
        told = {"where": where, "arguments": arguments, "faster": faster}
        after = _measured(words, out / name, told)
        if after is None:
            return 1
        runs[name] = after
        measured = after["images_per_s"] / before["images_per_s"]
        expected = "" if faster else f"{rounded(change['gain'])}x expected, "
        say(
            f"tried          {text.partition(': ')[0]}: {expected}"
            f"{rounded(measured)}x measured ({before['images_per_s']:.0f} and "
            f"{after['images_per_s']:.0f} samples/s)"
        )
    if "neighbors" in (each["verdict"]["bottleneck"] for each in runs.values()):
        say("warning: other programs ran during a measurement; repeat it after they end")
    folders = " ".join(f"{os.path.relpath(out)}/{name}" for name in runs)
    say(f"look at them   wellfed compare {folders}")
    return 0


def _measured(words: Sequence[str], out: Path, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """Runs the script for a while; returns its report, or prints a line and returns None."""
    command = [sys.executable, "-m", "wellfed", "watch", "--quiet", "--out", str(out), *words]
    environment = {**os.environ, _VARIABLE: json.dumps({"limit_s": _LIMIT_S, **change})}
    ended = subprocess.run(command, env=environment, check=False).returncode
    try:
        return dict(read_json(out / "report.json"))
    except (OSError, ValueError):
        say(f"the script left no report; it exited with code {ended}")
        return None


def begin() -> Callable[[], None] | None:
    """Installs the change of this trial; returns the callback for the first update.

    None if this process is not a trial.
    """
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return None
    told = json.loads(text)
    if "where" in told:
        from . import patches

        patches.change = _changing(told)
    return lambda: _end_after(told["limit_s"])


def _end_after(limit_s: float) -> None:
    """Ends this process with SIGTERM after ``limit_s`` seconds."""

    def end() -> None:
        time.sleep(limit_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _changing(told: Mapping[str, Any]) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns a function that changes the arguments of the ``DataLoader`` in ``told``."""

    def change(
        make: Callable[..., None], where: str, *given: Any, **named: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if where != told["where"]:
            return given, named
        bound = inspect.signature(make).bind(None, *given, **named).arguments
        del bound["self"]
        bound |= told["arguments"] or {}
        if told["faster"]:
            from .faster import faster

            with suppress(ValueError):
                bound["dataset"] = faster(bound["dataset"])
        return (), bound

    return change
