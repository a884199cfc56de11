"""Runs pytest and prints each test's outcome as a JSON line.

A part of ``gpu_check.py``. It imports only pytest, whose plugins must come first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import pytest


class Told:
    """A pytest plugin that writes each test's outcome to a file descriptor."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each test's setup, call and teardown."""
        if report.when == "call" or not report.passed:
            self._tell(report.nodeid, report.outcome, report.duration, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called for each file; one that cannot be imported fails."""
        if report.failed:
            self._tell(report.nodeid, report.outcome, 0.0, report.longrepr)

    def _tell(self, test: str, outcome: str, seconds: float, said: object) -> None:
        words = str((said[-1] if isinstance(said, tuple) else said) or "")[-600:]
        line = json.dumps({"test": test, "outcome": outcome, "s": round(seconds, 2), "said": words})
        os.write(self._answers, line.encode() + b"\n")


def main(argv: Sequence[str]) -> int:
    answers = os.dup(1)
    os.dup2(2, 1)
    # files that cannot be imported do not stop others
    how = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return pytest.main([*how, *argv], plugins=[Told(answers)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
