"""mode=export: a file that gives the network's logits, or none.

ONNX has a dependency group of its own: ``uv run --group onnx pytest -m "slow or not slow"
tests/inference/test_export.py``.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ran, trained
from PIL import Image
from torch import nn

import harness
from harness.config import Config, ConfigError
from harness.inference import loaded as module
from harness.inference.loaded import export
from harness.training import models
from harness.training.checkpoint_read import Saved
from harness.training.models import small

Composed = Callable[..., Config]
# what a fresh process does without this project
ALONE = {
    "pt2": """
        import json, sys, torch
        texts = {"classes": "", "mean": "", "eval_resize": "", "input": ""}
        run = torch.export.load(sys.argv[1], extra_files=texts).module()
        facts = {name: json.loads(text) for name, text in texts.items()}
        logits = [run(torch.load("images.pt")[:count]) for count in (1, 5)]
        assert not any(name.startswith(("harness", "wellfed")) for name in sys.modules)
        torch.save((facts, logits), "found.pt")
    """,
    "onnx": """
        import json, sys, onnxruntime, torch
        session = onnxruntime.InferenceSession(sys.argv[1])
        texts = session.get_modelmeta().custom_metadata_map
        facts = {name: json.loads(text) for name, text in texts.items()}
        images = torch.load("images.pt").numpy()
        logits = [
            torch.from_numpy(session.run(["logits"], {"images": images[:count]})[0])
            for count in (1, 5)
        ]
        torch.save((facts, logits), "found.pt")
    """,
}


def need(form: str) -> None:
    """Skips where the packages of a form are not installed."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if form == "onnx" and find_spec(name) is None:
            pytest.skip(f"needs {name}: uv sync --group onnx")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A data set of two classes, six images each; one is damaged."""
    noise = np.random.default_rng(0).integers(0, 256, (12, 40, 50, 3), np.uint8)
    for i, pixels in enumerate(noise):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (tmp_path / "images/a/cut.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return tmp_path / "images"


def exported(config: Config, network: nn.Module, folder: Path, *classes: str) -> Path:
    """The file that ``network`` becomes, of a checkpoint of a run of ``config``."""
    saved = Saved("x.pt", {"model": network.state_dict(), "classes": [*classes]})
    folder.mkdir(exist_ok=True)
    export(saved, config, folder)
    return folder / f"model.{config.export.format.name}"


def pooled() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)).eval()


@pytest.mark.usefixtures("one_thread")
def test_a_program_gives_the_networks_logits(
    composed: Composed,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For any number of uint8 images, normalized inside; facts lie in the file."""
    config = composed(
        "mode=export", "resume=x.pt", "data=imagefolder", f"data.root={images}",
        "data.split_fraction=0.3", "data.image_size=32", "data.mean=[0.1,0.2,0.3]",
        "data.interpolation=bicubic",
    )  # fmt: skip
    network = pooled()
    monkeypatch.setattr("harness.training.models.build", lambda *_, **__: network)
    path = exported(config, network, tmp_path / "run", "cat", os.fsdecode(b"\xff"))
    printed = capsys.readouterr().out
    assert "in fp32: uint8 [N, 3, 32, 32], 0..255, RGB; normalization is included" in printed
    assert "on 16 noise images: logits differ by" in printed
    facts = {
        "classes": ["cat", os.fsdecode(b"\xff")],
        "mean": [0.1, 0.2, 0.3],
        "eval_resize": 37,
        "interpolation": "bicubic",
        "image_size": 32,
    }
    texts = dict.fromkeys(facts, "")
    run = torch.export.load(path, extra_files=texts).module()
    assert {name: json.loads(texts[name]) for name in facts} == facts
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (config.data.mean, config.data.std))
    for count in (1, 2, 5):
        with torch.no_grad():
            expected = network((pixels[:count] / 255 - mean) / std)
            assert run(pixels[:count]).allclose(expected, atol=1e-4)


class FixedBatch(nn.Module):
    """Takes the number of images for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, images: Any) -> Any:
        return torch.stack([self.layer(images[i].mean((1, 2))) for i in range(len(images))])


class Branching(FixedBatch):
    """Looks at what is in the images."""

    def forward(self, images: Any) -> Any:
        return self.layer(images.mean((2, 3))) * (1 if images.sum() > 0 else -1)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("network", [FixedBatch(), Branching()], ids=["fixed", "branching"])
def test_a_network_of_one_batch_size_is_refused(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: nn.Module
) -> None:
    """In one line that says why, and no file is written."""
    monkeypatch.setattr("harness.training.models.build", lambda *_, **__: network)
    config = composed("mode=export", "resume=x.pt", "data=fake")
    with pytest.raises(ConfigError, match="^model.name=small: torch.export cannot export"):
        exported(config, network, tmp_path / "run", "a", "b")
    assert not [*(tmp_path / "run").iterdir()]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("error", [2e-4, float("nan")], ids=["too far", "NaN"])
def test_a_file_with_other_logits_gets_no_name(
    composed: Composed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: float,
) -> None:
    """It is no file of this network."""
    network = pooled()
    monkeypatch.setattr("harness.training.models.build", lambda *_, **__: network)
    whole = module._pt2

    def wrong(*given: Any) -> tuple[bytes, Any]:
        data, run = whole(*given)
        return data, lambda images: run(images) + error

    monkeypatch.setattr(module, "_pt2", wrong)
    config = composed("mode=export", "resume=x.pt")
    with pytest.raises(ConfigError, match="^export.format=pt2: on 16 noise .* more than 0.0001"):
        exported(config, network, tmp_path / "run", "a", "b")
    assert not [*(tmp_path / "run").iterdir()]


def test_what_onnx_needs_is_named(composed: Composed, tmp_path: Path) -> None:
    """Where a package is missing the error says how to get it."""
    if find_spec("onnxruntime") is not None:
        pytest.skip("onnxruntime is installed")
    config = composed("mode=export", "resume=x.pt", "data=fake", "export.format=onnx")
    with pytest.raises(ConfigError, match=r"^export.format=onnx: .* uv sync --extra onnx"):
        exported(config, small(2), tmp_path / "run", "a", "b")
    assert not [*(tmp_path / "run").iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("form", ALONE)
def test_a_fresh_process_runs_the_file(tmp_path: Path, images: Path, form: str) -> None:
    """As users do: a run on digits or on files, its export, and a process without this project."""
    need(form)
    sets = {
        "digits": ("data=digits",),
        "files": ("data=imagefolder", f"data.root={images}", "data.split_fraction=0.3"),
    }
    size = 32
    torch.save(torch.randint(0, 256, (5, 3, size, size), dtype=torch.uint8), tmp_path / "images.pt")
    for name, typed in sets.items():
        common = (*typed, f"data.image_size={size}", f"run.name={name}", "data.on_error=skip")
        more = ("data.max_bad_fraction=0.5", "trainer.epochs=1", "loader.batch_size=4")
        done = trained(tmp_path, *common, *more, "model=resnet18", timeout_s=300)
        assert done.returncode == 0, done.stderr
        run = tmp_path / "outputs" / name
        typed = ("mode=export", f"model.weights={run}", f"export.format={form}")
        done = trained(tmp_path, *typed, f"run.name={name}-file")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert "on 16 noise images: logits differ by" in done.stdout
        code = textwrap.dedent(ALONE[form])
        file = f"outputs/{name}-file/model.{form}"
        done = ran(sys.executable, "-P", "-c", code, file, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        facts, logits = torch.load(tmp_path / "found.pt")
        net = harness.load(run)
        assert tuple(facts["classes"]) == net.classes
        pixels = torch.load(tmp_path / "images.pt").permute(0, 2, 3, 1).numpy()
        expected = net.model(torch.stack([net.transform(each) for each in pixels]))
        for found in logits:
            assert found.allclose(expected[: len(found)], atol=1e-4)


@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm: uv sync --extra timm")
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_timm_reads_an_export(composed: Composed, tmp_path: Path, name: str) -> None:
    """A fresh network of timm's from that folder gives the logits to 1e-5."""
    import timm

    config = composed(
        "mode=export", "resume=x.pt", "data=fake", "data.image_size=48", f"model.name=timm/{name}",
        "export.format=timm", "model.args={drop_rate:0.1}",
    )  # fmt: skip
    network = models.build(config.model, 3, image_size=48).eval()
    exported(config, network, tmp_path / "run", "a", "b", "c")
    again = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    images = torch.randn(4, 3, 48, 48)
    with torch.no_grad():
        assert (again(images) - network(images)).abs().max() <= 1e-5
    assert timm.data.resolve_model_data_config(again)["input_size"] == [3, 48, 48]


def test_a_network_that_is_not_timms_has_no_such_form(composed: Composed, tmp_path: Path) -> None:
    config = composed("mode=export", "resume=x.pt", "data=fake", "export.format=timm")
    with pytest.raises(ConfigError, match=r"^export\.format=timm"):
        exported(config, small(2), tmp_path, "a", "b")
