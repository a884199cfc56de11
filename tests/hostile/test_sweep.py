"""A sweep of which some jobs fail: the others finish, and only what is missing is done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import trained

WAYS = {
    "good": None,
    "raises": "data.name=troubles:raises: the training set, sample 5: ValueError: broken sample",
    "fine": None,
    "exits": "SystemExit: 3",
    "killed": "rank0 was killed by signal 9 (SIGKILL)",
    "hangs": "no batch within loader.timeout_s=2: ",
    "also_good": None,
    "missing": "data.name=troubles:missing: no missing in ",
    "as_good": None,
}
SWEEP = (
    "-m",
    "data=own",
    f"data.name={','.join(f'troubles:{way}' for way in WAYS)}",
    "data.image_size=16",
    "loader.batch_size=8",
    "loader.num_workers=1",
    "loader.timeout_s=2",
    "trainer.epochs=1",
    "device=cpu",
    "run.name=x",
    "resume=auto",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_of_nine_jobs_fail(tmp_path: Path) -> None:
    """By an exception, an exit, a kill, a hang and a bad setting: each is named with its reason.
    The same command goes on with no job that is done.
    """
    module = Path(__file__).with_name("troubles.py")
    (tmp_path / "troubles.py").write_bytes(module.read_bytes())
    told = []
    for _ in range(2):
        done = trained(tmp_path, *SWEEP, timeout_s=140.0)
        told.append(done.stdout)
        assert done.returncode == 3
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        expected = [
            f"error: multirun/x/{number}: {why}"
            for number, why in enumerate(WAYS.values())
            if why is not None
        ]
        assert len(errors) == len(expected)
        for error, start in zip(errors, expected, strict=True):
            assert error.startswith(start)
    for number, why in enumerate(WAYS.values()):
        report = tmp_path / f"multirun/x/{number}/report.json"
        if why is None:
            assert json.loads(report.read_text())["status"] == "completed"
    assert [text.count("epoch 1: top-1") for text in told] == [4, 0]
    assert told[1].count("raise trainer.epochs") == 4
