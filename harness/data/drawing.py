"""Pictures of shapes with the statistics of photographs; pure functions of numpy and Pillow.

Photographs have a power spectrum near 1/f^2, channels that are mostly one luminance, and objects
that cover each other (Field 1987, https://doi.org/10.1364/JOSAA.4.002379; Ruderman 1997,
https://doi.org/10.1016/S0042-6989(97)00008-4). So does a picture here: two materials of coloured
1/f noise, blobs and bars in front, one textured shape with shade and shadow, something small in
front of it, slanted light, sensor noise. Pixels are float32 ``[3, height, width]``, 0..1.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[Any]  # float32
Figure = Callable[[Plane, Plane], Plane]

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_min, _max = np.minimum, np.maximum
_HUE_ANGLES = 2 * math.pi * np.array([0, 1 / 3, 2 / 3], np.float32)


def _spiked(u: Plane, v: Plane, points: int, inner: float | None = None) -> Plane:
    """A star whose notches lie at radius ``inner``; None: a regular polygon."""
    sector = 2 * math.pi / points
    inner = math.cos(math.pi / points) if inner is None else inner
    angle = np.abs((np.arctan2(u, v) + sector / 2) % sector - sector / 2)
    radius = np.hypot(u, v)
    notch_x, notch_y = inner * math.cos(sector / 2), inner * math.sin(sector / 2)
    across = (notch_x - 1) * radius * np.sin(angle) - notch_y * (radius * np.cos(angle) - 1)
    return across / math.hypot(notch_x - 1, notch_y)


# Signed distances, positive inside, roughly in units of the figure's radius: u to the right, v up.
FIGURES: dict[str, Figure] = {
    "circle": lambda u, v: 0.92 - np.hypot(u, v),
    "square": partial(_spiked, points=4),
    "triangle": partial(_spiked, points=3),
    "pentagon": partial(_spiked, points=5),
    "star": partial(_spiked, points=5, inner=0.42),
    "ring": lambda u, v: 0.22 - abs(np.hypot(u, v) - 0.75),
    "cross": lambda u, v: _max(
        _min(0.95 - abs(u), 0.3 - abs(v)), _min(0.3 - abs(u), 0.95 - abs(v))
    ),
    "crescent": lambda u, v: _min(0.97 - np.hypot(u, v), np.hypot(u - 0.5, v) - 0.8),
    "heart": lambda u, v: _max(
        (0.85 - abs(u) - abs(v + 0.15)) / math.sqrt(2), 0.6 - np.hypot(abs(u) - 0.425, v - 0.275)
    ),
    "arrow": lambda u, v: _max(
        _min(v + 0.05, (0.8 * (1 - v) - abs(u)) / 1.28),
        _min(_min(0.26 - abs(u), v + 0.95), 0.1 - v),
    ),
}
# Patterns on the shape, -1..1.
FILLS: dict[str, Figure] = {
    "plain": lambda u, v: np.zeros_like(u),
    "striped": lambda u, v: np.sin(9 * u),
    "checked": lambda u, v: np.sign(np.sin(7 * u) * np.sin(7 * v)),
    "dotted": lambda u, v: np.clip(4 * (np.cos(10 * u) + np.cos(10 * v) - 0.6), -1, 1),
    "ringed": lambda u, v: np.sin(14 * np.hypot(u, v)),
    "rayed": lambda u, v: np.sin(10 * np.arctan2(u, v)),
    "waved": lambda u, v: np.sin(11 * u + 2 * np.sin(6 * v)),
    "spiral": lambda u, v: np.sin(11 * np.hypot(u, v) + 2 * np.arctan2(u, v)),
}
# Five twelfths of the colour wheel from one to the next, so that few of them lie far apart.
HUES = (
    "red",
    "mint",
    "magenta",
    "lime",
    "blue",
    "orange",
    "cyan",
    "pink",
    "green",
    "violet",
    "yellow",
    "azure",
)
# What tells classes apart, in this order: only as many of them as the number of classes needs; the
# rest is chance.
_TRAITS = (tuple(FIGURES), tuple(FILLS), HUES, tuple(f"{hue}-rim" for hue in HUES))
MAX_CLASSES = math.prod(len(trait) for trait in _TRAITS)


class Look(NamedTuple):
    """What a class fixes about its shape, as indices into ``FIGURES``, ``FILLS`` and ``HUES``; None
    is left to chance.
    """

    figure: int
    fill: int | None = None
    hue: int | None = None
    rim: int | None = None  # of the outline

    @property
    def name(self) -> str:
        """The class's name, such as ``star`` or ``star-striped-red``."""
        return "-".join(trait[i] for trait, i in zip(_TRAITS, self, strict=True) if i is not None)


def look(label: int, classes: int) -> Look:
    """The look of class ``label`` out of ``classes``: first figures alone, then with fills, hues
    and rims.
    """
    assert 0 <= label < classes <= MAX_CLASSES
    traits, kinds = [], 1
    for trait in _TRAITS:
        if kinds < classes:
            traits.append(label // kinds % len(trait))
        kinds *= len(trait)
    return Look(*traits)


def draw(what: Look, width: int, height: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A picture of ``what``, uint8 ``[height, width, 3]``, made from ``rng`` alone."""
    texture, warm = _pink(width, height, rng.uniform(0.7, 1.1), rng)
    border, red = _pink(width, height, rng.uniform(1.3, 1.9), rng)
    canvas = _backdrop(texture, warm, red, border, rng)
    side = min(width, height)
    radius = side * rng.uniform(0.25, 0.42)
    x, y = (rng.uniform(0.8 * radius, length - 0.8 * radius) for length in (width, height))
    for _ in range(rng.integers(2, 7)):
        size = side * rng.uniform(0.04, 0.1)
        _clutter(canvas, rng.uniform(0, width), rng.uniform(0, height), size, rng)
    _shape(canvas, what, (x, y, radius), texture, rng)
    for _ in range(rng.integers(0, 3)):
        angle, away = rng.uniform(0, 2 * math.pi), radius * rng.uniform(0.4, 1.0)
        _clutter(
            canvas,
            x + away * math.cos(angle),
            y + away * math.sin(angle),
            radius * rng.uniform(0.1, 0.2),
            rng,
        )
    # Slanted light and the noise of a sensor.
    canvas *= 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, width, dtype=np.float32)
    canvas *= 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    canvas += rng.uniform(0.004, 0.014) * rng.standard_normal((height, width), np.float32)
    return np.ascontiguousarray(
        (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
    )


def encode(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """``pixels`` as a baseline 4:2:0 JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@lru_cache(maxsize=2)
def _log_frequency(width: int, height: int) -> Plane:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = np.inf  # no constant part
    return np.asarray(np.log(frequency), np.float32)


def _pink(
    width: int, height: int, steepness: float, rng: np.random.Generator
) -> tuple[Plane, Plane]:
    """Two independent planes of noise with amplitude 1 / f^steepness, mean 0 and standard deviation
    1.
    """
    amplitude = np.exp(-steepness * _log_frequency(width, height))
    field = np.fft.ifft2(
        rng.standard_normal((height, width, 2), np.float32).view(np.complex64)[..., 0] * amplitude
    )
    one, other = (np.ascontiguousarray(part, np.float32) for part in (field.real, field.imag))
    return one / one.std(), other / other.std()


def _colour(luma: float, hue: float, saturation: float) -> Plane:
    """RGB ``[3, 1, 1]`` of this luminance; hue in turns."""
    wheel = np.cos(2 * math.pi * hue - _HUE_ANGLES)
    return np.asarray(luma + saturation * (wheel - (_LUMA * wheel).sum()), np.float32)[
        :, None, None
    ]


def _backdrop(
    texture: Plane, warm: Plane, red: Plane, border: Plane, rng: np.random.Generator
) -> Plane:
    """Two materials with a ragged border between them."""
    luma = rng.uniform(0.2, 0.75)
    one = _colour(luma, rng.random(), rng.uniform(0, 0.15))
    other = _colour(luma + rng.uniform(-0.2, 0.2), rng.random(), rng.uniform(0, 0.15))
    canvas: Plane = one + (other - one) * np.clip(
        border * rng.uniform(4, 20) + rng.uniform(-4, 4), 0, 1
    )
    strength = rng.uniform(0.05, 0.12)
    # Luminance, yellow-blue and red-green vary about as 1 : 0.3 : 0.1 in photographs.
    canvas += strength * texture
    canvas += 0.3 * strength * warm * np.array([0.5, 0.5, -1], np.float32)[:, None, None]
    canvas += 0.1 * strength * red * np.array([1, -1, 0], np.float32)[:, None, None]
    return canvas


def _patch(
    canvas: Plane, x: float, y: float, size: float, turn: float, stretch: float = 1.0
) -> tuple[slice, slice, Plane, Plane]:
    """The rows and columns around a figure of radius ``size`` pixels, and its own coordinates u and
    v of their pixels.
    """
    reach = 1.3 * size * max(stretch, 1 / stretch)
    _, height, width = canvas.shape
    rows = slice(max(0, int(y - reach)), max(0, min(height, int(y + reach) + 2)))
    columns = slice(max(0, int(x - reach)), max(0, min(width, int(x + reach) + 2)))
    right = (np.arange(columns.start, columns.stop, dtype=np.float32) - x)[None, :] / size
    up = (y - np.arange(rows.start, rows.stop, dtype=np.float32))[:, None] / size
    cos, sin = math.cos(turn), math.sin(turn)
    return rows, columns, (cos * right + sin * up) / stretch, (cos * up - sin * right) * stretch


def _cover(distance: Plane, size: float, blur_px: float = 1.0) -> Plane:
    """How much of each pixel lies inside, 0..1, from signed distances in units of ``size`` pixels."""
    return np.asarray(np.clip(distance * (size / blur_px) + 0.5, 0, 1))


def _clutter(canvas: Plane, x: float, y: float, size: float, rng: np.random.Generator) -> None:
    """Draw a bar or an irregular blob: like no class, and smaller than any shape."""
    turn = rng.uniform(0, 2 * math.pi)
    if rng.random() < 0.4:
        size *= 2.5
        rows, columns, u, v = _patch(canvas, x, y, size, turn)
        distance = _min(0.12 - np.abs(u), 1 - np.abs(v))
    else:
        rows, columns, u, v = _patch(canvas, x, y, size, turn, rng.uniform(1, 1.6))
        angle, distance = np.arctan2(u, v), 0.75 - np.hypot(u, v)
        for waves in (2, 3, 5):
            distance += rng.uniform(0.05, 0.16) * np.cos(
                waves * angle + rng.uniform(0, 2 * math.pi)
            )
    paint = _colour(rng.uniform(0.1, 0.9), rng.random(), rng.uniform(0, 0.2))
    region = canvas[:, rows, columns]
    region += (paint * (1 + rng.uniform(-0.25, 0.25) * u) - region) * _cover(distance, size)


def _shape(
    canvas: Plane,
    what: Look,
    place: tuple[float, float, float],
    texture: Plane,
    rng: np.random.Generator,
) -> None:
    """Draw the shape at ``place`` (x, y, radius in pixels) with its shadow, fill, rim and shade."""
    (x, y, radius), figure = place, list(FIGURES.values())[what.figure]
    turn, stretch = rng.uniform(-0.6, 0.6), rng.uniform(0.92, 1.09)
    rows, columns, u, v = _patch(
        canvas, x + radius * rng.uniform(-0.15, 0.15), y + 0.12 * radius, radius, turn, stretch
    )
    canvas[:, rows, columns] *= 1 - rng.uniform(0, 0.4) * _cover(
        figure(u, v), radius, 0.25 * radius
    )
    rows, columns, u, v = _patch(canvas, x, y, radius, turn, stretch)
    region = canvas[:, rows, columns]
    distance = figure(u, v)
    paint, ink, rim = _paints(what, float((region.mean(axis=(1, 2)) * _LUMA).sum()), rng)
    fill = list(FILLS.values())[rng.integers(len(FILLS)) if what.fill is None else what.fill]
    surface = paint + (ink - paint) * (0.5 + 0.5 * fill(u, v))
    surface += (
        rng.uniform(0.03, 0.08) * texture[::-1, ::-1][rows, columns]
    )  # grained, but not as the ground is
    surface *= 1 + rng.uniform(-0.2, 0.2) * u + rng.uniform(-0.2, 0.2) * v
    if what.rim is not None or rng.random() < 0.5:
        surface += (rim - surface) * _cover(0.09 - distance, radius)
    region += (surface - region) * _cover(distance, radius, rng.uniform(1, 1.6))


def _paints(what: Look, around: float, rng: np.random.Generator) -> tuple[Plane, Plane, Plane]:
    """Colours of the shape, its pattern and its rim, such that it stands out from the luminance
    ``around``.
    """
    apart = rng.uniform(0.25, 0.5)
    brighter = around + apart < 0.95 and (around - apart < 0.05 or rng.random() < 0.5)
    luma = around + apart if brighter else around - apart
    hue, saturation = (
        _hue(what.hue, rng),
        rng.uniform(*((0, 0.25) if what.hue is None else (0.2, 0.35))),
    )
    contrast = rng.uniform(*((0, 0.14) if what.fill is None else (0.12, 0.25)))
    ink = _colour(luma + contrast * rng.choice((-1, 1)), hue, saturation)
    rim = _colour(
        luma * rng.uniform(0.4, 0.8), _hue(what.rim, rng), 0.1 if what.rim is None else 0.3
    )
    return _colour(luma, hue, saturation), ink, rim


def _hue(fixed: int | None, rng: np.random.Generator) -> float:
    """A hue in turns: any, or near the one of ``HUES`` that is fixed."""
    return rng.random() if fixed is None else (5 * fixed + rng.uniform(-0.25, 0.25)) / len(HUES)
