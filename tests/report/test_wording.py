"""Verdicts as each front end words them: a file has the sentences, which one flag rewrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from evidences import CASES

from harness.config import Config
from harness.diagnose.diagnosis import command
from harness.hooks.loops import WatchedLoader
from harness.hooks.session import in_script
from harness.report.statement import stated
from harness.report.verdict import Verdict, judge
from harness.runtime.distributed import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def told(verdict: Verdict, config: Config) -> Iterator[str]:
    """What the console, a watched script, one that reads a stream, and the diagnosis say."""
    on_console = stated(verdict)
    yield on_console.sentence
    for streams in (False, True):
        loader = WatchedLoader("train.py:7", verdict.shares.settings, streams=streams)
        step = stated(verdict, partial(in_script, followed=loader)).next_step
        if step:
            yield f"{'a stream' if streams else 'a script'}: {step}"
    yield f"diagnosis: {command(config, ('mode=diagnose',), verdict, ALONE)}"
    yield from (f"- {clause}" for clause in on_console.evidence)


def test_the_sentences(
    golden: Callable[[str, str], None],
    composed: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kind and change, in the words of each front end."""
    monkeypatch.delenv("UV", raising=False)
    config = composed()
    verdicts = {name: judge(case.evidence) for name, case in CASES.items()}
    verdicts["uneven rates"] = Verdict("unknown", verdicts["balanced"].shares, why="uneven")
    parts = ["\n".join([f"# {name}", *told(each, config)]) for name, each in verdicts.items()]
    golden("verdicts.txt", "\n\n".join(parts) + "\n")
