"""The samples that could not be read and were replaced: each listed once, and counted."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.config import DataConfig, OnError
from harness.feed.interface import Backend, Failure
from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.runtime.errors import DataError
from harness.runtime.files import parsed, read_regular
from harness.runtime.folder import log
from harness.watch.board import BAD_SAMPLES as FILE
from harness.watch.board import Board


class Replaced:
    """Takes from the feeds which samples they replaced, counts them, and lists each in ``FILE``.

    Every rank makes and asks such an object.

    Args:
        data: says whether samples are replaced, and how many may be.
        world: this rank.
        folder: the run's, which may hold a list already: nothing is listed twice.
        board: writes the list; None: not this rank.
        feeds: by the name of their set.
    """

    def __init__(
        self,
        data: DataConfig,
        world: World,
        folder: Path,
        board: Board | None,
        feeds: Mapping[str, Backend],
    ) -> None:
        self._data = data
        self._world = world
        self._board = board
        self._feeds = feeds
        # by set and place; odd lines of the list are passed over
        self._listed: set[tuple[str, str]] = set()
        with suppress(OSError):
            for line in read_regular(folder / FILE).splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    listed = parsed(line)
                    self._listed.add((str(listed["set"]), str(listed["where"])))
        # since the start: the list may name what was mended since
        self._met: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._met)

    def share(self) -> None:
        """Lists what all ranks have replaced since the last time; every rank calls this.

        Raises:
            DataError: more samples of a set were replaced than may be, on every rank.
        """
        if self._data.on_error is not OnError.skip:
            return
        new: list[tuple[str, Failure]] = []
        for name, feed in self._feeds.items():
            while feed.replaced:
                new.append((name, feed.replaced.popleft()))
        for name, failure in itertools.chain(*self._world.gathered(new)):
            if not self._met:
                log.warning("%s: %s: another image takes its place", failure.where, failure.reason)
            self._met.add((name, failure.sample))
            if self._board is not None and (name, failure.where) not in self._listed:
                self._listed.add((name, failure.where))
                self._board.bad_sample(name, failure.sample, failure.where, failure.reason)
        for name, feed in self._feeds.items():
            assert isinstance(feed.order, Order)
            bad, length = sum(each == name for each, _ in self._met), feed.order.length
            if bad > self._data.max_bad_fraction * length:
                raise DataError(
                    f"{bad} of {length} {name} images cannot be read, more than "
                    f"data.max_bad_fraction={self._data.max_bad_fraction:g}; mend those listed in "
                    f"{FILE} or raise it"
                )
