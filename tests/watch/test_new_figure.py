"""What a new figure takes: its declaration and the line that counts it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECLARED = "    copy_ms: Spread | None = _figure("
NEW = (
    '    rest_ms: Spread | None = _figure("time/rest_ms", "ms", "all but the wait", "The rest", '
    '"rest")\n'
)
COUNTED = '        sketches["data_wait_ms"].add(1e3 * self._wait_s)\n'
COUNT = '        sketches["rest_ms"].add(1e3 * (took_s - self._wait_s))\n'


def insert(path: Path, before: str, line: str) -> None:
    """Puts ``line`` before the only place of ``before``."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before))


def test_a_figure_is_added_in_two_lines(tmp_path: Path) -> None:
    """A new figure is in the lines, in the report, and among what the page shows."""
    for name in ("harness", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", tmp_path)
    insert(tmp_path / "harness/watch/figures.py", DECLARED, NEW)
    insert(tmp_path / "harness/watch/clock.py", COUNTED, COUNT)
    done = subprocess.run(
        [
            *(
                sys.executable,
                "train.py",
                "data=digits",
                "model=small",
                "trainer.max_steps=12",
                "watch.window_steps=5",
            ),
            *("checkpoint.enabled=false", "watch.tensorboard=false", "run.name=new"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "new"
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["time/rest_ms/max"] >= first["time/rest_ms/median"] > 0
    assert json.loads((run / "report.json").read_text())["rest_ms"]["median"] > 0
    found = re.search(
        r'<script id="data" type="application/json">(.*)</script>',
        (run / "report.html").read_text(),
    )
    assert found is not None
    page = json.loads(found[1])
    chart = {
        "title": "The rest",
        "unit": "ms",
        "series": [{"tag": "time/rest_ms/median", "name": "rest"}],
    }
    assert chart in page["declared"]["charts"]
    assert {"name": "rest_ms", "unit": "ms", "text": "all but the wait"} in page["declared"][
        "figures"
    ]
    assert page["runs"][0]["report"]["rest_ms"]["max"] > 0
    assert "time/rest_ms/median" in page["runs"][0]["course"]["columns"]
