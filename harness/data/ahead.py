"""Reads samples from slow stores before they are needed, and keeps them on a fast disk."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import xxhash
from torch import Tensor

from ..clock.stages import shared_rows
from ..config import ConfigError, DataConfig
from ..runtime import workers
from ..runtime.folder import log
from .stores import Descriptor, Store
from .tar import BLOCK, padded

# samples in a shard that begin within this many bytes form a block
BLOCK_BYTES = 8 << 20
# shard name, first byte and length of a sample or block
_Part = tuple[str, int, int]
# concurrent requests: at 50 ms each, 1,280 samples/s
_THREADS = 64
# maximum size of announced, unread samples; older ones belong to passes that have ended
_MOST_BYTES = 512 << 20
_LOOK_S = 1.0
# rows of the counters, chosen by process ID; two processes in one row would lose some counts
_ROWS = 256


class Ahead:
    """The files in ``store``; threads fetch announced parts before they are read.

    With ``data.scratch``, each file has a sparse copy there, which all processes on a machine fill
    together. The parts keep their positions. The end of the file contains an XXH3 checksum for
    each part, 8 bytes per 512 bytes of data. A part with a wrong checksum is fetched again.

    Raises:
        ConfigError: the folder ``data.scratch`` cannot be created.
    """

    def __init__(self, store: Store, data: DataConfig, counts: Tensor | None = None) -> None:
        # requests, their bytes, and bytes from scratch; one row per process
        self._counts = shared_rows(_ROWS, 3) if counts is None else counts
        self.store = store
        self.root = store.root
        self._data = data
        self._scratch = data.scratch and Path(data.scratch).expanduser().absolute()
        if self._scratch:
            try:
                self._scratch.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"data.scratch={data.scratch}: {error.strerror}; choose another folder"
                ) from error
        self._lock = threading.Lock()
        self._process = 0
        self._held = 0
        # when the size of scratch was last checked; infinite: nothing more is written
        self._looked_s = 0.0
        self._opened = lru_cache(None)(self._open)

    def __reduce__(self) -> tuple[object, ...]:
        return Ahead, (self.store, self._data, self._counts)

    def counts(self) -> dict[str, int]:
        """Returns the requests, their bytes, and the bytes from scratch, over all processes."""
        sums = map(int, self._counts.sum(0).tolist())
        return dict(zip(("requests", "bytes", "scratch_bytes"), sums, strict=True))

    def _count(self, requests: int, fetched: int, kept: int) -> None:
        row = self._counts[os.getpid() % _ROWS].numpy()
        with self._lock:
            row += requests, fetched, kept

    def expect(self, parts: Sequence[_Part]) -> None:
        """Starts fetching ``parts``, each of which will be read once."""
        with self._lock:
            self._begin()
            for part in parts:
                if part not in self._coming:
                    self._coming[part] = self._pool.submit(self._fetch, *part)
                    self._held += part[2]
            while self._held > _MOST_BYTES:
                self._take(next(iter(self._coming))).cancel()

    def expect_blocks(self, blocks: Sequence[_Part], room: int) -> None:
        """Starts fetching ``blocks``; the ``room`` most recent ones are kept in memory."""
        with self._lock:
            self._begin()
            for name, begin, length in blocks:
                key = name, begin // BLOCK_BYTES
                kept = self._blocks.pop(key, None)
                if kept is None or (kept[1].done() and kept[1].exception()):
                    kept = begin, self._pool.submit(self._fetch, name, begin, length)
                self._blocks[key] = kept
            while len(self._blocks) > room:
                self._blocks.popitem(last=False)

    def _begin(self) -> None:
        if self._process != os.getpid():
            # threads do not survive a fork
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(_THREADS, "ahead", workers.lower_priority)
            self._coming: dict[_Part, Future[bytes]] = {}
            self._blocks: OrderedDict[tuple[str, int], tuple[int, Future[bytes]]] = OrderedDict()

    def _take(self, part: _Part) -> Future[bytes]:
        self._held -= part[2]
        return self._coming.pop(part)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns exactly ``length`` bytes from a file; raises the store's errors."""
        part = name, offset, length
        if not self._process:
            return self._fetch(*part)
        with self._lock:
            begin, block = self._blocks.get((name, offset // BLOCK_BYTES), (0, None))
            coming = None if block or part not in self._coming else self._take(part)
        if block:
            at = offset - begin
            data = block.result()[max(0, at) : at + length]
            # samples in this block may belong to other sets
            if len(data) == length:
                return data
        return coming.result() if coming else self._fetch(*part)

    def _fetch(self, name: str, offset: int, length: int) -> bytes:
        if self._scratch:
            file, end = self._opened(name)
            place = end + offset // BLOCK * 8
            digest = os.pread(file.fd, 8, place)
            if digest.strip(b"\0"):
                data = os.pread(file.fd, length, offset)
                if xxhash.xxh3_64_digest(data) == digest:
                    self._count(0, 0, length)
                    return data
        self._count(1, length, 0)
        data = self.store.read(name, offset, length)
        try:
            if self._scratch and self._has_room():
                os.pwrite(file.fd, data, offset)
                os.pwrite(file.fd, xxhash.xxh3_64_digest(data), place)
        except OSError as error:
            self._stop(str(error))
        return data

    def _open(self, name: str) -> tuple[Descriptor, int]:
        size, tag = self.store.state(name)
        fact = os.fsencode(f"{self.root}/{name} {size} {tag}")
        path = f"{self._scratch}/{xxhash.xxh3_128_hexdigest(fact)}"
        return Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)), padded(size)

    def _has_room(self) -> bool:
        if time.monotonic() > self._looked_s + _LOOK_S:
            self._looked_s = time.monotonic()
            with os.scandir(self._scratch) as files:
                used = sum(file.stat().st_blocks for file in files) * 512
            if used > self._data.scratch_gb * 1e9:
                self._stop("is full; raise data.scratch_gb")
        return self._looked_s < float("inf")

    def _stop(self, why: str) -> None:
        with self._lock:
            told, self._looked_s = self._looked_s, float("inf")
        if told < self._looked_s:
            log.warning("data.scratch=%s: %s; the rest is fetched each time", self._scratch, why)
