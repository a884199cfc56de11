"""Answers of the tuner, remembered in the user's cache for runs with the same fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.config import Config, to_plain
from harness.data.download import exclusive
from harness.data.storage import cache_root
from harness.runtime import parts
from harness.runtime.files import read_json, set_aside, typed, write_whole
from harness.runtime.folder import LOGGER
from harness.runtime.limits import Limits
from harness.watch.host import environment

_MAX_AGE_S = 30 * 24 * 3600.0
_SOURCES = (
    "data",
    "feed",
    "tuning",
)  # rooms whose code decides what a sample costs, and what is chosen
_SETTINGS = {  # those that decide what a sample or a step costs, besides all of augment and tuner
    "data": (
        "image_size",
        "eval_resize",
        "exif_orientation",
        "cache",
        "cache_gb",
        "cache_max_side",
    ),
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
        text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"))
        self.fingerprint = json.loads(text)  # as it comes back from a file
        self.path = (
            folder or cache_root() / "tuning"
        ) / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        self._warned = False

    def recall(self, read: Callable[[Any], Any], now: Callable[[], float] = time.time) -> Any:
        """What ``read`` makes of what was kept last; None where nothing was, or it is over 30 days
        old.

        What is damaged goes, and so does what ``read`` answers with a KeyError, TypeError or
        ValueError.
        """
        try:
            entry = read_json(self.path)
            if entry["fingerprint"] != self.fingerprint:
                raise ValueError("of another run")
            if (
                abs(now() - typed(float, entry["saved_at"])) > _MAX_AGE_S
            ):  # from the future too: a clock was wrong
                return None
            return read(entry["answer"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.forget():
                _log.warning("%s: damaged (%s), so that this run tunes again", self.path, error)
        return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Remember ``answer``, which holds what JSON can, in place of any before it."""
        text = json.dumps(
            {"saved_at": time.time(), "fingerprint": self.fingerprint, "answer": answer}, indent=1
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, text.encode())
        except OSError as error:
            self._warn(error)

    def forget(self) -> bool:
        """Remove the answer, if there is one; whether that could be done."""
        try:
            set_aside(self.path)
        except OSError as error:
            self._warn(error)
            return False
        return True

    @contextmanager
    def held(self, wait_s: float = 300.0) -> Iterator[None]:
        """A block that one process at a time is in, so that of several alike one tunes and the
        others recall.

        The kernel frees the lock of a process that died. Who has waited ``wait_s`` seconds goes on
        without it.

        Raises:
            Interrupted: a signal came while waiting.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(self.path.with_suffix(".lock"), wait_s))
            except TimeoutError as error:
                _log.warning("%s; this one tunes too", error)
            except OSError as error:  # no such folder, or a file system without locks
                self._warn(error)
            yield

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _log.warning(
                "%s: %s; tuning is not remembered; set WELLFED_CACHE",
                self.path.parent,
                error.strerror or error,
            )
        self._warned = True


def fingerprint(
    config: Config,
    data_identity: Mapping[str, Any],
    limits: Limits,
    world_size: int,
    local_size: int,
    device_name: str,
) -> dict[str, Any]:
    """All that decides which loader settings are best, as plain values.

    Free memory is not in it, since it changes by the minute: whether an answer still fits is for
    who recalls it to reckon.

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
    settings = {
        f"{group}.{name}": plain[group][name]
        for group, names in _SETTINGS.items()
        for name in names
    }
    tuner = {name: value for name, value in plain["tuner"].items() if name not in ("fresh", "live")}
    return {
        "machine": {**environment(device_name), "usable_cores": round(limits.cores, 2)},
        "packages": {name: metadata.version(name) for name in ("numpy", "pillow", "simplejpeg")},
        "sources": _sources(),
        "own": [
            parts.digest(name)
            for name in (config.data.name, config.model.name)
            if parts.is_own(name)
        ],
        "ranks": [world_size, local_size],
        "threads": torch.get_num_threads(),
        "data": dict(data_identity),
        "settings": {**settings, "augment": plain["augment"], "tuner": tuner},
    }


def _sources() -> str:
    """A digest of the code that a sample goes through."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(path for room in _SOURCES for path in (package / room).glob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
