"""Pictures of shapes with the statistics of photographs; pure functions of numpy and Pillow.

Photographs have a power spectrum near 1/f^2, channels that are mostly one luminance, and objects that cover each other
(Field 1987, https://doi.org/10.1364/JOSAA.4.002379; Ruderman 1997, https://doi.org/10.1016/S0042-6989(97)00008-4). So
does a picture here: two materials of coloured 1/f noise, blobs and bars in front, one textured shape with shade and
shadow, something small in front of it, slanted light, sensor noise. Pixels are float32 ``[3, height, width]``, 0..1.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[Any]  # float32
Figure = Callable[[Plane, Plane], Plane]

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_HUE_ANGLES = 2 * math.pi * np.array([0, 1 / 3, 2 / 3], np.float32)


def _spiked(u: Plane, v: Plane, points: int, inner: float) -> Plane:
    """A star whose notches lie at radius ``inner``; with ``inner = cos(pi / points)`` it is a regular polygon."""
    sector = 2 * math.pi / points
    angle = np.abs((np.arctan2(u, v) + sector / 2) % sector - sector / 2)
    radius = np.hypot(u, v)
    notch_x, notch_y = inner * math.cos(sector / 2), inner * math.sin(sector / 2)
    across = (notch_x - 1) * radius * np.sin(angle) - notch_y * (radius * np.cos(angle) - 1)
    return across / math.hypot(notch_x - 1, notch_y)


def _polygon(sides: int) -> Figure:
    return functools.partial(_spiked, points=sides, inner=math.cos(math.pi / sides))


def _cross(u: Plane, v: Plane) -> Plane:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.minimum(0.95 - u, 0.3 - v), np.minimum(0.3 - u, 0.95 - v))


def _heart(u: Plane, v: Plane) -> Plane:
    u = np.abs(u)
    square = (0.85 - u - np.abs(v + 0.15)) / math.sqrt(2)
    return np.maximum(square, 0.6 - np.hypot(u - 0.425, v - 0.275))


def _arrow(u: Plane, v: Plane) -> Plane:
    u = np.abs(u)
    head = np.minimum(v + 0.05, (0.8 * (1 - v) - u) / 1.28)
    return np.maximum(head, np.minimum(np.minimum(0.26 - u, v + 0.95), 0.1 - v))


def _trefoil(u: Plane, v: Plane) -> Plane:
    centres = ((0.0, 0.5), (0.43, -0.25), (-0.43, -0.25))
    return 0.48 - functools.reduce(np.minimum, [np.hypot(u - x, v - y) for x, y in centres])


# Signed distances, positive inside, roughly in units of the figure's radius: u to the right, v up.
FIGURES: dict[str, Figure] = {
    "circle": lambda u, v: 0.92 - np.hypot(u, v),
    "square": _polygon(4),
    "triangle": _polygon(3),
    "pentagon": _polygon(5),
    "star": functools.partial(_spiked, points=5, inner=0.42),
    "ring": lambda u, v: 0.22 - np.abs(np.hypot(u, v) - 0.75),
    "cross": _cross,
    "crescent": lambda u, v: np.minimum(0.97 - np.hypot(u, v), np.hypot(u - 0.5, v) - 0.8),
    "heart": _heart,
    "arrow": _arrow,
    "hexagon": _polygon(6),
    "sparkle": functools.partial(_spiked, points=4, inner=0.3),
    "ellipse": lambda u, v: 0.55 * (1 - np.hypot(u / 0.5, v)),
    "semicircle": lambda u, v: np.minimum(1 - np.hypot(u, v + 0.4), v + 0.4),
    "trefoil": _trefoil,
    "gear": lambda u, v: 0.82 + 0.12 * np.clip(2 * np.sin(9 * np.arctan2(u, v)), -1, 1) - np.hypot(u, v),
    "drop": lambda u, v: np.maximum(0.6 - np.hypot(u, v + 0.4), np.minimum(0.8 * (0.6 - np.abs(u)) - 0.48 * (v + 0.02), v)),
    "lens": lambda u, v: 1.25 - np.hypot(np.abs(u) + 0.8, v),
    "chevron": lambda u, v: np.minimum(0.22 - 0.7 * np.abs(v + np.abs(u) - 0.4), 0.9 - np.abs(u)),
    "hourglass": lambda u, v: np.minimum((0.8 * np.abs(v) + 0.1 - np.abs(u)) / 1.28, 0.92 - np.abs(v)),
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
HUES = ("red", "orange", "lime", "green", "cyan", "blue", "purple", "pink")
# What tells classes apart, in this order: only as many of them as the number of classes needs; the rest is chance.
_TRAITS = (tuple(FIGURES), tuple(FILLS), HUES, tuple(f"{hue}-rim" for hue in HUES))
MAX_CLASSES = math.prod(len(trait) for trait in _TRAITS)


@dataclass(frozen=True, slots=True)
class Look:
    """What a class fixes about its shape; None is left to chance.

    Attributes:
        figure: index into ``FIGURES``.
        fill: index into ``FILLS``.
        hue: colour of the shape, index into ``HUES``.
        rim: colour of its outline, index into ``HUES``.
    """

    figure: int
    fill: int | None = None
    hue: int | None = None
    rim: int | None = None

    @property
    def name(self) -> str:
        """The class's name, such as ``star`` or ``star-striped-red``."""
        chosen = (self.figure, self.fill, self.hue, self.rim)
        return "-".join(trait[i] for trait, i in zip(_TRAITS, chosen, strict=True) if i is not None)


def look(label: int, classes: int) -> Look:
    """The look of class ``label`` out of ``classes``: first figures alone, then with fills, hues and rims."""
    assert 0 <= label < classes <= MAX_CLASSES
    traits: list[int] = []
    kinds = 1
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
    margin = 0.8 * radius
    x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
    for _ in range(rng.integers(2, 7)):
        size = side * rng.uniform(0.04, 0.1)
        _clutter(canvas, rng.uniform(0, width), rng.uniform(0, height), size, rng)
    _shape(canvas, what, (x, y, radius), texture, rng)
    for _ in range(rng.integers(0, 3)):
        angle, away = rng.uniform(0, 2 * math.pi), radius * rng.uniform(0.4, 1.0)
        _clutter(canvas, x + away * math.cos(angle), y + away * math.sin(angle), radius * rng.uniform(0.1, 0.2), rng)
    _light(canvas, rng)
    return np.ascontiguousarray((np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0))


def encode(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """``pixels`` as a baseline 4:2:0 JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@functools.lru_cache(maxsize=2)
def _log_frequency(width: int, height: int) -> Plane:
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    frequency[0, 0] = np.inf  # no constant part
    logarithm: Plane = np.log(frequency).astype(np.float32)
    return logarithm


def _pink(width: int, height: int, steepness: float, rng: np.random.Generator) -> tuple[Plane, Plane]:
    """Two independent planes of noise with amplitude 1 / f^steepness, mean 0 and standard deviation 1."""
    amplitude = np.exp(-steepness * _log_frequency(width, height))
    spectrum = rng.standard_normal((height, width, 2), np.float32).view(np.complex64)[..., 0] * amplitude
    field = np.fft.ifft2(spectrum)  # its real and its imaginary part are two independent fields
    one, other = (np.ascontiguousarray(part, np.float32) for part in (field.real, field.imag))
    return one / one.std(), other / other.std()


def _colour(luma: float, hue: float, saturation: float) -> Plane:
    """RGB ``[3, 1, 1]`` of this luminance; hue in turns."""
    wheel = np.cos(2 * math.pi * hue - _HUE_ANGLES)
    rgb: Plane = luma + saturation * (wheel - (_LUMA * wheel).sum())
    return rgb.astype(np.float32)[:, None, None]


def _backdrop(texture: Plane, warm: Plane, red: Plane, border: Plane, rng: np.random.Generator) -> Plane:
    """Two materials with a ragged border between them."""
    luma = rng.uniform(0.2, 0.75)
    one = _colour(luma, rng.random(), rng.uniform(0, 0.15))
    other = _colour(luma + rng.uniform(-0.2, 0.2), rng.random(), rng.uniform(0, 0.15))
    canvas: Plane = one + (other - one) * np.clip(border * rng.uniform(4, 20) + rng.uniform(-4, 4), 0, 1)
    strength = rng.uniform(0.05, 0.12)
    # Luminance, yellow-blue and red-green vary about as 1 : 0.3 : 0.1 in photographs.
    canvas += strength * texture
    canvas += 0.3 * strength * warm * np.array([0.5, 0.5, -1], np.float32)[:, None, None]
    canvas += 0.1 * strength * red * np.array([1, -1, 0], np.float32)[:, None, None]
    return canvas


class _Patch(NamedTuple):
    """The square of a canvas around a point; u and v are its pixels' coordinates in a frame of their own."""

    rows: slice
    columns: slice
    u: Plane
    v: Plane


def _patch(canvas: Plane, centre: tuple[float, float], size: float, turn: float, stretch: float = 1.0) -> _Patch:
    """The patch around ``centre`` that holds a figure of radius ``size`` pixels; u and v count in ``size``."""
    (x, y), reach = centre, 1.3 * size * max(stretch, 1 / stretch)
    _, height, width = canvas.shape
    rows = slice(max(0, int(y - reach)), max(0, min(height, int(y + reach) + 2)))
    columns = slice(max(0, int(x - reach)), max(0, min(width, int(x + reach) + 2)))
    right = (np.arange(columns.start, columns.stop, dtype=np.float32) - x)[None, :] / size
    up = (y - np.arange(rows.start, rows.stop, dtype=np.float32))[:, None] / size
    cos, sin = math.cos(turn), math.sin(turn)
    return _Patch(rows, columns, (cos * right + sin * up) / stretch, (cos * up - sin * right) * stretch)


def _cover(distance: Plane, size: float, blur_px: float = 1.0) -> Plane:
    """How much of each pixel lies inside, 0..1, from signed distances in units of ``size`` pixels."""
    share: Plane = np.clip(distance * (size / blur_px) + 0.5, 0, 1)
    return share


def _clutter(canvas: Plane, x: float, y: float, size: float, rng: np.random.Generator) -> None:
    """Draw a bar or an irregular blob: like no class, and smaller than any shape."""
    turn = rng.uniform(0, 2 * math.pi)
    if rng.random() < 0.4:
        size *= 2.5
        rows, columns, u, v = _patch(canvas, (x, y), size, turn)
        distance = np.minimum(0.12 - np.abs(u), 1 - np.abs(v))
    else:
        rows, columns, u, v = _patch(canvas, (x, y), size, turn, rng.uniform(1, 1.6))
        angle, distance = np.arctan2(u, v), 0.75 - np.hypot(u, v)
        for waves in (2, 3, 5):
            distance += rng.uniform(0.05, 0.16) * np.cos(waves * angle + rng.uniform(0, 2 * math.pi))
    paint = _colour(rng.uniform(0.1, 0.9), rng.random(), rng.uniform(0, 0.2))
    region = canvas[:, rows, columns]
    region += (paint * (1 + rng.uniform(-0.25, 0.25) * u) - region) * _cover(distance, size)


def _shape(canvas: Plane, what: Look, place: tuple[float, float, float], texture: Plane, rng: np.random.Generator) -> None:
    """Draw the shape at ``place`` (x, y, radius in pixels) with its shadow, fill, rim and shade."""
    x, y, radius = place
    figure = tuple(FIGURES.values())[what.figure]
    turn, stretch = rng.uniform(-0.6, 0.6), rng.uniform(0.92, 1.09)
    shadow = _patch(canvas, (x + radius * rng.uniform(-0.15, 0.15), y + 0.12 * radius), radius, turn, stretch)
    shade = _cover(figure(shadow.u, shadow.v), radius, 0.25 * radius)
    canvas[:, shadow.rows, shadow.columns] *= 1 - rng.uniform(0, 0.4) * shade
    rows, columns, u, v = _patch(canvas, (x, y), radius, turn, stretch)
    region = canvas[:, rows, columns]
    distance = figure(u, v)
    paint, ink, rim = _paints(what, float((region.mean(axis=(1, 2)) * _LUMA).sum()), rng)
    fill = tuple(FILLS.values())[int(rng.integers(len(FILLS))) if what.fill is None else what.fill]
    surface = paint + (ink - paint) * (0.5 + 0.5 * fill(u, v))
    surface += rng.uniform(0.03, 0.08) * texture[::-1, ::-1][rows, columns]  # grained, but not as the ground is
    surface *= 1 + rng.uniform(-0.2, 0.2) * u + rng.uniform(-0.2, 0.2) * v
    if what.rim is not None or rng.random() < 0.5:
        surface += (rim - surface) * _cover(0.09 - distance, radius)
    region += (surface - region) * _cover(distance, radius, rng.uniform(1, 1.6))


def _paints(what: Look, around: float, rng: np.random.Generator) -> tuple[Plane, Plane, Plane]:
    """Colours of the shape, its pattern and its rim, such that it stands out from the luminance ``around``."""
    apart = rng.uniform(0.25, 0.5)
    brighter = around + apart < 0.95 and (around - apart < 0.05 or rng.random() < 0.5)
    luma = around + apart if brighter else around - apart
    hue, saturation = _hue(what.hue, rng), rng.uniform(0, 0.25) if what.hue is None else rng.uniform(0.2, 0.35)
    contrast = rng.uniform(0, 0.14) if what.fill is None else rng.uniform(0.12, 0.25)
    ink = _colour(luma + contrast * rng.choice((-1, 1)), hue, saturation)
    rim = _colour(luma * rng.uniform(0.4, 0.8), _hue(what.rim, rng), 0.1 if what.rim is None else 0.3)
    return _colour(luma, hue, saturation), ink, rim


def _hue(fixed: int | None, rng: np.random.Generator) -> float:
    """A hue in turns: any, or near the one of ``HUES`` that is fixed."""
    return rng.random() if fixed is None else (fixed + rng.uniform(-0.25, 0.25)) / len(HUES)


def _light(canvas: Plane, rng: np.random.Generator) -> None:
    """Add slanted light and the noise of a sensor."""
    _, height, width = canvas.shape
    canvas *= 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, width, dtype=np.float32)
    canvas *= 1 + rng.uniform(-0.25, 0.25) * np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    canvas += rng.uniform(0.004, 0.014) * rng.standard_normal((height, width), np.float32)
