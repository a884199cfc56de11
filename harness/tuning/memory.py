"""Answers of the tuner, remembered in the user's cache for runs with the same fingerprint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.config import Config, shown, walk
from harness.data.storage import cache_root
from harness.runtime import parts
from harness.runtime.files import read_json, set_aside, typed, write_whole
from harness.runtime.folder import log
from harness.runtime.limits import Limits
from harness.watch.host import environment

_MAX_AGE_S = 30 * 24 * 3600.0
# settings that decide what a sample or a step costs, and what is searched, besides all of augment
_SETTINGS = {
    "data.image_size",
    "data.eval_resize",
    "data.interpolation",
    "data.exif_orientation",
    "data.cache",
    "data.cache_gb",
    "data.cache_max_side",
    "loader.backend",
    "loader.batch_size",
    "loader.start_method",
    "loader.device_prefetch",
    "model.name",
    "optim.name",
    "optim.freeze",
    "trainer.precision",
    "trainer.channels_last",
    "trainer.compile",
    "trainer.accumulate_steps",
    "trainer.deterministic",
    "tuner.name",
    "tuner.budget_s",
    "tuner.max_workers",
}


class Memory:
    """The answer to one fingerprint, in a file of its own in ``folder`` (None: the user's cache).

    A folder or a file that cannot be used costs one warning and the memory, never the run.
    """

    def __init__(self, fingerprint: Mapping[str, Any], folder: Path | None = None) -> None:
        self.fingerprint = fingerprint
        self.path = (folder or cache_root() / "tuning") / f"{_digest(fingerprint)}.json"
        self._warned = False

    def recall(self, read: Callable[[Any], Any]) -> Any:
        """Returns what ``read`` makes of what was kept last; None for nothing, or over 30 days old.

        What is damaged goes, and so does what ``read`` answers with a KeyError, TypeError or
        ValueError.
        """
        try:
            entry = read_json(self.path)
            if entry["digest"] != _digest([self.fingerprint, entry["answer"]]):
                raise ValueError("not as it was kept")
            # from the future too: a clock was wrong
            if abs(time.time() - typed(float, entry["saved_at"])) > _MAX_AGE_S:
                return None
            return read(entry["answer"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.forget():
                log.warning("%s: damaged (%s), so that this run tunes again", self.path, error)
        return None

    def keep(self, answer: Mapping[str, Any]) -> None:
        """Remembers ``answer``, which holds what JSON can, in place of any before it."""
        entry = {
            "saved_at": time.time(),
            "fingerprint": self.fingerprint,
            "digest": _digest([self.fingerprint, answer]),
            "answer": answer,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(entry, indent=1).encode())
        except OSError as error:
            self._warn(error)

    def forget(self) -> bool:
        """Removes the answer, if there is one. Returns whether that could be done."""
        try:
            set_aside(self.path)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            text = "%s: %s; tuning is not remembered; set WELLFED_CACHE"
            log.warning(text, self.path.parent, error.strerror or error)
        self._warned = True


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fingerprint(
    config: Config,
    data_identity: Mapping[str, Any],
    limits: Limits,
    world_size: int,
    local_size: int,
    device_name: str,
) -> dict[str, Any]:
    """Returns all that decides which loader settings are best, as plain values.

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

    settings = {
        path: shown(value)
        for path, value, _ in walk(config)
        if path in _SETTINGS or path.startswith("augment.")
    }
    # the code that decides what a sample costs, and what is chosen
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for room in ("data", "feed", "tuning"):
        for path in sorted((package / room).glob("*.py")):
            sources.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return {
        "machine": {**environment(device_name), "usable_cores": round(limits.cores, 2)},
        "packages": {name: metadata.version(name) for name in ("numpy", "pillow", "simplejpeg")},
        "sources": sources.hexdigest(),
        "own": [
            parts.digest(name)
            for name in (config.data.name, config.model.name)
            if parts.is_own(name)
        ],
        "ranks": [world_size, local_size],
        "threads": torch.get_num_threads(),
        "data": dict(data_identity),
        "settings": settings,
    }
