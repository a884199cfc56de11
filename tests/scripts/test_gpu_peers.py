"""Other projects' loaders beside a GPU, as far as a CPU can show them: their batches, and training on them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from harness.config import Config, ModelConfig
from harness.training.step import Step
from scripts import gpu_peers, loader_peers

# of torchvision, which decodes where TorchCodec is missing
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of four grey JPEGs, dark and light, wider than high."""
    for i in range(8):
        place = tmp_path / "train" / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((60, 80, 3), 40 + 160 * (i % 2), np.uint8)).save(place / f"{i}.jpg", quality=95)
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_nvjpegs_batches_are_crops_with_their_labels(photos: Path, workers: int) -> None:
    """uint8 ``[N, 3, 224, 224]``, each picture's own; the same code decodes on a processor."""
    images, labels = next(iter(gpu_peers.LOADERS[gpu_peers.NVJPEG](photos, workers, 6, CPU)))
    assert (images.shape, images.dtype) == ((6, 3, 224, 224), torch.uint8)
    assert torch.allclose(images.float().mean((1, 2, 3)), 40.0 + 160 * labels, atol=2)


def test_torchvision_decodes_where_torchcodec_has_no_jpegs(monkeypatch: pytest.MonkeyPatch, photos: Path) -> None:
    """A release of TorchCodec without it counts as none."""
    monkeypatch.setattr(gpu_peers.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_peers, "import_module", lambda name: object())
    name, decode = gpu_peers.decoder()
    data = torch.from_numpy(np.fromfile(photos / "train/class1/1.jpg", np.uint8))
    assert name == "torchvision" and decode([data, data], CPU)[1].shape == (3, 60, 80)


@pytest.mark.parametrize("name", [loader_peers.EXAMPLES, gpu_peers.NVJPEG])
def test_a_network_is_trained_on_them(name: str, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as asked for, behind those that do not count; the rate is theirs."""
    monkeypatch.setattr(gpu_peers, "_WARM", 2)
    seen: list[torch.Tensor] = []

    class Seeing(Step):
        def __call__(self, images: torch.Tensor, labels: torch.Tensor, **how: int) -> None:
            seen.append(images)
            super().__call__(images, labels, **how)

    monkeypatch.setattr(gpu_peers, "Step", Seeing)
    clock = iter((10.0, 12.0))
    config = Config(model=ModelConfig())
    batches = gpu_peers.on_device(name, photos, 0, CPU, config, 4)
    assert gpu_peers.images_per_s(batches, config, CPU, 3, now=lambda: next(clock)) == 3 * 4 / 2.0
    assert len(seen) == 5
    assert all(images.dtype is torch.float32 and -3 < images.mean() < 3 for images in seen)


def test_what_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured."""
    monkeypatch.setattr(loader_peers, "_found", lambda module: module != "nvidia.dali")
    assert gpu_peers.available() == [loader_peers.EXAMPLES, gpu_peers.NVJPEG, "SPDL"]
