"""One reader of files, as the fuzz has it, and what it tells the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.hostile.fuzz.changes import mutated


@dataclass(frozen=True)
class Reader:
    """One reader of files.

    Attributes:
        seeds: whole files.
        read: reads a file of these bytes, uses what it gives, and returns what was refused, empty
            if nothing was; raises what the reader has not foreseen.
        mutate: changes one of the ``seeds``.
        seal: makes checksums right again, as half of the files have them.
    """

    seeds: Sequence[Any]
    read: Callable[[bytes], str]
    mutate: Callable[[Any, Random], bytes] = mutated
    seal: Callable[[bytes], bytes] | None = None

    def file(self, rng: Random) -> bytes:
        """Returns a changed file."""
        data = self.mutate(self.seeds, rng)
        if self.seal is not None and rng.random() < 0.5:
            # what is not even of the right form has none
            with suppress(Exception):
                return self.seal(data)
        return data


class Told(logging.Handler):
    """Keeps what the run's log is told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("wellfed").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.lines.append(record.getMessage())

    def reason(self) -> str:
        """Returns whether something was told of."""
        return "made again, with a warning" if self.lines else ""
