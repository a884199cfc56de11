"""The benchmark of normalising: a row for each size, with both ways
and what they were measured on.
"""

import json
from pathlib import Path

import pytest

from scripts import bench_normalise


@pytest.mark.parametrize(
    "more", [[], ["--nchw"], ["--dtype", "float16"]], ids=lambda more: " ".join(more) or "default"
)
def test_it_prints_a_row_for_each_size(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ways are timed as often as asked for; the table and the file name the machine."""
    out = tmp_path / "normalise.json"
    assert (
        bench_normalise.main(
            ["--sizes", "4", "9", "--batch-size", "3", "-n", "2", "--json", str(out), *more]
        )
        == 0
    )
    found = json.loads(out.read_text())
    assert [(row["pixels"], row["batch"], row["new, ms"]["n"]) for row in found["rows"]] == [
        (4, 3, 2),
        (9, 3, 2),
    ]
    assert "torch threads" in capsys.readouterr().out and "cpu" in found["machine"]
