"""One loader beside a GPU, as far as a CPU can show it: its batches, and training on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.config import Config, ModelConfig
from harness.training.step import Step
from scripts import gpu_loaders, loader_peers
from scripts.gpu_loaders import LOADERS, NVJPEG, Job, Training

# of torchvision, which decodes where TorchCodec is missing
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")

CPU = torch.device("cpu")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of four JPEGs, light and dark, brighter to the right."""
    ramp = np.broadcast_to(np.linspace(0, 60, 80)[None, :, None], (60, 80, 3))
    for split in ("train", "val"):
        for i in range(8):
            place = tmp_path / split / f"class{i % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((20 + 150 * (i % 2) + ramp).astype(np.uint8)).save(
                place / f"{i}.jpg", quality=95
            )
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("flipped", [False, True])
def test_nvjpegs_batches_are_crops_with_their_labels(
    photos: Path, num_workers: int, flipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uint8 ``[N, 3, 224, 224]``, each picture's own, flipped where that was drawn; the same code
    decodes on a processor.
    """
    monkeypatch.setattr(
        torch, "rand", lambda *shape, device: torch.full(shape, 0.2 if flipped else 0.7)
    )
    with LOADERS[NVJPEG](Job(photos, num_workers, 6, CPU)) as batches:
        images, labels = next(iter(batches))
    assert (images.shape, images.dtype) == ((6, 3, 224, 224), torch.uint8)
    assert ((images.float().mean((1, 2, 3)) > 125) == labels.bool()).all()
    rises = images[..., -1].float().mean((1, 2)) > images[..., 0].float().mean((1, 2))
    assert (~rises if flipped else rises).all()


@pytest.mark.parametrize(
    "imported", [object(), OSError("made for another torch")], ids=["no JPEGs in it", "broken"]
)
def test_torchvision_decodes_where_torchcodec_does_not(
    imported: object, monkeypatch: pytest.MonkeyPatch, photos: Path
) -> None:
    """A TorchCodec that cannot be imported, or not decode JPEGs, counts as none."""

    def load(name: str) -> object:
        if isinstance(imported, Exception):
            raise imported
        return imported

    monkeypatch.setattr(gpu_loaders, "import_module", load)
    name, decode = gpu_loaders.decoder()
    data = torch.from_numpy(np.fromfile(photos / "train/class1/1.jpg", np.uint8))
    assert name == "torchvision" and decode([data, data], CPU)[1].shape == (3, 60, 80)


@pytest.mark.parametrize("name", ["DALI", "SPDL"])
def test_batches_of_others_are_copied_and_turned(
    name: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channels come first; what is written into their memory later does not reach a batch of
    DALI's.
    """
    memory = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    first = memory.copy()

    def made(*_: Any) -> Iterator[Any]:
        yield memory if name == "DALI" else torch.from_numpy(memory)
        memory[:] = 0
        yield memory if name == "DALI" else torch.from_numpy(memory)

    monkeypatch.setattr(gpu_loaders, name.lower(), made)
    with LOADERS[name](Job(photos, 1, 2, CPU)) as batches:
        it = iter(batches)
        images, labels = next(it)
        assert (images.numpy() == first.transpose(0, 3, 1, 2)).all() and labels.tolist() == [0, 0]
        kept = images.clone()
        next(it)
    assert name == "SPDL" or torch.equal(images, kept)


class Watched(Step):
    """Keeps what it was called with."""

    seen: list[torch.Tensor]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, **how: int) -> None:
        self.seen.append(images)
        super().__call__(images, labels, **how)


@pytest.mark.parametrize(
    "name", [gpu_loaders.NONE, *gpu_loaders.OURS, loader_peers.EXAMPLES, NVJPEG]
)
def test_a_network_is_trained_on_every_loader(
    name: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a warm network and the first batches, whole rounds of the workers for as long as
    asked; the rate is of those.
    """
    monkeypatch.setattr(gpu_loaders, "_WARM", 2)
    monkeypatch.setattr(gpu_loaders, "Step", Watched)
    monkeypatch.setattr(Watched, "seen", [], raising=False)
    # at the beginning, after one round, after two, when the device is done
    clock = iter((10.0, 10.5, 12.0, 14.0))
    training = Training(Config(model=ModelConfig()), CPU)
    rate = training.images_per_s(name, Job(photos, 2, 4, CPU), 1.0, now=lambda: next(clock))
    assert rate == 4 * 4 / 4.0
    assert len(Watched.seen) == 2 + 4 + 4
    assert all(images.dtype is torch.float32 and -3 < images.mean() < 3 for images in Watched.seen)


def test_the_rate_is_the_last_line(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As JSON, with what decoded where that is not the loader's own."""
    monkeypatch.setattr(gpu_loaders, "_WARM", 1)
    monkeypatch.setattr(gpu_loaders.workers, "start_server", lambda *_: None)
    monkeypatch.setattr(gpu_loaders.seeding, "seed_everything", lambda seed: None)
    small = [str(photos), "0", "--seconds=0", "--batch-size=4", "--model=small", "--device=cpu"]
    assert gpu_loaders.main([NVJPEG, *small]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["images_per_s"] > 0 and found["decoder"] in ("torchvision", "TorchCodec")


def test_what_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured."""
    monkeypatch.setattr(loader_peers, "_found", lambda module: module != "nvidia.dali")
    assert gpu_loaders.peers() == [loader_peers.EXAMPLES, NVJPEG, "SPDL"]
