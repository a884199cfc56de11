"""Tuned runs on machines that give little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'

pytestmark = pytest.mark.slow


def apart(*command: str) -> list[str]:
    """``command`` with a /dev/shm of 64 MB of its own; skips the
    test where that is not permitted.
    """
    alone = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", MOUNT, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mount namespaces are not permitted here")
    return [*alone, *command]


@pytest.mark.parametrize(
    ("batch_size", "most"), [(192, 1), (512, 0)], ids=["little fits", "nothing fits"]
)
def test_a_small_shared_memory_is_respected(batch_size: int, most: int, tmp_path: Path) -> None:
    """The run is tuned to what fits and trains; what does not
    is in the report with the arithmetic.
    """
    command = [
        sys.executable, str(ROOT / "train.py"), "data=digits", "data.image_size=128",
        "data.eval_resize=null", "loader.backend=processes",
        f"loader.batch_size={batch_size}", "loader.val.batch_size=32", "loader.num_workers=6",
        "loader.autotune=true", "tuner.budget_s=15", "trainer.max_steps=2", "run.name=small",
    ]  # fmt: skip
    env = {**os.environ, "WELLFED_CACHE": str(tmp_path)}
    done = subprocess.run(
        apart(*command),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tuning = json.loads((tmp_path / "outputs/small/tuning.json").read_text())
    # threads need none of it
    chosen = tuning["settings"]
    assert chosen["backend"] == "threads" or chosen["num_workers"] <= most
    assert "lack of shared memory" in tuning["trials"][0]["refused"]
