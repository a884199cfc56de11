"""Generates the shapes dataset, a tree of JPEG files shared by all runs.

A file's bytes depend only on the settings and its index, not on the number of processes. Other
versions of numpy or Pillow may round or compress differently.

An image has the power spectrum of a photograph, near 1/f^2 (Field 1987, https://doi.org/10.1364/
JOSAA.4.002379), and as many bytes per pixel, so decoding it costs as much.
"""

from __future__ import annotations

import colorsys
import hashlib
import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from ..config import ConfigError, DataConfig, GenerateConfig
from ..monitor.console import progress, say
from ..runtime import limits, signals, workers
from ..runtime.errors import DataError
from ..runtime.files import read_json
from .download import make_once
from .storage import Source, cache_root, open_folder_splits

# version of the tree's layout, not of its images
_VERSION = 2
_MARKER = "shapes.json"
# takes one core 0.1 s, the reaction time to a signal
_CHUNK_PIXELS = 1_000_000

# a figure is a polygon whose points alternate between radius 1 and its second number
_FIGURES = {
    "circle": (24, 1.0),
    "square": (4, math.cos(math.pi / 4)),
    "triangle": (3, math.cos(math.pi / 3)),
    "blade": (2, 0.35),
    "propeller": (3, 0.15),
    "cross": (4, 0.3),
    "star": (5, 0.42),
    "sun": (9, 0.7),
    "splash": (7, 0.25),
    "pentagon": (5, math.cos(math.pi / 5)),
}


def open_shapes(data: DataConfig) -> tuple[Source, Source]:
    """Opens the training and validation sets; generates them first if they are missing.

    They are stored in ``data.root``, or in the user's cache under the digest of ``data.generate``.

    Raises:
        ConfigError: there are fewer images than classes.
        DataError: ``data.root`` has other contents, or files in the tree are missing.
        DiskError, Interrupted: the disk is full, or a signal arrived; no partial tree is left.
    """
    generate = data.generate
    counts = {"train": generate.train_images, "val": generate.val_images}
    for split, count in counts.items():
        if count < generate.classes:
            raise ConfigError(
                f"data.generate.{split}_images={count} is less than data.generate.classes="
                f"{generate.classes}; every class needs an image"
            )
    facts = {"version": _VERSION, **asdict(generate)}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    tree = Path(data.root or cache_root() / f"shapes-{digest}").expanduser().absolute()

    def is_made() -> bool:
        """Returns whether the tree is complete and matches these facts."""
        try:
            return bool(read_json(tree / _MARKER) == facts)
        except (OSError, ValueError):
            return False

    if not is_made():
        with suppress(OSError):
            # replacing an empty folder loses nothing
            tree.rmdir()
        if data.root and os.path.lexists(tree):
            raise DataError(
                f"{tree} contains other files, or shapes with other settings; set data.root to a "
                "folder that does not exist yet"
            )
        if not data.download:
            raise DataError(f"{tree} is missing, and data.download=false; set data.download=true")
        try:
            make_once(tree, is_made, partial(_draw_all, generate, counts, facts))
        except BrokenProcessPool as error:
            raise DataError(
                f"{tree}: an image-generation process was killed, possibly because memory ran "
                "out; run again"
            ) from error
    sources = open_folder_splits(tree, None)
    for (split, count), source in zip(counts.items(), sources, strict=True):
        if len(source) != count:
            raise DataError(
                f"{tree / split} has {len(source)} images instead of {count}; delete "
                "its parent folder to generate it again"
            )
    return sources


def _draw_all(
    generate: GenerateConfig, counts: dict[str, int], facts: dict[str, int], part: Path
) -> None:
    """Fills the new folder ``part``, using as many processes as are worth starting."""
    images = [(split, i) for split, count in counts.items() for i in range(count)]
    pixels = generate.width * generate.height
    processes = _processes(pixels * len(images))
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(processes, context, workers.enter_worker)
    write = partial(_write, part, generate)
    with progress("Generating shapes", total=len(images), unit="images") as bar:
        try:
            chunk = max(1, min(128, _CHUNK_PIXELS // pixels))
            done = pool.map(write, images, chunksize=chunk) if processes > 1 else map(write, images)
            for _ in done:
                bar.advance()
                signals.check()
        finally:
            pool.shutdown(cancel_futures=True)  # waits for all writers
    (part / _MARKER).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    say(f"Generated {generate.train_images} + {generate.val_images} shape images")


def _processes(pixels: int) -> int:
    """Returns the number of processes that each draw enough pixels to be worth starting."""
    return max(1, min(int(limits.measure().cores), pixels // 2_000_000))


def _write(part: Path, generate: GenerateConfig, image: tuple[str, int]) -> None:
    """Writes one image in a split as a JPEG file; classes take turns."""
    split, index = image
    rng = np.random.default_rng((generate.seed, split == "val", index))
    label = index % generate.classes
    pixels = draw(label, generate.classes, generate.width, generate.height, rng)
    folder = part / split / class_name(label, generate.classes)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / f"{index:07d}.jpg", quality=generate.quality)


def class_name(label: int, classes: int) -> str:
    """Returns a class name: its figure and, beyond ten classes, its hue number."""
    hue, figure = divmod(label, len(_FIGURES))
    name = [*_FIGURES][figure]
    return name if classes <= len(_FIGURES) else f"{name}-{hue:03d}"


def draw(label: int, classes: int, width: int, height: int, rng: np.random.Generator) -> np.ndarray:
    """Draws an image of class ``label`` with ``rng``, uint8 ``[height, width, 3]``.

    The image shows a figure on a background, both with 1/f noise. Everything except the figure's
    shape and hue is random.
    """
    size = np.array([width, height])
    side = size.min()
    hue, figure = divmod(label, len(_FIGURES))
    corners, notch = [*_FIGURES.values()][figure]
    angles = rng.uniform(-0.6, 0.6) + np.arange(2 * corners) * np.pi / corners
    radius = side * rng.uniform(0.25, 0.42)
    radii = radius * np.resize([1, notch], 2 * corners)
    center = rng.uniform(0.8 * radius, size - 0.8 * radius)
    points = center + (radii * (np.sin(angles), -np.cos(angles))).T

    figures = Image.new("L", (width, height))
    ImageDraw.Draw(figures).polygon(points.ravel().tolist(), fill=1)

    # hue, saturation and value of background and figure
    ground = rng.uniform((0, 0, 0.1), (1, 0.3, 0.9))
    turn = (hue + rng.uniform(-0.25, 0.25)) / math.ceil(classes / len(_FIGURES))
    # at least 0.2 brighter or darker than the background
    value = 0.1 + (ground[2] - 0.1 + rng.uniform(0.2, 0.6)) % 0.8
    tint = turn, rng.uniform(0.2, 0.6), value
    palette = np.array([colorsys.hsv_to_rgb(*ground), colorsys.hsv_to_rgb(*tint)], np.float32)

    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    # zero mean
    frequency[0, 0] = np.inf
    white = rng.standard_normal((height, width), np.float32)
    grain = np.fft.irfft2(np.fft.rfft2(white) * frequency**-1.1, (height, width))
    luma = rng.uniform(0.05, 0.11) * grain / grain.std() + 0.01 * white
    canvas: np.ndarray = palette[np.asarray(figures)] + luma[..., None]
    return (canvas.clip(0, 1) * 255.5).astype(np.uint8)
