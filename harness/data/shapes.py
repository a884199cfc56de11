"""The generated data set: an ImageNet-layout tree of JPEG files, made once and shared by every run.

A file's bytes follow from the settings and its index alone, so that the number of processes and the order in which they
write change nothing. Other versions of numpy or Pillow may round or compress differently.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import numpy as np

from harness.config import ConfigError, DataConfig, GenerateConfig
from harness.data import drawing
from harness.data.download import exclusive
from harness.data.storage import Source, cache_root, open_folder_splits
from harness.runtime import limits, signals, workers
from harness.runtime.errors import DataError, DiskError, printable
from harness.watch.console import progress, say

_VERSION = 1  # of the pictures: whoever changes a pixel raises it, and old trees are left alone
_MARKER = "shapes.json"
_Chunk = tuple[str, range]  # images of a split, for one process

_SPLITS = ("train", "val")
_CHUNK_PIXELS = 1_000_000  # 0.1 to 0.2 s of one core: how long a signal waits
_ALONE_PIXELS = 2_000_000  # below this, starting processes takes longer than drawing
_POLL_S = 0.2
_BLOCK_BYTES = 4096  # what a file system gives a file at least


def open_shapes(data: DataConfig) -> tuple[Source, Source]:
    """The training and the validation set, made first where they are not there yet.

    They lie in ``data.root``, or in a folder of the user's cache whose name follows from ``data.generate``.

    Raises:
        ConfigError: fewer images than classes.
        DataError: ``data.root`` holds something else, or files of the tree are missing.
        DiskError: the disk is full or cannot be written.
        Interrupted: a signal came; nothing half-made is left.
    """
    generate = data.generate
    for split in _SPLITS:
        count = _count(generate, split)
        if count < generate.classes:
            raise ConfigError(
                f"data.generate.{split}_images={count} is less than data.generate.classes={generate.classes}: "
                "every class needs an image"
            )
    tree = Path(data.root).expanduser().absolute() if data.root else cache_root().absolute() / _name(generate)
    if not _is_made(tree, generate):
        _make(tree, generate)
    sources = open_folder_splits(tree, None, 0)
    for split, source in zip(_SPLITS, sources, strict=True):
        if len(source) != _count(generate, split):
            raise DataError(
                f"{printable(str(tree / split))}: {len(source)} images in place of {_count(generate, split)}; "
                "delete the folder above it and it is made anew"
            )
    return sources


def _count(generate: GenerateConfig, split: str) -> int:
    return generate.train_images if split == "train" else generate.val_images


def _facts(generate: GenerateConfig) -> dict[str, int]:
    return {"version": _VERSION, **asdict(generate)}


def _name(generate: GenerateConfig) -> str:
    text = json.dumps(_facts(generate), sort_keys=True)
    return f"shapes-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _is_made(tree: Path, generate: GenerateConfig) -> bool:
    """Whether ``tree`` is there; a refusal where something else is in its place."""
    shown = printable(str(tree))
    try:
        found = json.loads((tree / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if tree.is_dir() and any(tree.iterdir()):
            raise DataError(f"{shown}: holds something else; set data.root to a folder that does not exist yet") from None
        return False
    except (OSError, ValueError) as error:
        raise DataError(f"{shown}: cannot be used ({error}); set data.root to a folder that does not exist yet") from error
    wanted = _facts(generate)
    if found != wanted:
        other = {key: found.get(key) for key in wanted if found.get(key) != wanted[key]}
        raise DataError(
            f"{shown}: was generated with {', '.join(f'{key}={value}' for key, value in other.items())}; "
            "delete it, or set data.root to another folder"
        )
    return True


def _make(tree: Path, generate: GenerateConfig) -> None:
    """Write the tree under another name, and give it its own once it is whole."""
    shown = printable(str(tree))
    needed_bytes = _estimate_bytes(generate)
    advice = f"about {needed_bytes / 1e6:.0f} MB are needed; free space, or set data.root to a folder on another disk"
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(tree.with_name(f"{tree.name}.lock")):
            if _is_made(tree, generate):  # another process made it meanwhile
                return
            for stale in tree.parent.glob(f"{glob.escape(tree.name)}.*.part"):  # the lock says that its owner is dead
                shutil.rmtree(stale, ignore_errors=True)
            free_bytes = shutil.disk_usage(tree.parent).free
            if free_bytes < needed_bytes:
                raise DiskError(f"{shown}: {free_bytes / 1e6:.0f} MB are free, {advice}")
            part = tree.with_name(f"{tree.name}.{os.getpid()}.part")
            try:
                _write_tree(part, generate)
                # No fsync: it takes longer than the drawing, and a file that a power failure cut off is refused when read.
                os.replace(part, tree)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise DiskError(f"{shown}: cannot be written: {error.strerror or error}; {advice}") from error
    except BrokenProcessPool as error:
        raise DataError(f"{shown}: a process that draws was killed, perhaps for want of memory; start again") from error
    say(f"Generated {generate.train_images} + {generate.val_images} images in {tree}")


def _estimate_bytes(generate: GenerateConfig) -> int:
    """What the files will take on the disk, from a few of them."""
    sizes = [len(_picture(generate, "train", index)) for index in range(min(4, generate.train_images))]
    blocks = math.ceil(1.1 * max(sizes) / _BLOCK_BYTES)
    return blocks * _BLOCK_BYTES * (generate.train_images + generate.val_images)


def _write_tree(part: Path, generate: GenerateConfig) -> None:
    looks = [drawing.look(label, generate.classes) for label in range(generate.classes)]
    for split, what in itertools.product(_SPLITS, looks):
        (part / split / what.name).mkdir(parents=True)
    step = max(1, min(128, _CHUNK_PIXELS // (generate.width * generate.height)))
    chunks = [
        (split, range(_count(generate, split))[first : first + step])
        for split in _SPLITS
        for first in range(0, _count(generate, split), step)
    ]
    total = generate.train_images + generate.val_images
    with progress("Generating shapes", total=total, unit="images") as bar:
        for written in _written(functools.partial(_write, part, generate), chunks, _processes(generate, len(chunks))):
            bar.advance(written)
            signals.check()
    (part / _MARKER).write_text(json.dumps(_facts(generate), indent=1), encoding="utf-8")


def _processes(generate: GenerateConfig, chunks: int) -> int:
    """How many processes draw; not threads, for the interpreter takes half the time of a picture of 80x80 pixels."""
    pixels = generate.width * generate.height * (generate.train_images + generate.val_images)
    return 1 if pixels < _ALONE_PIXELS else max(1, min(int(limits.measure().cores), chunks))


def _written(write: Callable[[_Chunk], int], chunks: list[_Chunk], processes: int) -> Iterator[int]:
    """``write`` all ``chunks``: the number of images of each as it is done, and 0 after a while without one."""
    if processes == 1:
        yield from map(write, chunks)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver"), workers.enter_worker)
    try:
        waiting, pending = iter(chunks), set[Future[int]]()
        while True:
            pending |= {pool.submit(write, chunk) for chunk in itertools.islice(waiting, 4 * processes - len(pending))}
            if not pending:
                return
            done, pending = wait(pending, _POLL_S, FIRST_COMPLETED)
            yield sum(future.result() for future in done)
    finally:
        pool.shutdown(cancel_futures=True)  # waits for the chunks in progress: nobody writes after this


def _write(part: Path, generate: GenerateConfig, chunk: _Chunk) -> int:
    split, indices = chunk
    for index in indices:
        folder = part / split / drawing.look(index % generate.classes, generate.classes).name
        (folder / f"{index:07d}.jpg").write_bytes(_picture(generate, split, index))
    return len(indices)


def _picture(generate: GenerateConfig, split: str, index: int) -> bytes:
    """Image ``index`` of a split as a JPEG file; classes take turns."""
    rng = np.random.default_rng((generate.seed, _SPLITS.index(split), index))
    what = drawing.look(index % generate.classes, generate.classes)
    return drawing.encode(drawing.draw(what, generate.width, generate.height, rng), generate.quality)
