r"""Runs train.py, notes each rank's samples, and hears SIGTERM after a chosen step.

For example::

    CHAOS_NOTES=notes.jsonl CHAOS_STOP=30 \
        uv run python -m tests.hostile.chaos.noted data=digits run.name=x
"""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Iterator
from typing import Any

from harness.cli import app, job
from harness.runtime import signals

NOTES = "CHAOS_NOTES"
STOP = "CHAOS_STOP"
_main_worker = job.main_worker


class _Noted:
    """A feed's batches; ``given`` holds epoch and indices that no step has taken yet."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self.given = deque[tuple[int, list[int]]]()

    def __iter__(self) -> Iterator[Any]:
        self.given.clear()
        for batch in self.feed:
            self.given.append((batch.epoch, batch.indices.tolist()))
            yield batch


def main_worker(local_rank: int, job: job.Job) -> None:
    """One rank of a run, noted as the environment says."""
    # not above: worker processes import this file too
    from harness.training.checkpoint_write import StopAgreement
    from harness.training.engine import Engine

    make = Engine.__init__
    one_step = Engine._one_step
    ask = StopAgreement.ask

    def made(self: Engine, *parts: Any) -> None:
        make(self, *parts)
        self.train_batches.loader = _Noted(self.feed)

    def stepped(self: Engine, batches: Any, parts: int) -> None:
        one_step(self, batches, parts)
        given: Any = self.train_batches.loader
        taken = [given.given.popleft() for _ in range(parts)]
        indices = [index for _, part in taken for index in part]
        line = {
            "rank": self.world.rank,
            "step": self.state.step,
            "epoch": taken[0][0],
            "indices": indices,
        }
        # one write a line: a kill leaves whole lines
        handle = os.open(os.environ[NOTES], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, f"{json.dumps(line)}\n".encode())
        os.close(handle)

    def heard(self: StopAgreement, step: int) -> tuple[int, bool]:
        return (signal.SIGTERM, False) if str(step) == os.environ.get(STOP) else ask(self, step)

    Engine.__init__ = made  # type: ignore[method-assign, assignment]
    Engine._one_step = stepped  # type: ignore[method-assign]
    StopAgreement.ask = heard  # type: ignore[method-assign]
    _main_worker(local_rank, job)


if __name__ == "__main__":
    # a rank's own process finds the function by its name in this file
    job.main_worker = main_worker
    with signals.handle_signals(grace_s=0):
        signals.leave(app.cli())
