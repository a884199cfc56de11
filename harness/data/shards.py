"""Reads images at random from tar shards in WebDataset's layout, by an index of their headers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..runtime.errors import BadSample, is_out_of_memory
from .ahead import Ahead
from .folds import Fold
from .mapped import MappedFile
from .storage import Source, check_unsplit, split
from .stores import Store
from .table import SPLITS
from .tar import TarError, members, padded

# what is read and shuffled together: consecutive samples of a shard that begin in such a stretch
BLOCK_BYTES = 8 << 20
_SETS = "set data.train='train-*.tar' data.val='val-*.tar', as the shards are named"


class ShardSource:
    """The samples of one set of shards, in the order of the folder that they were packed from.

    That is by label, then by the path below the class folder. The samples have 20 bytes each in a
    mapped file, which all processes share, and behind them its facts in JSON.

    Attributes:
        store: has the shards.
        root: names it in messages.
        shards: their names.
        classes: the names of the classes.
        shard: int32 ``[N]``, the place in ``shards``.
        offset: int64 ``[N]``, where the sample's bytes begin in its shard.
        length: int32 ``[N]``, in bytes.
        labels: int32 ``[N]``, places in ``classes``.
    """

    # names the column of a table that has the images' names
    key = "member"
    advice = f"{_SETS}, or data.split_fraction=0.1"

    def __init__(self, store: Store, file: MappedFile, part: int | None = None) -> None:
        self.store = store
        self.root = self.origin = store.root
        self._file = file
        self._part = part
        content = np.frombuffer(file.map, np.uint8)
        count, size = content[-16:].view(np.int64).tolist()
        facts = json.loads(content[-16 - size : -16].tobytes())
        self.shards: tuple[str, ...] = tuple(facts["shards"])
        self.classes: tuple[str, ...] = tuple(facts["classes"])
        self._states = facts["states"]
        self._ends = [0, *facts["ends"]]
        own = slice(count) if part is None else slice(*self._ends[part : part + 2])
        self.offset = content[: 8 * count].view(np.int64)[own]
        columns = content[8 * count : 20 * count].view(np.int32).reshape(3, count)
        self.shard, self.length, self.labels = columns[:, own]

    def __reduce__(self) -> tuple[object, ...]:
        return ShardSource, (self.store, self._file, self._part)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> tuple[bytes, int]:
        """Returns the bytes of sample ``i`` and its label.

        Raises:
            BadSample: they cannot be read.
        """
        shard = self.shards[self.shard[i]]
        try:
            data = self.store.read(shard, int(self.offset[i]), int(self.length[i]))
        except OSError as error:
            if is_out_of_memory(error):
                raise
            raise BadSample(self.where(i), f"cannot be read: {error.strerror or error}") from error
        return data, int(self.labels[i])

    @property
    def expect(self) -> Callable[[np.ndarray], int] | None:
        """Announces samples that will be read, and returns their bytes; None: of a folder."""
        return self._expect if isinstance(self.store, Ahead) else None

    def _expect(self, rows: np.ndarray) -> int:
        columns = self.shard[rows], self.offset[rows], self.length[rows]
        shard, offset, length = (column.tolist() for column in columns)
        names = [self.shards[place] for place in shard]
        store: Any = self.store
        store.expect([*zip(names, offset, length, strict=True)])
        return sum(length)

    def where(self, i: int) -> str:
        """Returns the shard's place and the member's name."""
        return f"{self.root}/{self.name(i)}"

    def name(self, i: int) -> str:
        """Returns the shard's name and the member's, or where it begins if that cannot be read."""
        shard = self.shards[self.shard[i]]
        end = int(self.offset[i])
        member = f"byte {end}"
        with suppress(OSError, TarError):
            read = partial(self.store.read, shard)
            stop = padded(end + int(self.length[i]))
            for name, at, *_ in members(read, stop, at=int(self._begins[i])):
                if at == end:
                    member = os.fsdecode(name)
                    break
        return f"{shard}:{member}"

    def state(self, i: int) -> tuple[object, ...]:
        """Returns what changes with the bytes of sample ``i``."""
        return *self._states[self.shard[i]], int(self.offset[i])

    def digest(self) -> bytes:
        """Returns 32 bytes that follow from the shards' names, the samples' places and labels."""
        found = hashlib.sha256("\0".join(self.shards + self.classes).encode())
        for column in (self.shard, self.offset, self.length, self.labels):
            found.update(column.data)
        return found.digest()

    def sets(self, held_out: float | Fold | None, seed: int) -> dict[str, Source]:
        """Returns the sets of the shards, by name, with ``held_out`` of ``train`` as ``val``.

        Raises:
            ConfigError: there is a validation set already.
            DataError: a class cannot be in both.
        """
        parts = [ShardSource(self.store, self._file, part) for part in range(len(SPLITS))]
        found: dict[str, Source] = {
            name: part for name, part in zip(SPLITS, parts, strict=True) if len(part)
        }
        if held_out is not None and "train" in found:
            if "val" in found:
                check_unsplit(held_out, found, self.root)
            found["train"], found["val"] = split(found["train"], held_out, seed)
        return found

    @property
    def blocks(self) -> np.ndarray:
        """The block of each sample, int32 ``[N]``, numbered as they lie in the shards."""
        return self._blocks[0]

    def extent(self, block: int) -> tuple[int, int, int]:
        """Returns the shard of a block, and where its samples begin and end there, in bytes."""
        shard, start, stop = self._blocks[1][block].tolist()
        return shard, start, stop

    @cached_property
    def _lie(self) -> np.ndarray:
        """The samples as they lie in the shards."""
        return np.lexsort((self.offset, self.shard))

    @cached_property
    def _begins(self) -> np.ndarray:
        """Where the headers behind the sample before each begin, int64 ``[N]``."""
        begins = np.zeros(len(self), np.int64)
        ends = padded((self.offset + self.length)[self._lie])
        begins[self._lie[1:]] = np.where(np.diff(self.shard[self._lie]), 0, ends[:-1])
        return begins

    @cached_property
    def _blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """The block of each sample, and the shard, first and last + 1 byte of each block."""
        shard, offset = self.shard[self._lie], self.offset[self._lie]
        changes = (np.diff(shard) != 0) | (np.diff(offset // BLOCK_BYTES) != 0)
        firsts = np.append(0, np.flatnonzero(changes) + 1)
        lasts = np.append(firsts[1:], len(shard)) - 1
        of = np.empty(len(shard), np.int32)
        of[self._lie] = np.repeat(np.arange(len(firsts)), lasts - firsts + 1)
        stops = offset[lasts] + self.length[self._lie[lasts]]
        return of, np.stack((shard[firsts], offset[firsts], stops), 1)
