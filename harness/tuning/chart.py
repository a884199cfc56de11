"""One picture of what tuning measured: supply against num_workers, beside what the training step can take."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from harness.tuning.figures import Rate, Trial

if TYPE_CHECKING:
    from harness.tuning.report import TuningReport

WIDTH, HEIGHT = 640, 360
LEFT, TOP, RIGHT, BOTTOM = 64, 44, 624, 312  # the plot within it
INK, PALE, GRID = (40, 40, 40), (110, 110, 110), (228, 228, 228)
SUPPLY, STEPS, DEMAND, REFUSED = (0, 114, 178), (213, 94, 0), (0, 133, 95), (170, 40, 60)  # told apart by colour-blind eyes too
_FINE = 3  # drawn so many times larger, then made smaller: Pillow's lines have steps
_NEAR = 3.0  # demand beyond so many times the fastest rate is drawn at the upper edge, so that the rates stay apart

Point = tuple[float, float]
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Scale:
    """Where num_workers and images/s lie in the picture; what is above the plot lies on its upper edge."""

    max_workers: int
    max_rate: float

    def at(self, num_workers: float, images_per_s: float) -> Point:
        """The pixel, from the upper left."""
        right = (num_workers + 0.5) / (self.max_workers + 1)  # half a worker is left free at both ends
        up = min(1.0, max(0.0, images_per_s / self.max_rate))
        return LEFT + right * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def scale_of(report: TuningReport) -> Scale:
    """The scale with room for all rates, finite ends of intervals up to twice the fastest rate, and a demand that is near."""
    sides = report.before, report.after
    rates = [t.rate for t in report.trials if t.rate] + [side.images_per_s for side in sides if side.images_per_s]
    fastest = max((rate.images_per_s for rate in rates), default=0.0)
    highest = max((min(rate.high, 2 * fastest) for rate in rates if math.isfinite(rate.high)), default=0.0)
    demand = report.demand.images_per_s if report.demand else 0.0
    if fastest and demand > _NEAR * fastest:
        demand = 0.0
    workers = [t.settings.num_workers for t in report.trials] + [side.settings.num_workers for side in sides]
    return Scale(max(1, *workers), 1.1 * max(fastest, highest, demand) or 1.0)


def supply_figure(report: TuningReport, form: str) -> tuple[bytes, int, int]:
    """A PNG with its width and height in pixels, of the trials of one form, to the scale of all.

    Supply is dots and delivered rates are diamonds, with 95 % intervals as bars; refused settings are crosses on the lower
    edge; a ring and a dotted line mark the choice, a dashed line the demand.
    """
    scale, canvas, chosen = scale_of(report), _Canvas(), report.settings.backend == form
    trials = [trial for trial in report.trials if trial.settings.backend == form]
    _draw_axes(canvas, scale, form)
    if chosen:
        _draw_choice_line(canvas, scale, report)
    if report.demand:
        _draw_demand(canvas, scale, report.demand)
    for trial in trials:
        _draw_trial(canvas, scale, trial)
    if chosen and (at := choice_at(scale, report)):
        canvas.ring(at, 8, INK)
    _draw_legend(canvas, trials)
    return canvas.png(), WIDTH, HEIGHT


def place(scale: Scale, num_workers: int, rate: Rate, *, steps: bool) -> Point:
    """Where a rate's mark is: a delivered one a little to the right, that it does not cover the supply of the same setting."""
    x, y = scale.at(num_workers, rate.images_per_s)
    return (x + min(7.0, 0.3 * (scale.at(1, 0)[0] - scale.at(0, 0)[0])) if steps else x), y


def choice_at(scale: Scale, report: TuningReport) -> Point | None:
    """Where the choice's rate is: with its delivered one where that was measured; None where it has no rate."""
    steps = any(trial.kind == "steps" and trial.settings == report.settings for trial in report.trials)
    rate = report.after.images_per_s
    return place(scale, report.settings.num_workers, rate, steps=steps) if rate else None


def ticks(span: float, most: int) -> list[float]:
    """From zero to ``span`` in at most ``most`` steps of 1, 2 or 5 times a power of ten."""
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(span / step * (1 + 1e-9)) + 1)]


def _between(begin: Point, end: Point, part: float) -> Point:
    return begin[0] + part * (end[0] - begin[0]), begin[1] + part * (end[1] - begin[1])


class _Canvas:
    """Draws in pixels of the finished picture, on a larger one."""

    def __init__(self) -> None:
        self._image = Image.new("RGB", (WIDTH * _FINE, HEIGHT * _FINE), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(13 * _FINE)

    def line(self, points: Iterable[Point], colour: Colour, width: float = 1.0) -> None:
        self._draw.line([self._fine(point) for point in points], colour, round(width * _FINE))

    def dashes(self, begin: Point, end: Point, colour: Colour, dash: float) -> None:
        """A broken line, across or down."""
        length = math.dist(begin, end)
        for i in range(math.ceil(length / dash / 2)):
            parts = (2 * i * dash / length, min(1.0, (2 * i + 1) * dash / length))
            self.line([_between(begin, end, part) for part in parts], colour, 2)

    def dot(self, at: Point, radius: float, colour: Colour) -> None:
        self._draw.ellipse(self._box(at, radius), colour, "white", _FINE)

    def ring(self, at: Point, radius: float, colour: Colour) -> None:
        self._draw.ellipse(self._box(at, radius), None, colour, 2 * _FINE)

    def diamond(self, at: Point, radius: float, colour: Colour) -> None:
        x, y = at
        corners = [(x, y - radius), (x + radius, y), (x, y + radius), (x - radius, y)]
        self._draw.polygon([self._fine(corner) for corner in corners], colour, "white", _FINE)

    def cross(self, at: Point, radius: float, colour: Colour) -> None:
        x, y = at
        for down in (radius, -radius):
            self.line([(x - radius, y - down), (x + radius, y + down)], colour, 2)

    def text(self, at: Point, text: str, colour: Colour, anchor: str) -> float:
        """Write ``text``, at Pillow's ``anchor``; its width."""
        self._draw.text(self._fine(at), text, colour, self._font, anchor, stroke_width=2 * _FINE, stroke_fill="white")
        return self._font.getlength(text) / _FINE

    def png(self) -> bytes:
        out = io.BytesIO()
        self._image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(out, "PNG", optimize=True)
        return out.getvalue()

    def _fine(self, point: Point) -> Point:
        return point[0] * _FINE, point[1] * _FINE

    def _box(self, at: Point, radius: float) -> tuple[float, float, float, float]:
        return (*self._fine((at[0] - radius, at[1] - radius)), *self._fine((at[0] + radius, at[1] + radius)))


def _draw_axes(canvas: _Canvas, scale: Scale, form: str) -> None:
    for rate in ticks(scale.max_rate, 6):
        _, y = scale.at(0, rate)
        canvas.line([(LEFT, y), (RIGHT, y)], GRID)
        canvas.text((LEFT - 6, y), f"{rate:,.10g}", PALE, "rm")
    for workers in ticks(scale.max_workers, min(16, scale.max_workers)):
        x, _ = scale.at(workers, 0)
        canvas.line([(x, BOTTOM), (x, BOTTOM + 4)], PALE)
        canvas.text((x, BOTTOM + 8), f"{workers:.0f}", PALE, "ma")
    canvas.line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], PALE)
    canvas.text(((LEFT + RIGHT) / 2, HEIGHT - 6), f"num_workers ({form})", INK, "md")
    canvas.text((8, TOP - 12), "images/s", INK, "ld")


def _draw_choice_line(canvas: _Canvas, scale: Scale, report: TuningReport) -> None:
    x, _ = scale.at(report.settings.num_workers, 0)
    canvas.dashes((x, BOTTOM), (x, TOP), PALE, 2)
    left = x > (LEFT + RIGHT) / 2
    canvas.text((x - 5 if left else x + 5, BOTTOM - 14), "chosen", INK, "rd" if left else "ld")


def _draw_demand(canvas: _Canvas, scale: Scale, demand: Rate) -> None:
    _, y = scale.at(0, demand.images_per_s)
    canvas.dashes((LEFT, y), (RIGHT, y), DEMAND, 6)
    off = ", beyond this scale" if demand.images_per_s > scale.max_rate else ""
    text = f"the step can take {demand.images_per_s:,.0f}{off}"
    if y > TOP + 24:  # above the line, for what steps get lies below it
        canvas.text((RIGHT, y - 4), text, DEMAND, "rd")
    else:
        canvas.text((RIGHT, y + 4), text, DEMAND, "ra")


def _draw_trial(canvas: _Canvas, scale: Scale, trial: Trial) -> None:
    if trial.rate is None:  # refused
        x, y = scale.at(trial.settings.num_workers, 0)
        canvas.cross((x, y - 7), 5, REFUSED)
        return
    steps = trial.kind == "steps"
    colour = STEPS if steps else SUPPLY
    x, y = place(scale, trial.settings.num_workers, trial.rate, steps=steps)
    ends = [scale.at(0, end)[1] for end in (trial.rate.low, trial.rate.high)]
    canvas.line([(x, end) for end in ends], colour, 2)
    for end, value in zip(ends, (trial.rate.low, trial.rate.high), strict=True):
        if 0 < value <= scale.max_rate:  # an open end has no cap
            canvas.line([(x - 4, end), (x + 4, end)], colour, 2)
    (canvas.diamond if steps else canvas.dot)((x, y), 6 if steps else 5, colour)


def _draw_legend(canvas: _Canvas, trials: Sequence[Trial]) -> None:
    marks = [
        (any(t.rate and t.kind != "steps" for t in trials), canvas.dot, SUPPLY, "loader alone"),
        (any(t.rate and t.kind == "steps" for t in trials), canvas.diamond, STEPS, "delivered to steps"),
        (any(t.rate is None for t in trials), canvas.cross, REFUSED, "refused"),
    ]
    x, y = float(LEFT + 24), 16.0
    for present, draw, colour, label in marks:
        if present:
            draw((x, y), 5, colour)
            x += 10 + canvas.text((x + 10, y), label, INK, "lm") + 18
    canvas.text((x, y), "bars: 95 % interval" if any(t.rate for t in trials) else "nothing was measured", PALE, "lm")
