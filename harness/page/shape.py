"""What a run's files must look like to be shown; whatever does not is left out, so that the page
need not ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.watch.figures import STEP_FIGURES

_LONGEST = 4000  # characters of one text
_LARGEST = 1e300  # what is beyond is no figure, and an integer of JSON may be too long for a float

_SPREAD = {"median": float, "p95": float, "max": float}
_RATE = {
    "images_per_s": float,
    "low": float,
    "high?": float,
}  # without high: the interval is open above
_SETTINGS = {str: object}  # texts, truth values and finite numbers, kept as they are

REPORT: Mapping[Any, Any] = {
    **{f"{name}?": str for name in ("status", "error", "stall_basis")},
    **{
        f"{name}?": float
        for name in (
            "epochs", "steps", "world_size", "gpu_utilization", "top1", "val_images",
        )
    },
    **{f"{name}?": _SPREAD if figure.unit == "ms" else float for name, figure in STEP_FIGURES.items()},
    **{f"{name}?": {str: float} for name in ("shares", "wait_parts", "host_parts_s")},
    "turns_ms?": [{"val": float, "train": float}],
    "verdict?": {"sentence": str, "bottleneck": str, "ceiling?": float, "next_step?": str, "evidence?": [str]},
    "stages?": [{"name": str, "group": str, "wall_ms": float, "cpu_ms": float}],
    "workers?": {"samples": float, "busy_fraction?": float},
    "goodput?": {"fraction": float, "busy_s": float, "wall_s": float, "rest": [{"name": str, "s": float}]},
    "ranks?": [{"rank": float, "step_ms": float, "stalled_ms": float, "host_ms?": float, "forward_ms?": float}],
    "gpu_memory?": {f"{name}_bytes": float for name in ("total", "reserved", "training", "evaluation")},
    "loader?": _SETTINGS,
    "environment?": _SETTINGS,
    "run?": {"overrides?": [str], "name?": str},
}  # fmt: skip

TUNING: Mapping[Any, Any] = {
    "search": str,
    "settings": _SETTINGS,
    "sentence": str,
    "demand?": _RATE,
    "trials": [{"settings": _SETTINGS, "kind": str, "rate?": _RATE, "refused?": str}],
    "override?": str,
    "seconds?": float,
    "reused?": bool,
}


def fitted(value: Any, shape: Any) -> Any:
    """What of ``value`` fits ``shape``; None where nothing does.

    A shape is a type; a list of one shape; or an object whose keys are names, those with a question
    mark optional, or ``str`` for any name. An object without a name that it must have does not fit;
    items that do not fit are left out.
    """
    if isinstance(shape, Mapping):
        return _object(value, shape) if isinstance(value, Mapping) else None
    if isinstance(shape, list):
        found = [fitted(item, shape[0]) for item in value] if isinstance(value, list) else None
        return found and [item for item in found if item is not None]
    if shape is float:
        return number(value)
    if shape is object:
        return value if isinstance(value, (str, bool)) else number(value)
    if shape is str:
        return value[:_LONGEST] if isinstance(value, str) else None
    return value if isinstance(value, shape) else None


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if plain and -_LARGEST < value < _LARGEST else None


def _object(value: Mapping[Any, Any], shape: Mapping[Any, Any]) -> dict[str, Any] | None:
    if str in shape:
        every = {str(key)[:_LONGEST]: fitted(item, shape[str]) for key, item in value.items()}
        return {key: item for key, item in every.items() if item is not None}
    found: dict[str, Any] = {}
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if (item := fitted(value.get(name), inner)) is not None:
            found[name] = item
        elif name == key:
            return None
    return found
