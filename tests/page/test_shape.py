"""What of a file's contents may reach the page."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.page.shape import REPORT, TUNING, fitted


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        pytest.param(1.5, float, 1.5, id="number"),
        pytest.param(0, float, 0, id="zero-stays"),
        pytest.param(True, float, None, id="bool-is-no-number"),
        pytest.param("1", float, None, id="text-is-no-number"),
        pytest.param(math.nan, float, None, id="nan"),
        pytest.param(math.inf, float, None, id="infinity"),
        pytest.param(10**400, float, None, id="integer-beyond-a-float"),
        pytest.param({"a": 1}, str, None, id="object-is-no-text"),
        pytest.param("a" * 5000, bytes, "a" * 5000, id="picture-is-long"),
        pytest.param(1, bytes, None, id="number-is-no-picture"),
        pytest.param([1, "x", 2], [float], [1, 2], id="list-drops-what-does-not-fit"),
        pytest.param([], [float], [], id="empty-list"),
        pytest.param({"a": 1}, [float], None, id="object-is-no-list"),
        pytest.param({"a": 1, "b": "x"}, {str: float}, {"a": 1}, id="any-names"),
        pytest.param({"a": 1, "z": 2}, {"a": float, "b?": float}, {"a": 1}, id="optional-may-miss"),
        pytest.param({"b": 1}, {"a": float, "b?": float}, None, id="required-may-not"),
        pytest.param({"a": None}, {"a?": float}, {}, id="null-is-absent"),
        pytest.param(
            {"n": 2, "pin": False, "deep": {}},
            {str: object},
            {"n": 2, "pin": False},
            id="plain-values",
        ),
        pytest.param(
            {"a": math.inf, "b": -math.inf, "c": math.nan, "d": 10**400},
            {str: object},
            {},
            id="plain-is-finite",
        ),
        pytest.param({"a": "x", "b": None}, {str: object}, {"a": "x"}, id="plain-text"),
        pytest.param([1], {"a": float}, None, id="list-is-no-object"),
    ],
)
def test_only_what_fits_is_kept(value: Any, shape: Any, expected: Any) -> None:
    """A value that has not the shape is left out, never turned into something else."""
    assert fitted(value, shape) == expected


def test_a_spread_without_its_median_is_left_out_of_a_report() -> None:
    """The rest of the report stays."""
    assert fitted({"status": "completed", "step_ms": {"p95": 1.0, "max": 2.0}}, REPORT) == {
        "status": "completed"
    }


def test_an_open_interval_has_no_upper_end() -> None:
    """A rate of a single block is kept, with its null left out."""
    rate = {"images_per_s": 55.0, "low": 0.0, "high": None}
    trial = {"settings": {"num_workers": 1}, "kind": "supply", "rate": rate}
    told = fitted({"search": "auto", "settings": {}, "sentence": "", "trials": [trial]}, TUNING)
    assert told["trials"][0]["rate"] == {"images_per_s": 55.0, "low": 0.0}
