"""The samples that could not be read and were replaced: each listed once, and counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.config import DataConfig
from harness.feed.interface import Failure, Feed
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.runtime.errors import DataError
from harness.runtime.files import parsed, read_regular
from harness.runtime.folder import LOGGER
from harness.watch.board import Board

FILE = "bad_samples.jsonl"

_log = logging.getLogger(LOGGER)


class Replaced:
    """Takes from the feeds which samples they replaced, and lists each once in ``FILE``.

    Args:
        data: its ``max_bad_fraction`` of a set may be replaced.
        world: this rank; every rank makes and asks such an object.
        folder: the run's, which may hold a list already.
        board: writes the list; None: not this rank.
        feeds: by the name of their set.
    """

    def __init__(
        self,
        data: DataConfig,
        world: World,
        folder: Path,
        board: Board | None,
        feeds: Mapping[str, Feed],
    ) -> None:
        self._most = data.max_bad_fraction
        self._world = world
        self._board = board
        self._feeds = feeds
        # what is in the list, and what this rank has met since
        self._listed = _read(folder / FILE)
        self._met: dict[tuple[str, int], Failure] = {}

    def __len__(self) -> int:
        return len(self._listed | self._met.keys())

    def look(self) -> None:
        """Takes what the feeds replaced since the last look.

        Raises:
            DataError: too many samples of a set cannot be read.
        """
        for name, feed in self._feeds.items():
            while feed.replaced:
                failure = feed.replaced.popleft()
                key = (name, failure.sample)
                if key in self._listed or key in self._met:
                    continue
                if not len(self):
                    _log.warning(
                        "%s: %s: another image takes its place; such images are listed in %s",
                        failure.where,
                        failure.reason,
                        FILE,
                    )
                self._met[key] = failure
        if self._world.size == 1:
            self.share()
        for name, feed in self._feeds.items():
            assert isinstance(feed.order, Order)
            length = feed.order.length
            bad = sum(key[0] == name for key in self._listed | self._met.keys())
            if bad > self._most * length:
                raise DataError(
                    f"{bad} of {length} {name} images cannot be read, more than "
                    f"data.max_bad_fraction={self._most:g}; mend those listed in {FILE} or raise it"
                )

    def share(self) -> None:
        """Lists what all ranks have met; every rank calls this."""
        met: dict[tuple[str, int], Failure] = {}
        for of_rank in self._world.gathered(self._met):
            met |= of_rank
        for (name, sample), failure in met.items():
            if (name, sample) not in self._listed and self._board is not None:
                self._board.bad_sample(name, sample, failure.where, failure.reason)
        self._listed |= met.keys()
        self._met.clear()


def _read(path: Path) -> set[tuple[str, int]]:
    """Returns what the list at ``path`` has; lines that are not ours are passed over."""
    found = set()
    lines: list[bytes] = []
    with suppress(FileNotFoundError):
        lines = read_regular(path).splitlines()
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            listed = parsed(line)
            found.add((str(listed["set"]), int(listed["index"])))
    return found
