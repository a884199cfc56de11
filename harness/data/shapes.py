"""The generated data set: an ImageNet-layout tree of JPEG files, made once and shared by every run.

A file's bytes follow from the settings and its index alone, so that the number of processes and the
order in which they write change nothing. Other versions of numpy or Pillow may round or compress
differently.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import numpy as np

from harness.config import ConfigError, DataConfig, GenerateConfig
from harness.data import drawing
from harness.data.download import make_once
from harness.data.storage import Source, cache_root, open_folder_splits
from harness.runtime import limits, signals, workers
from harness.runtime.errors import DataError, DiskError, printable
from harness.runtime.files import read_json, set_aside
from harness.runtime.folder import LOGGER
from harness.watch.console import progress, say

# of the pictures: whoever changes a pixel raises it, and old trees are left alone
_VERSION = 1
_MARKER = "shapes.json"
_SPLITS = ("train", "val")
# 0.1 to 0.2 s of one core: how long a signal waits
_CHUNK_PIXELS = 1_000_000
# below this, starting processes takes longer than drawing
_ALONE_PIXELS = 2_000_000
# what a file system gives a file at least
_BLOCK_BYTES = 4096

_log = logging.getLogger(LOGGER)


def open_shapes(data: DataConfig) -> tuple[Source, Source]:
    """The training and the validation set, made first where they are not there yet.

    They lie in ``data.root``, or in a folder of the user's cache whose name follows from
    ``data.generate``.

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
            reason = (
                f"is less than data.generate.classes={generate.classes}: every class needs an image"
            )
            raise ConfigError(f"data.generate.{split}_images={count} {reason}")
    digest = hashlib.sha256(json.dumps(_facts(generate), sort_keys=True).encode()).hexdigest()
    tree = (
        Path(data.root).expanduser() if data.root else cache_root() / f"shapes-{digest[:12]}"
    ).absolute()
    try:
        made = _is_made(tree, _facts(generate))
    except DataError:
        if data.root:
            raise
        _log.warning("%s: damaged: made again", tree)
        set_aside(tree)
        made = False
    if not made:
        _make(tree, generate)
    sources = open_folder_splits(tree, None, 0)
    for split, source in zip(_SPLITS, sources, strict=True):
        if len(source) != _count(generate, split):
            counts = f"{len(source)} images in place of {_count(generate, split)}"
            raise DataError(
                f"{printable(str(tree / split))}: {counts}; delete the folder above it and it is "
                "made anew"
            )
    return sources


def _count(generate: GenerateConfig, split: str) -> int:
    return generate.train_images if split == "train" else generate.val_images


def _facts(generate: GenerateConfig) -> dict[str, int]:
    return {"version": _VERSION, **asdict(generate)}


def _is_made(tree: Path, wanted: dict[str, int]) -> bool:
    """Whether ``tree`` is there; a refusal where something else is in its place."""
    shown = printable(str(tree))
    way_out = "set data.root to a folder that does not exist yet"
    try:
        found = read_json(tree / _MARKER)
        if not isinstance(found, dict):
            raise ValueError("no object in its marker")
    except FileNotFoundError:
        if tree.is_dir() and any(tree.iterdir()):
            raise DataError(f"{shown}: holds something else; {way_out}") from None
        return False
    except (OSError, ValueError) as error:
        raise DataError(f"{shown}: cannot be used ({error}); {way_out}") from error
    if found != wanted:
        other = ", ".join(
            f"{key}={found.get(key)}" for key in wanted if found.get(key) != wanted[key]
        )
        raise DataError(
            f"{shown}: was generated with {other}; delete it, or set data.root to another folder"
        )
    return True


def _make(tree: Path, generate: GenerateConfig) -> None:
    shown = printable(str(tree))
    needed_bytes = _estimate_bytes(generate)
    advice = (
        f"about {needed_bytes / 1e6:.0f} MB are needed; free space, or set data.root to a "
        "folder on another disk"
    )

    def write(part: Path) -> None:
        free_bytes = shutil.disk_usage(part).free
        if free_bytes < needed_bytes:
            raise DiskError(f"{shown}: {free_bytes / 1e6:.0f} MB are free, {advice}")
        _write_tree(part, generate)
        say(f"Generated {generate.train_images} + {generate.val_images} images in {tree}")

    try:
        make_once(tree, lambda: _is_made(tree, _facts(generate)), write, advice)
    except BrokenProcessPool as error:
        raise DataError(
            f"{shown}: a process that draws was killed, perhaps for want of memory; start again"
        ) from error


def _estimate_bytes(generate: GenerateConfig) -> int:
    """What the files will take on the disk, from a few of them."""
    sizes = [
        len(_picture(generate, "train", index)) for index in range(min(4, generate.train_images))
    ]
    blocks = math.ceil(1.1 * max(sizes) / _BLOCK_BYTES)
    return blocks * _BLOCK_BYTES * (generate.train_images + generate.val_images)


def _write_tree(part: Path, generate: GenerateConfig) -> None:
    for split, label in itertools.product(_SPLITS, range(generate.classes)):
        (part / split / drawing.look(label, generate.classes).name).mkdir(parents=True)
    images = [(split, index) for split in _SPLITS for index in range(_count(generate, split))]
    step = max(1, min(128, _CHUNK_PIXELS // (generate.width * generate.height)))
    write = functools.partial(_write, part, generate)
    processes = _processes(generate, math.ceil(len(images) / step))
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("forkserver"), workers.enter_worker
    )
    with progress("Generating shapes", total=len(images), unit="images") as bar:
        try:
            for _ in (
                map(write, images) if processes == 1 else pool.map(write, images, chunksize=step)
            ):
                bar.advance()
                signals.check()
        finally:
            # waits for the chunks in progress: nobody writes after this
            pool.shutdown(cancel_futures=True)
    (part / _MARKER).write_text(json.dumps(_facts(generate), indent=1), encoding="utf-8")


def _processes(generate: GenerateConfig, chunks: int) -> int:
    """How many processes draw; not threads, for the interpreter takes half the time of a picture of
    80x80 pixels.
    """
    pixels = generate.width * generate.height * (generate.train_images + generate.val_images)
    return 1 if pixels < _ALONE_PIXELS else max(1, min(int(limits.measure().cores), chunks))


def _write(part: Path, generate: GenerateConfig, image: tuple[str, int]) -> None:
    split, index = image
    folder = part / split / drawing.look(index % generate.classes, generate.classes).name
    (folder / f"{index:07d}.jpg").write_bytes(_picture(generate, split, index))


def _picture(generate: GenerateConfig, split: str, index: int) -> bytes:
    """Image ``index`` of a split as a JPEG file; classes take turns."""
    rng = np.random.default_rng((generate.seed, _SPLITS.index(split), index))
    what = drawing.look(index % generate.classes, generate.classes)
    return drawing.encode(
        drawing.draw(what, generate.width, generate.height, rng), generate.quality
    )
