"""Reads images in any order from WebDataset tar shards, using an index of their headers."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np

from ..runtime.errors import BadSample, is_out_of_memory
from .ahead import BLOCK_BYTES, Ahead
from .mapped import MappedFile
from .storage import Source
from .stores import Store
from .table import SPLITS
from .tar import TarError, members, padded

_SETS = "data.train='train-*.tar' data.val='val-*.tar', as the shards are named"


class ShardSource:
    """The samples in one set of shards, in the order of the folder they were packed from.

    The order is by label, then by path. Each sample takes 20 bytes in a mapped file, which all
    processes share and which ends with the other attributes in JSON.

    Attributes:
        store: reads the shards.
        root: the store's name in messages.
        shards: shard names.
        classes: class names.
        shard: index of each sample's shard, int32 ``[N]``.
        offset: first byte of each sample in its shard, int64 ``[N]``.
        length: number of bytes in each sample, int32 ``[N]``.
        labels: index of each sample's class, int32 ``[N]``.
    """

    # column with the image names in predictions
    key = "member"
    advice = f"set data.split_fraction=0.1, or {_SETS}"
    # as in a table
    groups: np.ndarray | None = None

    def __init__(self, store: Store | Ahead, file: MappedFile, part: int | None = None) -> None:
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

    def expect(self, rows: np.ndarray, room: int) -> int:
        """Announces samples to the store, an ``Ahead``; returns their number of bytes.

        If ``room`` is not 0, fetches whole blocks and keeps that many.
        """
        store: Any = self.store
        parts = self.shard, self.offset, self.length
        wanted = rows
        if room:
            parts, wanted = self._blocks, np.unique(self.blocks[rows])
        shard, offset, length = (column[wanted].tolist() for column in parts)
        announced = [*zip([self.shards[place] for place in shard], offset, length, strict=True)]
        if room:
            store.expect_blocks(announced, room)
        else:
            store.expect(announced)
        return int(self.length[rows].sum())

    def where(self, i: int) -> str:
        """Returns the shard's path and the member's name."""
        return f"{self.root}/{self.name(i)}"

    def name(self, i: int) -> str:
        """Returns the shard's name and the member's name or, failing that, its first byte."""
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
        """Returns a value that changes with the bytes of sample ``i``."""
        return *self._states[self.shard[i]], int(self.offset[i])

    def digest(self) -> bytes:
        """Returns a 32-byte digest of the names, positions and labels."""
        found = hashlib.sha256("\0".join(self.shards + self.classes).encode())
        for column in (self.shard, self.offset, self.length, self.labels):
            found.update(column.data)
        return found.digest()

    def sets(self) -> dict[str, Source]:
        """Returns the sets in the shards, by name."""
        parts = (ShardSource(self.store, self._file, part) for part in range(len(SPLITS)))
        return {name: part for name, part in zip(SPLITS, parts, strict=True) if len(part)}

    @cached_property
    def _lie(self) -> np.ndarray:
        """The samples in byte order."""
        return np.lexsort((self.offset, self.shard))

    @cached_property
    def _begins(self) -> np.ndarray:
        """The end of the preceding sample in the shard for each sample, int64 ``[N]``."""
        begins = np.zeros(len(self), np.int64)
        ends = padded((self.offset + self.length)[self._lie])
        begins[self._lie[1:]] = np.where(np.diff(self.shard[self._lie]), 0, ends[:-1])
        return begins

    @cached_property
    def blocks(self) -> np.ndarray:
        """The block of each sample, int32 ``[N]``, numbered by its position in the shards."""
        lie = np.stack((self.shard, self.offset // BLOCK_BYTES))[:, self._lie]
        changes = np.diff(lie, prepend=lie[:, :1]).any(0)
        of = np.empty(len(self), np.int32)
        of[self._lie] = np.cumsum(changes)
        return of

    @cached_property
    def _blocks(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The shard, first byte and length of each block."""
        first = np.unique(self.blocks[self._lie], return_index=True)[1]
        shard, offset, end = (
            column[self._lie] for column in (self.shard, self.offset, self.offset + self.length)
        )
        return shard[first], offset[first], np.maximum.reduceat(end, first) - offset[first]
