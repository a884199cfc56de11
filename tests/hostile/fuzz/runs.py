"""The readers of what runs leave and are started by."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn

from harness import config as schema
from harness.cli import app
from harness.cli.compose import prepared, register
from harness.clock.figures import Tag
from harness.config import Config
from harness.monitor.writer import RunWriter
from harness.report.compare import folders
from harness.report.page import course, document, runs
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError, described
from harness.training import checkpoint_read, resume
from harness.training.state import TrainState, make_state
from tests.hostile.fuzz.changes import mutated, mutated_json, mutated_yaml
from tests.hostile.fuzz.reader import Reader

_RATE = {"images_per_s": 1.0, "low": 1.0}
# what the page and compare take of a run's files
REPORT: dict[str, Any] = {
    "status": "completed",
    "steps": 50,
    "stall_basis": "host",
    "stall_fraction": 0.5,
    "images_per_s": 1.0,
    "step_ms": {"median": 1.0, "p95": 1.0, "max": 1.0},
    "top1": 1.0,
    "shares": {"compute": 0.5, "starved": 0.5},
    "wait_parts": {"make": 1.0},
    "verdict": {"bottleneck": "decode", "sentence": "x", "ceiling": 2.0, "evidence": ["x"]},
    "stages": [{"name": "x", "group": "x", "wall_ms": 1.0, "cpu_ms": 1.0}],
    "workers": {"samples": 1.0, "busy_fraction": 1.0},
    "goodput": {"fraction": 1.0, "busy_s": 1.0, "wall_s": 1.0, "rest": [{"name": "x", "s": 1.0}]},
    "ranks": [{"rank": 0, "step_ms": 1.0, "stalled_ms": 1.0}],
    "loader": {"num_workers": 1},
    "environment": {"cpu": "x"},
    "run": {"overrides": ["x=1"]},
}
TUNING: dict[str, Any] = {
    "search": "x",
    "settings": {"num_workers": 1},
    "sentence": "x",
    "demand": _RATE,
    "trials": [{"settings": {"num_workers": 1}, "kind": "steps", "rate": _RATE}],
    "seconds": 1.0,
}


def record(place: Path) -> Reader:
    record = checkpoint_read.Record(place / "step-7.pt", 7, 1, 0.5, "")
    torch.save({"model": {"w": torch.ones(2)}}, record.path)
    digest = hashlib.sha256(record.path.read_bytes()).hexdigest()
    path = place / "step-7.json"

    def read(data: bytes) -> str:
        path.write_bytes(data)
        checkpoint_read.records(place)
        try:
            checkpoint_read.read(record.path)
            checkpoint_read.read(place)
        except CheckpointError:
            return "CheckpointError"
        return ""

    def seal(data: bytes) -> bytes:
        facts = json.loads(data)
        blank = json.dumps({**facts, "digest": ""})
        return blank.replace(
            '"digest": ""', f'"digest": "{hashlib.sha256(blank.encode()).hexdigest()}"'
        ).encode()

    whole = checkpoint_read.sealed(checkpoint_read.Record(record.path, 7, 1, 0.5, digest))
    return Reader([whole], read, mutated_json, seal)


class _Trained(NamedTuple):
    state: TrainState
    config: Config
    saved: dict[str, Any]


def _trained(name: str) -> _Trained:
    torch.manual_seed(0)
    config = Config()
    config.optim.name = name
    config.resume = "step-0.pt"
    network = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    state = make_state(config, 2, World(0, 1, 0, 1, torch.device("cpu")), 10, network=network)
    _update(state)
    facts = {"classes": ["a", "b"], "ranks": 1, "length": 100, "stop": 96}
    saved = state.to_dict({**facts, "settings": schema.to_plain(config)})
    return _Trained(state, config, pickle.loads(pickle.dumps(saved)))


def _update(state: TrainState) -> None:
    state.network(torch.ones(2, 3, 4, 4)).sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def checkpoint_file(place: Path, names: Sequence[str] = ("sgd", "adamw")) -> Reader:
    """The file and what is in it: a record beside it has its digest."""
    trained = [_trained(name) for name in names]
    path = place / "step-0.pt"
    wholes = [each.saved for each in trained]
    seeds = [*map(_saved, wholes)]

    def use(found: dict[str, Any], state: TrainState, config: Config) -> None:
        saved = checkpoint_read.Saved("step-0.pt", found)
        for mode in (schema.Mode.train, schema.Mode.evaluate):
            config.mode = state.config.mode = mode
            resume.settings(config, saved, ())
            resume.take_over(state, saved, ("a", "b"), 100)
            _update(state)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        record = checkpoint_read.Record(path, 0, 0, None, hashlib.sha256(data).hexdigest())
        path.with_suffix(".json").write_bytes(checkpoint_read.sealed(record))
        refused = 0
        for each in trained:
            try:
                use(checkpoint_read.read(path).state, each.state, each.config)
            except CheckpointError:
                refused += 1
            finally:
                each.config.mode = schema.Mode.train
                whole = pickle.loads(pickle.dumps(each.saved))
                each.state.load(checkpoint_read.Saved("step-0.pt", whole))
        return "CheckpointError" if refused == len(trained) else ""

    def mutate(_: Any, rng: Random) -> bytes:
        at = rng.randrange(len(wholes))
        kind = rng.randrange(4)
        if kind == 0:
            return mutated([seeds[at]], rng)
        if kind == 1:
            return _with_pickle(seeds[at], rng)
        return _saved(_odd_state(wholes[at], rng))

    return Reader(seeds, read, mutate)


def _with_pickle(whole: bytes, rng: Random) -> bytes:
    """Returns the zip of a checkpoint with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(rng.choice(("data.pkl", "data.pkl", "data.pkl", "version", "0"))):
                data = mutated([data], rng)
            new.writestr(name, data)
    return file.getvalue()


_ODD_VALUES: tuple[Any, ...] = (
    None, -5, 0, 5.5, True, 10**400, float("nan"), float("inf"), "x", "", b"x", (), [], {}, [5],
    {"x": 1}, {1: 2}, {None: None}, torch.zeros(0), torch.ones(3), torch.ones(()),
    torch.tensor(False), torch.full((2,), float("nan")), torch.ones(2, 3, 3, 3).to_sparse(),
    torch.zeros(1).expand(2), torch.ones(2, dtype=torch.complex64), torch.ones(2, 3, device="meta"),
)  # fmt: skip


def _odd_state(whole: dict[str, Any], rng: Random) -> dict[str, Any]:
    changed: dict[str, Any] = pickle.loads(pickle.dumps(whole))
    holders: list[Any] = [changed]
    for holder in holders:
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [item for item in inner if isinstance(item, dict | list) and item]
    for _ in range(rng.choice((1, 1, 2))):
        holder = rng.choice(holders)
        if not holder:
            continue
        key = rng.choice([*holder] if isinstance(holder, dict) else [*range(len(holder))])
        kind = rng.randrange(12)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("more", -1, 7, None))] = holder[key]
        elif kind == 2 and isinstance(holder[key], torch.Tensor):
            holder[key] = rng.choice((
                lambda t: t[:-1] if t.ndim else t[None], lambda t: t.half(), lambda t: t.int(),
                lambda t: t.to_sparse(), lambda t: t.flatten(), lambda t: t.to("meta"),
            ))(holder[key])  # fmt: skip
        else:
            holder[key] = rng.choice(_ODD_VALUES)
    return changed


RUN: dict[str, Callable[[], bytes]] = {
    "report.json": lambda: json.dumps({**REPORT, "error": None}).encode(),
    "tuning.json": lambda: json.dumps(TUNING).encode(),
    "metrics.jsonl": lambda: b"",
    ".hydra/config.yaml": lambda: OmegaConf.to_yaml(OmegaConf.structured(Config())).encode(),
}


def run(name: str, place: Path) -> Reader:
    """A file of a run's folder, read by the page, by compare and by the run that goes on."""
    (place / ".hydra").mkdir()
    for file, make in RUN.items():
        (place / file).write_bytes(make())
    with RunWriter(place, tensorboard=False) as writer:
        for step in range(10, 60, 10):
            writer.scalars(step, dict.fromkeys((*course.TAGS, Tag.VAL_TOP1), 0.5), epoch=1)
    whole = (place / name).read_bytes()

    def read(data: bytes) -> str:
        (place / name).write_bytes(data)
        text = runs.run_json(place, "run")
        document.page([text], (), "run")
        found, _ = folders.find([place, place])
        folders.settings_that_differ(found)
        found[0].changes(found[0])
        notes = json.loads(text)["notes"]
        if name == "metrics.jsonl":
            RunWriter(place, tensorboard=False, resumed_step=30).close()
        return "note" if notes or found[0].error else ""

    mutate = mutated_yaml if name.endswith("yaml") else mutated_json
    assert not read(whole)
    return Reader([whole], read, mutate)


def settings(place: Path) -> Reader:
    """A file of settings, as the command line reads it."""
    (place / "experiment").mkdir()
    path = place / "experiment/bad.yaml"
    register()
    for name in ("wellfed.run_dir", "wellfed.sweep_dir"):
        OmegaConf.register_new_resolver(name, lambda *_: "never used", replace=True)
    overrides = [f"hydra.searchpath=[file://{place}]", "experiment=bad"]

    def read(data: bytes) -> str:
        path.write_bytes(data)
        former = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        try:
            prepared([f"--config-dir={place}", "experiment=bad"])
            with initialize_config_dir(str(schema.CONF), version_base="1.3"):
                schema.load(compose("config", overrides=overrides))
        except Exception as error:
            found = app._composing(error)
            if known := described(found):
                return f"{type(found).__name__}, exit code {known[1]}"
            raise
        finally:
            # the block above leaves another instance behind
            GlobalHydra.instance().hydra = former
        return ""

    conf = schema.CONF / "experiment"
    seeds = [file.read_bytes() for file in sorted(conf.glob("*.yaml"))]
    return Reader(seeds, read, mutated_yaml)
