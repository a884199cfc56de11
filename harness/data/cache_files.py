"""Opens a run's decoded cache: its place, its size, one process of each machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.config import ConfigError, DataCache, DataConfig
from harness.data import cache
from harness.data.cache import PixelCache
from harness.data.decode import DecodeOptions
from harness.data.download import exclusive
from harness.data.mapped import MappedFile, memory
from harness.data.storage import FolderSource, Source, Subset, cache_root
from harness.runtime import limits
from harness.runtime.files import make_way, open_regular
from harness.runtime.folder import log
from harness.watch.console import say

# every rank's value in the order of the ranks, on every rank
Gathered = Callable[[Any], list[Any]]

# for a run that opens the cache, which takes seconds
_WAIT_S = 300.0


def open_caches(
    sources: tuple[Source, Source], data: DataConfig, options: DecodeOptions, gathered: Gathered
) -> tuple[PixelCache, PixelCache] | None:
    """Opens the caches of two sources in one file; None: another run has it.

    Every rank calls this. One rank of each machine opens the file, and the others map the same.

    Raises:
        ConfigError: there are no files to decode, the cache cannot be written, or it would be
            larger than there is room for; there is no /proc.
    """
    if not os.path.exists("/proc/self/fd"):
        raise ConfigError(
            f"data.cache={data.cache.name}: needs /proc, which is hidden here; use data.cache=none"
        )
    train, val = sources
    # what the pixels of a file depend on, besides its own bytes; torch makes large ones smaller
    software = list(map(version, ("pillow", "simplejpeg", "torch")))
    how = data.cache_max_side, data.interpolation.name
    made_by = cache.FORMAT, asdict(options), data.cache_max_side and how, software
    facts = hashlib.sha256(json.dumps(made_by).encode())
    roots = []
    for source in sources:
        folder, digest = _listed(source, data)
        facts.update(digest)
        roots.append(os.path.realpath(folder))
    name = hashlib.sha256(os.fsencode("\0".join(roots))).hexdigest()[:32]
    # a file may have come to another's place
    facts.update(name.encode())
    place = cache_root() / "decoded" / name
    rows = len(train) + len(val)
    files = _shared(lambda: _opened(place, data, facts.hexdigest(), rows), gathered)
    if files is None:
        return None
    file, checked = files
    first = PixelCache(file, checked, 0, train, *how)
    second = PixelCache(file, checked, len(train), val, *how)
    where = "in memory" if data.cache is DataCache.ram else place.parent
    say(f"decoded cache: {first.summary()} ({where})")
    return first, second


def _listed(source: Source, data: DataConfig) -> tuple[str, bytes]:
    """Returns the folder of ``source``, and a digest of its images' paths in their order."""
    if isinstance(source, Subset):
        folder, digest = _listed(source.source, data)
        return folder, hashlib.sha256(digest + source.indices.tobytes()).digest()
    if isinstance(source, FolderSource):
        return source.root, source.index.digest()
    raise ConfigError(
        f"data.cache={data.cache.name}: has no effect with data={data.name}, whose pixels need no "
        "decoding"
    )


def _shared(make: Callable[[], Any], gathered: Gathered) -> Any:
    """Calls ``make`` in one process a machine; returns or raises its outcome on all."""
    # containers on one machine do not see each other
    machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    me = machine, os.getpid()
    everyone = gathered(me)
    first = [place for place, _ in everyone].index(machine)
    made = None
    failure = None
    if everyone[first] == me:
        try:
            made = make()
        except (ConfigError, OSError) as error:
            # raised here alone, it would leave the others waiting
            failure = error
    # as bytes: what other machines hold cannot be opened here
    told = gathered((failure, pickle.dumps(made)))
    for refused, _ in told:
        if refused is not None:
            raise refused
    return made if everyone[first] == me else pickle.loads(told[first][1])


def _opened(
    place: Path, data: DataConfig, facts: str, rows: int
) -> tuple[MappedFile, MappedFile] | None:
    """Opens the cache's file, and a byte for each of its rows."""
    if data.cache is DataCache.ram:
        room = limits.measure()
        budget_bytes = _budget(
            data, room.memory_bytes, f"of memory: {room.sources['memory_bytes']}"
        )
        fd = memory(0)
        cache.set_budget(fd, facts, rows, 0, budget_bytes)
        file: MappedFile | None = MappedFile(fd, writable=True)
    else:
        file = _on_disk(place, data, facts, rows)
    if file is None:
        return None
    return file, MappedFile(memory(rows), writable=True)


def _budget(data: DataConfig, free_bytes: int, of_what: str) -> int:
    if data.cache_gb is None:
        return free_bytes // 2
    if data.cache_gb * 1e9 > free_bytes:
        raise ConfigError(
            f"data.cache_gb={data.cache_gb:g}: only {free_bytes / 1e9:.1f} GB are free "
            f"({of_what}); lower it"
        )
    return int(data.cache_gb * 1e9)


def _on_disk(place: Path, data: DataConfig, facts: str, rows: int) -> MappedFile | None:
    """Opens the cache file: read-write for the first concurrent run, read-only for the others."""
    try:
        # A run that comes while another makes the file waits until it is there.
        with exclusive(place.with_name("opening"), _WAIT_S):
            return _to_fill(place, data, facts, rows)
    except OSError as error:
        is_filled = isinstance(error, BlockingIOError)
        why = "another process fills it" if is_filled else error.strerror or error
        reason = f"{place}: {why}"
    with suppress(OSError, ValueError):
        file = MappedFile(open_regular(place))
        if cache.taken_bytes(file.fd, facts, rows)[0]:
            log.warning("data.cache=disk: %s; what is in it is used, nothing is added", reason)
            return file
    # without the cache, images beyond cache_max_side would be larger
    if not is_filled or data.cache_max_side is not None:
        raise ConfigError(
            f"data.cache=disk: {reason}; free space, set WELLFED_CACHE to another folder, or use "
            "data.cache=ram"
        )
    log.warning("data.cache=disk: %s; of other pixels: nothing is kept in this run", reason)
    return None


def _to_fill(place: Path, data: DataConfig, facts: str, rows: int) -> MappedFile:
    """Opens the file at ``place`` for writing, made again unless its pixels are right.

    Raises:
        BlockingIOError: another process fills it.
    """
    free_bytes = shutil.disk_usage(place.parent).free
    make_way(place)
    was_there = place.exists()
    fd = open_regular(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    with ExitStack() as opened:
        opened.callback(os.close, fd)
        # for as long as the file is open: as long as a thread may write
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not was_there:
            # unless it gets its table
            opened.callback(place.unlink)
        # what it takes may go on being taken
        free_bytes += os.fstat(fd).st_blocks * 512
        budget_bytes = _budget(data, free_bytes, f"on the disk of {place.parent}")
        used, in_use = cache.taken_bytes(fd, facts, rows)
        if not was_there or 0 < used <= 2 * in_use:
            if data.cache_gb is not None and used > budget_bytes:
                raise ConfigError(
                    f"data.cache_gb={data.cache_gb:g}: {place} has "
                    f"{used / 1e9:.1f} GB already; raise it, or delete that file"
                )
            cache.set_budget(fd, facts, rows, used, budget_bytes)
            opened.pop_all()
            return MappedFile(fd, writable=True)
    log.warning("%s: damaged, or of files or settings that have changed: made again", place)
    # its room is needed; a run that still reads it keeps it
    place.unlink()
    return _to_fill(place, data, facts, rows)
