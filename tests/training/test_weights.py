"""Weights that other trainers wrote: taken from any nesting, or the file named."""

from __future__ import annotations

import argparse
import collections
import functools
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from harness.runtime.errors import CheckpointError
from harness.training import checkpoint_read, models

Weights = dict[str, Tensor]


class Net(nn.Module):
    """A trunk with a norm, which has a counter, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)


class Settings(dict[str, Any]):
    """A dictionary of a class that no reader knows."""


def begun(weights: Weights, begin: str) -> Weights:
    return {begin + key: value for key, value in weights.items()}


def other(weights: Weights) -> Weights:
    """Weights of an average."""
    return {key: value + 1 for key, value in weights.items()}


def taken(path: Path, net: Net, *, head_may_differ: bool = False) -> tuple[bool, list[str]]:
    lines: list[str] = []
    head = models.head_keys(net) if head_may_differ else ()
    found = checkpoint_read.read(path, foreign=True)
    return models.take_over(net, found, "the network", head, lines.append), lines


def same(net: nn.Module, weights: Weights) -> bool:
    return all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())


NESTED: dict[str, Callable[[Weights], Any]] = {
    "plain": lambda w: w,
    "net": lambda w: {"net": w, "acc": 93.5, "epoch": "last", "classes": 3},
    "compiled, wrapped, in Lightning": lambda w: {
        "state_dict": begun(w, "model._orig_mod.module."),
        "hyper_parameters": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
        "optimizer_states": [{"state": {0: {"momentum_buffer": torch.zeros(3)}}}],
    },
    "wrapped within": lambda w: {
        key.replace("fc.", "fc._checkpoint_wrapped_module."): value for key, value in w.items()
    },
    "averaged model": lambda w: {"n_averaged": torch.tensor(3), **begun(w, "module.")},
    "objects beside": lambda w: {
        "model": w,
        "args": argparse.Namespace(lr=0.1),
        "best": np.float64(0.5),
        "log": collections.defaultdict(list, {"loss": [0.5]}),
        "path": Path("x"),
        "settings of theirs": Settings(a=Settings(b=1)),
    },
    "tuple": lambda w: (w, {"state": {}}),
    "average": lambda w: {"model": other(w), "args": None, "model_ema": begun(w, "module.")},
    "average without buffers": lambda w: {
        "model": {**other(w), **{k: v for k, v in w.items() if "running" in k or "num_" in k}},
        "ema": {"shadow": {k: v for k, v in w.items() if "running" not in k and "num_" not in k}},
    },
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before 1.6"])
@pytest.mark.parametrize("kind", NESTED)
def test_weights_are_found_in_any_nesting(tmp_path: Path, kind: str, legacy: bool) -> None:
    """The network gets the weights, bitwise; entries beside them do not matter."""
    weights = Net().state_dict()
    path = tmp_path / "x.pth"
    torch.save(NESTED[kind](weights), path, _use_new_zipfile_serialization=not legacy)
    net = Net()
    left, lines = taken(path, net)
    assert not left and len(lines) == 1
    assert same(net, weights)


def test_safetensors_and_half_precision_are_read(tmp_path: Path) -> None:
    """Numbers of 16 bits are widened; a counter that is not there stays."""
    weights = {k: v.half() for k, v in Net().state_dict().items() if v.is_floating_point()}
    (tmp_path / "x.safetensors").write_bytes(save(begun(weights, "model.")))
    net = Net()
    taken(tmp_path / "x.safetensors", net)
    assert all(torch.equal(net.state_dict()[key].half(), weights[key]) for key in weights)


def test_a_head_of_another_name_is_new(tmp_path: Path) -> None:
    """Training takes the trunk; evaluation shows the keys under their whole names."""
    weights = begun(Net().state_dict(), "backbone.")
    for part in ("weight", "bias"):
        weights[f"head.{part}"] = weights.pop(f"backbone.fc.{part}")
    torch.save({"state_dict": weights}, tmp_path / "x.pth")
    net = Net()
    left, _ = taken(tmp_path / "x.pth", net, head_may_differ=True)
    assert left and torch.equal(net.conv1.weight, weights["backbone.conv1.weight"])
    with pytest.raises(CheckpointError, match=r"fc\.weight .*state_dict/head\.weight"):
        taken(tmp_path / "x.pth", Net())


def test_a_deeper_network_is_refused(tmp_path: Path) -> None:
    """Weights that the network has no place for are not dropped."""
    weights = {**Net().state_dict(), "conv2.weight": torch.ones(1)}
    torch.save({"module": begun(weights, "module.")}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"module/module\.conv2\.weight is not expected"):
        taken(tmp_path / "x.pth", Net())


def _saved(path: Path, content: Any, *, legacy: bool = False) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)


PICKLED: dict[str, Callable[[Path], object]] = {
    "whole": lambda path: _saved(path, nn.Sequential(nn.Linear(2, 2))),
    "before 1.6": lambda path: _saved(path, nn.Sequential(nn.Linear(2, 2)), legacy=True),
    "in a dictionary": lambda path: _saved(path, {"model": nn.Sequential(nn.Linear(2, 2))}),
    "TorchScript": lambda path: torch.jit.script(nn.Sequential(nn.Linear(2, 2))).save(str(path)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PICKLED)
def test_the_command_takes_weights_out_of_a_pickled_network(tmp_path: Path, kind: str) -> None:
    """The refusal's command, pasted, writes a file that is then taken."""
    path = tmp_path / "a net's.pt"
    PICKLED[kind](path)
    net: Any = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as caught:
        taken(path, net)
    command = str(caught.value).partition("python -c ")[2]
    subprocess.run(f"{sys.executable} -c {command}", shell=True, check=True, cwd=tmp_path)
    assert taken(Path(f"{path}.weights.pth"), net)[0] is False


OTHERS = {
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:x\n",
    "web page": b"\n<!DOCTYPE html>",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "empty": b"",
    "Entry not found": b"Entry not found",
    "truncated zip archive": b"PK\x03\x04cut",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    """The kind is said, or how the file begins."""
    (tmp_path / "x.pth").write_bytes(OTHERS[name])
    with pytest.raises(CheckpointError, match=name):
        checkpoint_read.read(tmp_path / "x.pth", foreign=True)


def test_a_folder_without_checkpoints_lists_its_files(tmp_path: Path) -> None:
    """The line names a file to write in place of the folder."""
    with zipfile.ZipFile(tmp_path / "net.safetensors", "w"):
        pass
    with pytest.raises(CheckpointError, match=r"model\.weights=\S+/net\.safetensors"):
        checkpoint_read.read(tmp_path, foreign=True)


def test_a_loop_of_links_is_a_checkpoint_error(tmp_path: Path) -> None:
    """As any other file that cannot be read."""
    (tmp_path / "last.pt").symlink_to("last.pt")
    for foreign in (True, False):
        with pytest.raises(CheckpointError):
            checkpoint_read.read(tmp_path / "last.pt", foreign=foreign)
