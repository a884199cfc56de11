"""Answers of the tuner, remembered in the user's cache for runs with the same fingerprint."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from harness.config import Config, to_plain
from harness.data.storage import cache_root
from harness.runtime import signals
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.watch.console import say
from harness.watch.host import environment

_FORMAT = 1  # of the file; another number and the answer is not taken
_MAX_AGE_S = 30 * 24 * 3600.0
_POLL_S = 0.1
_SOURCES = ("data", "feed", "tuning")  # rooms whose code decides what a sample costs, and what is chosen
_SETTINGS = {  # those that decide what a sample or a step costs, besides all of augment and tuner
    "data": ("image_size", "eval_resize", "exif_orientation", "cache", "cache_gb", "cache_max_side"),
    "loader": ("backend", "batch_size", "start_method", "device_prefetch"),
    "model": ("name",),
    "optim": ("name",),
    "trainer": ("precision", "channels_last", "compile", "accumulate_steps", "deterministic"),
}

_log = logging.getLogger(LOGGER)


class Memory:
    """The answer to one fingerprint, in a file of its own in ``folder`` (None: the user's cache).

    A folder or a file that cannot be used costs one warning and the memory, never the run.
    """

    def __init__(self, fingerprint: Mapping[str, Any], folder: Path | None = None) -> None:
        text = _canonical(fingerprint)
        self.fingerprint = json.loads(text)  # as it comes back from a file
        self.path = (folder or cache_root() / "tuning") / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        self._warned = False

    def recall(self, now: Callable[[], float] = time.time) -> dict[str, Any] | None:
        """What was kept last; None where nothing was, or it is over 30 days old, damaged, or not of this fingerprint."""
        try:
            entry = json.loads(self.path.read_text(encoding="utf-8"))
            if entry["format"] != _FORMAT or entry["fingerprint"] != self.fingerprint:
                return None
            if abs(now() - entry["saved_at"]) > _MAX_AGE_S:  # from the future too: a clock was wrong
                return None
            return dict(entry["answer"])
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
        except (ValueError, KeyError, TypeError, RecursionError):
            _log.warning("%s: damaged, so that this run tunes anew", self.path)
            self.forget()
        return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Remember ``answer``, which holds what JSON can, in place of any before it."""
        entry = {"format": _FORMAT, "saved_at": time.time(), "fingerprint": self.fingerprint, "answer": dict(answer)}
        part = self.path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("w", encoding="utf-8") as file:
                    json.dump(entry, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(self.path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    def forget(self) -> None:
        """Remove the answer, if there is one."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)

    @contextmanager
    def held(self, wait_s: float = 300.0) -> Iterator[None]:
        """A block that one process at a time is in, so that of several alike one tunes and the others recall.

        The kernel frees the lock of a process that died. Who has waited ``wait_s`` seconds goes on without it.

        Raises:
            Interrupted: a signal came while waiting.
        """
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.path.with_suffix(".lock").open("ab"))  # it stays: removing it could let two in
                if self._locked(file, wait_s):
                    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # forked workers have the file too: closing is not enough
            except OSError as error:  # no such folder, or a file system without locks
                self._warn(error)
            yield

    def _locked(self, file: IO[bytes], wait_s: float) -> bool:
        if _taken(file):
            return True
        say("waiting for another run that tunes the same")
        begin = time.monotonic()
        while time.monotonic() - begin < wait_s:
            signals.check()
            time.sleep(_POLL_S)
            if _taken(file):
                return True
        _log.warning("%s: still held by another run after %.0f s; this one tunes too", file.name, wait_s)
        return False

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _log.warning("%s: %s; tuning is not remembered; set WELLFED_CACHE", self.path.parent, error.strerror or error)
        self._warned = True


def _taken(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fingerprint(
    config: Config, data_identity: Mapping[str, Any], limits: Limits, world_size: int, local_size: int, device_name: str
) -> dict[str, Any]:
    """All that decides which loader settings are best, as plain values.

    Free memory is not in it, since it changes by the minute: whether an answer still fits is for who recalls it to reckon.

    Args:
        config: the run's settings; the loader's own, which are searched, do not count.
        data_identity: of the training set.
        limits: what this rank may use.
        world_size: number of ranks.
        local_size: number of ranks on this node.
        device_name: where the network runs, such as the GPU's name.
    """
    import torch

    plain = to_plain(config)
    settings = {f"{group}.{name}": plain[group][name] for group, names in _SETTINGS.items() for name in names}
    tuner = {name: value for name, value in plain["tuner"].items() if name != "fresh"}
    return {
        "machine": {**environment(device_name), "usable_cores": round(limits.cores, 2)},
        "packages": {name: metadata.version(name) for name in ("numpy", "pillow", "simplejpeg")},
        "sources": _sources(),
        "ranks": [world_size, local_size],
        "threads": torch.get_num_threads(),
        "data": dict(data_identity),
        "settings": {**settings, "augment": plain["augment"], "tuner": tuner},
    }


def _sources() -> str:
    """A digest of the code that a sample goes through."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for room in _SOURCES for path in (package / room).glob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
