"""The benchmark of saving: a row for each size, with what a save is compared to and what it was
measured on.
"""

import json
from pathlib import Path

import pytest

from scripts import bench_checkpoint


def test_it_prints_a_row_for_each_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies, saves and steps are timed as often as asked for; the checkpoints go with the
    temporary folder.
    """
    out = tmp_path / "figures" / "checkpoint.json"
    assert (
        bench_checkpoint.main(
            ["--megabytes", "1", "2", "-n", "2", "--folder", str(tmp_path), "--json", str(out)]
        )
        == 0
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["MB"] for row in rows] == [1, 2]
    assert all(
        row[f"{name}, ms"]["n"] == 2
        for row in rows
        for name in ("copy", "save", "written", "step", "step beside")
    )
    assert "step beside / step" in capsys.readouterr().out and list(tmp_path.iterdir()) == [
        tmp_path / "figures"
    ]
