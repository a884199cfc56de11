"""The generated data set: a tree of JPEG files, shared by every run.

A file's bytes follow from the settings and its index alone, so that the number of processes and the
order in which they write change nothing. Other versions of numpy or Pillow may round or compress
differently.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
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
from harness.runtime.errors import DataError, DiskError
from harness.runtime.files import read_json, set_aside
from harness.runtime.folder import log
from harness.watch.console import progress, say

# Of the pictures: raise it when a pixel changes, so that old trees are left alone.
_VERSION = 2
_MARKER = "shapes.json"
# 0.1 to 0.2 s of one core: how long a signal waits
_CHUNK_PIXELS = 1_000_000


def open_shapes(data: DataConfig) -> tuple[Source, Source]:
    """Opens the training and the validation set, and makes them first if they are missing.

    They lie in ``data.root``, or in a folder of the user's cache named after ``data.generate``.

    Raises:
        ConfigError: fewer images than classes.
        DataError: ``data.root`` holds something else, or files of the tree are missing.
        DiskError, Interrupted: the disk is full, a signal came; nothing half-made is left.
    """
    generate = data.generate
    counts = {"train": generate.train_images, "val": generate.val_images}
    for split, count in counts.items():
        if count < generate.classes:
            raise ConfigError(
                f"data.generate.{split}_images={count} is less than data.generate.classes="
                f"{generate.classes}: every class needs an image"
            )
    facts = {"version": _VERSION, **asdict(generate)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    tree = Path(data.root or cache_root() / f"shapes-{digest}").expanduser().absolute()
    made = False
    # A damaged tree of ours gives way; one that the user named never does.
    try:
        made = _is_made(tree, facts)
    except DataError:
        if data.root:
            raise
        log.warning("%s: damaged: made again", tree)
        set_aside(tree)
    if not made and not data.download:
        raise DataError(f"{tree}: not there, and data.download=false; set data.download=true")
    if not made:
        _make(tree, generate, counts, facts)
    sources = open_folder_splits(tree, None, 0)
    for (split, count), source in zip(counts.items(), sources, strict=True):
        if len(source) != count:
            raise DataError(
                f"{tree / split}: {len(source)} images in place of {count}; delete "
                "the folder above it and it is made again"
            )
    return sources


def _is_made(tree: Path, facts: dict[str, int]) -> bool:
    """Whether ``tree`` is there with these ``facts``.

    Raises:
        DataError: something else is in its place.
    """
    try:
        found = read_json(tree / _MARKER)
        if found == facts:
            return True
        other = ", ".join(
            f"{key}={found.get(key)}" for key in facts if found.get(key) != facts[key]
        )
        reason = f"was generated with {other}"
    except FileNotFoundError:
        if not tree.is_dir() or not any(tree.iterdir()):
            return False
        reason = "holds something else"
    # AttributeError: of a marker that is no object
    except (OSError, ValueError, AttributeError) as error:
        reason = f"cannot be used ({error})"
    raise DataError(f"{tree}: {reason}; set data.root to a folder that does not exist yet")


def _make(
    tree: Path, generate: GenerateConfig, counts: dict[str, int], facts: dict[str, int]
) -> None:
    images = [(split, i) for split, count in counts.items() for i in range(count)]
    pixels = generate.width * generate.height
    # a little more than the largest of a few, in whole blocks of a file system
    most = max(len(_picture(generate, *image)[1]) for image in images[:4])
    needed_mb = len(images) * math.ceil(1.1 * most / 4096) * 4096 / 1e6
    advice = f"about {needed_mb:.0f} MB are needed; free space, or set data.root to another disk"

    def write(part: Path) -> None:
        free_mb = shutil.disk_usage(part).free / 1e6
        if free_mb < needed_mb:
            raise DiskError(f"{tree}: {free_mb:.0f} MB are free, {advice}")
        for split, label in itertools.product(counts, range(generate.classes)):
            (part / split / drawing.look(label, generate.classes).name).mkdir(parents=True)
        chunk = max(1, min(128, _CHUNK_PIXELS // pixels))
        processes = _processes(pixels * len(images))
        context = multiprocessing.get_context("forkserver")
        pool = ProcessPoolExecutor(processes, context, workers.enter_worker)
        draw = functools.partial(_write, part, generate)
        with progress("Generating shapes", total=len(images), unit="images") as bar:
            try:
                done = (
                    pool.map(draw, images, chunksize=chunk) if processes > 1 else map(draw, images)
                )
                for _ in done:
                    bar.advance()
                    signals.check()
            finally:
                pool.shutdown(cancel_futures=True)  # waits: nobody writes after this
        (part / _MARKER).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        say(f"Generated {generate.train_images} + {generate.val_images} images in {tree}")

    try:
        make_once(tree, lambda: _is_made(tree, facts), write, advice)
    except BrokenProcessPool as error:
        raise DataError(
            f"{tree}: a process that draws was killed, perhaps for want of memory; start again"
        ) from error


def _processes(pixels: int) -> int:
    """Returns how many processes draw.

    Not threads: the interpreter takes half the time of a picture of 80x80 pixels.
    """
    # of fewer pixels each, starting processes takes longer than drawing
    return max(1, min(int(limits.measure().cores), pixels // 2_000_000))


def _write(part: Path, generate: GenerateConfig, image: tuple[str, int]) -> None:
    """Writes one image of a split as a JPEG file; classes take turns."""
    split, index = image
    name, content = _picture(generate, split, index)
    (part / split / name / f"{index:07d}.jpg").write_bytes(content)


def _picture(generate: GenerateConfig, split: str, index: int) -> tuple[str, bytes]:
    """Returns the name of an image's class, and the JPEG file."""
    rng = np.random.default_rng((generate.seed, split == "val", index))
    what = drawing.look(index % generate.classes, generate.classes)
    pixels = drawing.draw(what, generate.width, generate.height, rng)
    return what.name, drawing.encode(pixels, generate.quality)
