"""Says what a run left and whether it is whole.

Its state as one digest, its lines and events.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-untyped]

from harness.training import checkpoint_read

_STATE = ("model", "optimizer", "schedule", "scaler", "random", "epoch", "step")
# it warns of every restart
logging.getLogger("tensorboard").setLevel(logging.ERROR)
_DECIDED = ("step", "epoch", "train/loss", "train/lr", "val/top1", "val/loss")


def digest(folder: Path) -> str:
    """One digest of everything in the newest checkpoint of ``folder`` that a run's past decides."""
    state = checkpoint_read.read(folder).state
    found = hashlib.sha256()
    averaged = {"ema"} & state.keys()
    for part in _leaves({key: state[key] for key in (*_STATE, *averaged)}):
        found.update(
            part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode()
        )
    return found.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def lines(folder: Path) -> list[dict[str, Any]]:
    """The logged lines of a run; none where it has logged nothing."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def logged(folder: Path) -> list[dict[str, Any]]:
    """What a run's past decides of its logged lines."""
    return [{key: line[key] for key in _DECIDED if key in line} for line in lines(folder)]


def wrong_lines(folder: Path) -> list[str]:
    """What is wrong with the lines of a run and their events."""
    wrong = [
        f"{path.name} is torn"
        for path in folder.glob("events.*")
        if not _is_whole(path.read_bytes())
    ]
    events = event_accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    told = defaultdict(list)
    for line in lines(folder):
        for tag in line.keys() - {"step", "epoch", "time_s"}:
            told[tag].append((line["step"], float(np.float32(line[tag]))))
    for tag in ("train/lr", "val/top1"):
        if (steps := [step for step, _ in told[tag]]) != sorted(set(steps)):
            wrong.append(f"{tag} at steps {steps}")
    for tag in sorted(told):
        if told[tag] and told[tag] != [(event.step, event.value) for event in events.Scalars(tag)]:
            wrong.append(f"TensorBoard has another {tag} than metrics.jsonl")
    return wrong


def _is_whole(data: bytes) -> bool:
    """Whether an event file ends where a record does: length, checksum, so many bytes, checksum."""
    at = 0
    while at + 12 <= len(data):
        at += 12 + int(struct.unpack_from("<Q", data, at)[0]) + 4
    return at == len(data)
