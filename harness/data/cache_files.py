"""Where the decoded cache of a run lies, how large it may be, and which process of a machine opens
it for the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import pickle
import shutil
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from harness.config import ConfigError, DataCache, DataConfig
from harness.data import cache
from harness.data.cache import PixelCache
from harness.data.decode import DecodeOptions, decode
from harness.data.download import exclusive
from harness.data.images import ImageDataset
from harness.data.mapped import MappedFile, memory
from harness.data.storage import FolderSource, Source, Subset, cache_root
from harness.runtime import limits
from harness.runtime.errors import BadSample, printable
from harness.runtime.files import make_way, open_regular, set_aside
from harness.runtime.folder import LOGGER
from harness.runtime.seeding import SampleRng
from harness.watch.console import say

# every rank's value in the order of the ranks, on every rank
Gathered = Callable[[Any], list[Any]]

_LOOKED_AT = 16
# for a run that opens the cache, which takes seconds
_WAIT_S = 300.0

_log = logging.getLogger(LOGGER)


def open_caches(
    sources: tuple[Source, Source], data: DataConfig, options: DecodeOptions, gathered: Gathered
) -> tuple[PixelCache, PixelCache] | None:
    """The caches of two sources in one file, as ``data`` asks for; every rank calls this.

    None where another run has it.

    One rank of each machine opens the file, and the others map the same.

    Raises:
        ConfigError: there are no files to decode, the cache cannot be written, or it would be
            larger than there is room for.
    """
    rows = sum(map(len, sources))
    facts = hashlib.sha256(_software(options, data.cache_max_side))
    roots = []
    for source in sources:
        folder, digest = _listed(source, data)
        facts.update(digest)
        roots.append(os.path.realpath(folder))
    make = lambda: _opened(data, facts.hexdigest(), rows, os.fsencode("\0".join(roots)))
    if (files := _shared(make, gathered)) is None:
        return None
    file, checked = files
    train, val = sources
    first = PixelCache(file, checked, 0, train, data.cache_max_side)
    second = PixelCache(file, checked, len(train), val, data.cache_max_side)
    say(
        f"decoded cache: {first.summary()} "
        f"({'in memory' if data.cache is DataCache.ram else cache_root() / 'decoded'})"
    )
    return first, second


def _software(options: DecodeOptions, max_side: int | None) -> bytes:
    decoders = ("pillow", "simplejpeg") if max_side is None else ("pillow", "simplejpeg", "torch")
    facts = {"format": cache.FORMAT, "options": asdict(options), "max_side": max_side}
    return json.dumps(
        {**facts, **{name: version(name) for name in decoders}}, sort_keys=True
    ).encode()


def _listed(source: Source, data: DataConfig) -> tuple[str, bytes]:
    """The folder of ``source``, and a digest of its images' paths in their order."""
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
    """What ``make`` gives in one process of those that see each other, in all of them; or, on every
    rank, what it raises.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        # containers on one machine do not see each other
        machine = file.read() + os.readlink("/proc/self/ns/pid")
    me = machine, os.getpid()
    everyone = gathered(me)
    first = next(i for i, (place, _) in enumerate(everyone) if place == machine)
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
    data: DataConfig, facts: str, rows: int, roots: bytes
) -> tuple[MappedFile, MappedFile] | None:
    """The cache's file, and a byte for each of its rows."""
    if data.cache is DataCache.ram:
        room = limits.measure()
        fd = memory("decoded", 0)
        cache.make_blank(
            fd,
            facts,
            rows,
            _budget(data, room.memory_bytes, f"of memory: {room.sources['memory_bytes']}"),
        )
        file: MappedFile | None = MappedFile(fd, writable=True)
    else:
        file = _on_disk(
            cache_root() / "decoded" / hashlib.sha256(roots).hexdigest()[:32], data, facts, rows
        )
    return None if file is None else (file, MappedFile(memory("checked", rows), writable=True))


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
    """The file at ``place``: to be filled by the first of several runs at a time, to be read by the
    others.
    """
    try:
        # Who comes while another makes the file waits until it is there.
        with exclusive(place.with_name("opening"), _WAIT_S), ExitStack() as held:
            lock = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            held.callback(os.close, lock)
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = MappedFile(_to_fill(place, data, facts, rows), writable=True)
                # for as long as a thread may write
                weakref.finalize(file, held.pop_all().close).atexit = False
                return file
        failure = None
    except OSError as error:
        failure = error
    reason = f"{printable(str(place))}: " + (
        "another process fills it" if failure is None else failure.strerror or str(failure)
    )
    found = _to_read(place, facts, rows)
    if found is None and failure is not None:
        raise ConfigError(
            f"data.cache=disk: {reason}; free space, set WELLFED_CACHE to another folder, or use "
            "data.cache=ram"
        )
    # its images would be larger than with a cache: other pixels
    if found is None and data.cache_max_side is not None:
        advice = (
            "wait until it ends, set WELLFED_CACHE to another folder, or leave "
            "data.cache_max_side out"
        )
        raise ConfigError(
            f"data.cache_max_side={data.cache_max_side}: {reason}, with other pixels; {advice}"
        )
    use = (
        "of other pixels: nothing is kept in this run"
        if found is None
        else "what is in it is used, nothing is added"
    )
    _log.warning("data.cache=disk: %s; %s", reason, use)
    return found


def _to_fill(place: Path, data: DataConfig, facts: str, rows: int) -> int:
    """The descriptor of the file at ``place``, made anew unless its pixels are the right ones."""
    free_bytes = shutil.disk_usage(place.parent).free
    fd = None
    taken = None
    make_way(place)
    with suppress(FileNotFoundError):
        fd = open_regular(place, os.O_RDWR | os.O_NOFOLLOW)
        # what it takes may go on being taken
        free_bytes += os.fstat(fd).st_blocks * 512
        taken = cache.taken_bytes(fd, facts, rows)
    budget_bytes = _budget(data, free_bytes, f"on the disk of {printable(str(place.parent))}")
    used, in_use = taken or (0, 0)
    if fd is not None and used and used <= 2 * in_use:
        if data.cache_gb is not None and used > budget_bytes:
            text = (
                f"{printable(str(place))} has {used / 1e9:.1f} GB already; raise it, or delete "
                "that file"
            )
            raise ConfigError(f"data.cache_gb={data.cache_gb:g}: {text}")
        cache.set_budget(fd, facts, rows, budget_bytes)
        return fd
    if fd is not None:
        os.close(fd)
        why = (
            "most of it of files that have changed"
            if used
            else "of other files, settings or versions, or damaged"
        )
        _log.warning("%s: %s: made anew", place, why)
        # its room is needed; who still reads it keeps it
        place.unlink()
    part = place.with_suffix(".part")
    # of a process that was killed
    set_aside(part)
    fd = open_regular(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        cache.make_blank(fd, facts, rows, budget_bytes)
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)
    return fd


def _to_read(place: Path, facts: str, rows: int) -> MappedFile | None:
    with suppress(OSError), ExitStack() as held:
        fd = open_regular(place)
        held.callback(os.close, fd)
        if cache.taken_bytes(fd, facts, rows) is not None:
            held.pop_all()
            return MappedFile(fd)
    return None


def crop_error(dataset: ImageDataset, max_side: int) -> float | None:
    """Returns how far images change that are shrunk to ``max_side``, in grey levels a pixel; None:
    none is larger.

    Measured on the crops of some images.
    """
    errors = []
    whole, small = np.empty((2, 3, dataset.image_size, dataset.image_size), np.uint8)
    for i in np.linspace(0, len(dataset) - 1, min(len(dataset), _LOOKED_AT)).astype(int).tolist():
        with suppress(BadSample, ValueError):
            # told when the sample is loaded
            image = dataset.source.read(i)[0]
            pixels = decode(image, dataset.options) if isinstance(image, bytes) else image
            if max(pixels.shape) > max_side:
                dataset.transform(pixels, SampleRng(dataset.seed, 0, i), whole)
                dataset.transform(
                    cache.shrunk(pixels, max_side), SampleRng(dataset.seed, 0, i), small
                )
                errors.append(float(np.abs(whole.astype(np.int16) - small).mean()))
    return float(np.mean(errors)) if errors else None
