"""Draws pictures of shapes with the statistics of photographs, by numpy and Pillow alone.

Photographs have a power spectrum near 1/f^2, channels that are mostly one luminance, and objects
that cover each other (Field 1987, https://doi.org/10.1364/JOSAA.4.002379; Ruderman 1997,
https://doi.org/10.1016/S0042-6989(97)00008-4). So does a picture here: a ground of two materials
with 1/f noise, one patterned shape with a rim, and bars in front. Pixels are float32
``[3, height, width]``, 0..1.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy import cos, hypot, maximum, minimum, sin
from numpy.typing import NDArray
from PIL import Image

# float32
Plane = NDArray[Any]

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def _star(u: Plane, v: Plane, points: int, inner: float) -> Plane:
    """A star whose notches lie at radius ``inner``; cos(pi / points): a regular polygon."""
    sector = 2 * math.pi / points
    angle = abs((np.arctan2(u, v) + sector / 2) % sector - sector / 2)
    # The edge from a spike, at (1, 0), to the next notch.
    across = inner * cos(sector / 2) - 1
    down = inner * sin(sector / 2)
    radius = hypot(u, v)
    distance = across * radius * sin(angle) - down * (radius * cos(angle) - 1)
    return np.asarray(distance / hypot(across, down))


# Signed distances, positive inside, roughly in units of the figure's radius: u to the right, v up.
FIGURES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "circle": lambda u, v: 0.92 - hypot(u, v),
    "square": partial(_star, points=4, inner=math.cos(math.pi / 4)),
    "triangle": partial(_star, points=3, inner=math.cos(math.pi / 3)),
    "pentagon": partial(_star, points=5, inner=math.cos(math.pi / 5)),
    "star": partial(_star, points=5, inner=0.42),
    "ring": lambda u, v: 0.22 - abs(hypot(u, v) - 0.75),
    "cross": lambda u, v: minimum(0.95 - maximum(abs(u), abs(v)), 0.3 - minimum(abs(u), abs(v))),
    "crescent": lambda u, v: minimum(0.97 - hypot(u, v), hypot(u - 0.5, v) - 0.8),
    "heart": lambda u, v: maximum(
        0.6 - 0.7 * (abs(u) + abs(v + 0.15)), 0.6 - hypot(abs(u) - 0.425, v - 0.275)
    ),
    "arrow": lambda u, v: maximum(
        minimum(v + 0.05, 0.62 * (1 - v) - 0.78 * abs(u)),
        minimum(0.26 - abs(u), 0.52 - abs(v + 0.43)),
    ),
}
# Patterns on the shape: waves along u, v, the radius and the angle, in radians a unit.
FILLS = {
    "plain": (0, 0, 0, 0),
    "striped": (9, 0, 0, 0),
    "barred": (0, 9, 0, 0),
    "slanted": (7, 7, 0, 0),
    "ringed": (0, 0, 14, 0),
    "rayed": (0, 0, 0, 10),
    "spiral": (0, 0, 11, 2),
    "twisted": (0, 0, 6, 8),
}
# Five twelfths of the colour wheel from one to the next, so that few of them lie far apart.
_HUES = "red mint magenta lime blue orange cyan pink green violet yellow azure"
# What tells classes apart, in this order: only as many of them as the number of classes needs; the
# rest is chance.
_TRAITS = ([*FIGURES], [*FILLS], _HUES.split(), [f"{hue}-rim" for hue in _HUES.split()])


class Look(NamedTuple):
    """What a class fixes about its shape: places in ``_TRAITS``; None: chance."""

    figure: int
    fill: int | None = None
    hue: int | None = None
    # of the outline
    rim: int | None = None

    @property
    def name(self) -> str:
        """The class's name, such as ``star`` or ``star-striped-red``."""
        return "-".join(trait[i] for trait, i in zip(_TRAITS, self, strict=True) if i is not None)


def look(label: int, classes: int) -> Look:
    """Returns the look of class ``label``, with as many traits as ``classes`` need."""
    traits = []
    kinds = 1
    for trait in _TRAITS:
        if kinds < classes:
            traits.append(label // kinds % len(trait))
        kinds *= len(trait)
    return Look(*traits)


def draw(what: Look, width: int, height: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draws a picture of ``what`` from ``rng`` alone, uint8 ``[height, width, 3]``."""
    # The ground: two materials with a ragged border, both with the grain of 1/f noise.
    white = rng.standard_normal((height, width, 2), np.float32).view(np.complex64)[..., 0]
    frequency = hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    # no constant part
    frequency[0, 0] = np.inf
    noise = np.fft.ifft2(white * frequency**-1.1).astype(np.complex64)
    grain = noise.real / noise.real.std()
    border = noise.imag / noise.imag.std()
    luma = rng.uniform(0.2, 0.75)
    one = _colour(luma, rng.random(), rng.uniform(0, 0.12))
    other = _colour(luma + rng.uniform(-0.2, 0.2), rng.random(), rng.uniform(0, 0.12))
    canvas = one + (other - one) * np.clip(5 * border, 0, 1)
    canvas += rng.uniform(0.05, 0.12) * grain

    # The shape, brighter or darker than the ground.
    side = min(width, height)
    radius = side * rng.uniform(0.25, 0.42)
    x = rng.uniform(0.8 * radius, width - 0.8 * radius)
    y = rng.uniform(0.8 * radius, height - 0.8 * radius)
    place, u, v = _patch(canvas, x, y, radius, rng.uniform(-0.6, 0.6))
    apart = rng.uniform(0.25, 0.5)
    around = float(canvas[place].mean())
    luma = around - apart
    if luma < 0.05 or (around + apart < 0.95 and rng.random() < 0.5):
        luma = around + apart
    distance = [*FIGURES.values()][what.figure](u, v)
    fill = what.fill
    if fill is None:
        fill = int(rng.integers(len(FILLS)))
    waves = [*FILLS.values()][fill]
    pattern = sin(sum(map(mul, waves, (u, v, hypot(u, v), np.arctan2(u, v)))))
    surface = _colour(luma, _hue(what.hue, rng), rng.uniform(0.1, 0.25))
    surface = surface + rng.choice((-1, 1)) * rng.uniform(0.05, 0.12) * pattern
    surface += rng.uniform(0.03, 0.08) * grain[::-1, ::-1][place]
    rim = _colour(luma * rng.uniform(0.4, 0.8), _hue(what.rim, rng), 0.2)
    surface += (rim - surface) * _cover(0.09 - distance, radius)
    canvas[place] += (surface - canvas[place]) * _cover(distance, radius)

    # Bars in front of both, and the noise of a sensor.
    for _ in range(rng.integers(1, 5)):
        length = side * rng.uniform(0.1, 0.25)
        x = rng.uniform(0, width)
        y = rng.uniform(0, height)
        place, u, v = _patch(canvas, x, y, length, rng.uniform(0, 2 * math.pi))
        paint = _colour(rng.uniform(0.1, 0.9), rng.random(), rng.uniform(0, 0.2))
        distance = minimum(0.12 - abs(u), 1 - abs(v))
        canvas[place] += (paint - canvas[place]) * _cover(distance, length)
    canvas += rng.uniform(0.004, 0.014) * rng.standard_normal((height, width), np.float32)
    return np.ascontiguousarray((np.clip(canvas, 0, 1) * 255.5).astype(np.uint8).transpose(1, 2, 0))


def encode(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """Returns ``pixels`` as a baseline 4:2:0 JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _colour(luma: float, hue: float, saturation: float) -> Plane:
    """Returns RGB ``[3, 1, 1]`` of this luminance; hue in turns."""
    wheel = cos(2 * math.pi * (hue - np.arange(3) / 3))
    colour = luma + saturation * (wheel - _LUMA @ wheel)
    return np.asarray(colour, np.float32).reshape(3, 1, 1)


def _hue(fixed: int | None, rng: np.random.Generator) -> float:
    """Returns a hue in turns: any, or near the one of ``_HUES`` that is fixed."""
    if fixed is None:
        return rng.random()
    return (5 * fixed + rng.uniform(-0.25, 0.25)) / 12


def _patch(canvas: Plane, x: float, y: float, size: float, turn: float) -> tuple[Any, Plane, Plane]:
    """Returns the index of the part of ``canvas`` around a figure, and its u and v there."""
    reach = 1.3 * size
    rows = slice(max(0, int(y - reach)), int(y + reach) + 2)
    columns = slice(max(0, int(x - reach)), int(x + reach) + 2)
    v, u = np.ogrid[: canvas.shape[1], : canvas.shape[2]]
    up = (y - v[rows]).astype(np.float32) / size
    right = (u[:, columns] - x).astype(np.float32) / size
    place = (..., rows, columns)
    return place, cos(turn) * right + sin(turn) * up, cos(turn) * up - sin(turn) * right


def _cover(distance: Plane, size: float) -> Plane:
    """Returns how much of each pixel lies inside, from distances in ``size`` pixels."""
    return np.clip(distance * size + 0.5, 0, 1)
