"""What a run's files must look like to be shown.

What does not is left out, so that the page need not ask.
"""

from __future__ import annotations

from typing import Any

from harness.runtime.files import number
from harness.watch.figures import STEP_FIGURES

_SPREAD = {"median": float, "p95": float, "max": float}
# without high: the interval is open above
_RATE = {"images_per_s": float, "low": float, "high?": float}
# texts, truth values and finite numbers, kept as they are
_SETTINGS = {str: object}

REPORT: dict[Any, Any] = {
    "status?": str,
    "error?": str,
    "stall_basis?": str,
    "epochs?": float,
    "steps?": float,
    "world_size?": float,
    "gpu_utilization?": float,
    "top1?": float,
    "top5?": float,
    "val_images?": float,
    "evaluated?": str,
    "shares?": {str: float},
    "wait_parts?": {str: float},
    "host_parts_s?": {str: float},
    "verdict?": {
        "sentence": str,
        "bottleneck": str,
        "ceiling?": float,
        "next_step?": str,
        "evidence?": [str],
    },
    # of a script that was watched: what changes of its loader should give
    "expected?": [str],
    "stages?": [{"name": str, "group": str, "wall_ms": float, "cpu_ms": float}],
    "workers?": {"samples": float, "busy_fraction?": float},
    "goodput?": {
        "fraction": float,
        "busy_s": float,
        "wall_s": float,
        "rest": [{"name": str, "s": float}],
    },
    "ranks?": [
        {
            "rank": float,
            "step_ms": float,
            "stalled_ms": float,
            "host_ms?": float,
            "forward_ms?": float,
        }
    ],
    "gpu_memory?": {
        "total_bytes": float,
        "reserved_bytes": float,
        "training_bytes": float,
        "evaluation_bytes": float,
    },
    "loader?": _SETTINGS,
    "environment?": _SETTINGS,
    "run?": {"overrides?": [str]},
}
for _name, _figure in STEP_FIGURES.items():
    REPORT[f"{_name}?"] = _SPREAD if _figure.unit == "ms" else float

TUNING: dict[Any, Any] = {
    "search": str,
    "settings": _SETTINGS,
    "sentence": str,
    "demand?": _RATE,
    "trials": [{"settings": _SETTINGS, "kind": str, "rate?": _RATE, "refused?": str}],
    "seconds?": float,
    "reused?": bool,
}

MISTAKES: dict[Any, Any] = {
    "counts?": str,
    "classes": {
        "class": [str],
        "images": [float],
        "correct": [float],
        "given": [float],
        "train_images?": [float],
    },
    "kinds": [[float]],
    "mistakes": [
        {"where": str, "label": str, "given": str, "probability": float, "picture?": bytes}
    ],
}
FIRST_BATCH = [{"label": str, "picture": bytes}]


def fitted(value: Any, shape: Any) -> Any:
    """Returns what of ``value`` fits ``shape``; None: nothing does.

    A shape is a type, with ``bytes`` for a picture in base64; a list of one shape; or an object
    whose keys are names, those with a question mark optional, or ``str`` for any name. An object
    without a name that it must have does not fit; items that do not fit are left out.
    """
    if isinstance(shape, list) and isinstance(value, list):
        items = [fitted(item, shape[0]) for item in value]
        return [item for item in items if item is not None]
    if isinstance(shape, dict) and isinstance(value, dict):
        if str in shape:
            shape = {f"{name}?": shape[str] for name in value}
        found = {}
        for key, inner in shape.items():
            name = key.removesuffix("?")
            item = fitted(value.get(name), inner)
            if item is not None:
                found[name] = item
            elif name == key:
                return None
        return found
    if shape in (str, bytes, object) and isinstance(value, str):
        return value
    if shape in (bool, object) and isinstance(value, bool):
        return value
    return number(value) if shape in (float, object) else None
