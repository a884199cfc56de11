"""wellfed.load: the network, the transform and the classes of a checkpoint, in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import photograph
from PIL import Image
from torch import nn

import harness
from harness.config import Config, DataConfig, Interpolation, to_plain
from harness.data.datasets import ImageDataset, as_evaluated
from harness.data.storage import FolderSource
from harness.feed.prefetcher import Normalize
from harness.inference.loaded import Transform, network
from harness.runtime.errors import CheckpointError
from harness.training.checkpoint_read import Saved
from harness.training.models import small

Composed = Callable[..., Config]
CPU = torch.device("cpu")
BUILD = """
from torch import nn

def build(num_classes, **more):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))
"""


@pytest.mark.parametrize("filter_name", ["bilinear", "bicubic"])
def test_a_transform_gives_the_pixels_of_an_evaluation(tmp_path: Path, filter_name: str) -> None:
    """From a path, bytes, an image of Pillow's or an array, for files of many modes."""
    china = photograph("china").resize((300, 200))
    china.save(
        tmp_path / "0.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"
    )
    china.convert("CMYK").save(tmp_path / "1.jpg")
    china.convert("P").save(tmp_path / "2.gif")
    clear = china.convert("RGBA")
    clear.putalpha(china.convert("L"))
    clear.save(tmp_path / "3.png")
    Image.fromarray(np.asarray(china.convert("L")).astype(np.uint16) * 250).save(tmp_path / "4.png")
    china.crop((0, 0, 64, 64)).save(tmp_path / "5.png")
    data = DataConfig(
        image_size=64,
        eval_resize=80,
        interpolation=Interpolation[filter_name],
        background=(9, 99, 199),
        exif_orientation=True,
    )
    source = FolderSource(tmp_path, flat=True)
    dataset = ImageDataset(source, as_evaluated(data), data, 64, seed=0)
    transform = Transform(data, CPU)
    normalize = Normalize(CPU, data.mean, data.std, torch.float32, channels_last=True)
    for i in range(6):
        pixels = np.zeros((1, 64, 64, 3), np.uint8).transpose(0, 3, 1, 2)
        dataset.fill(0, i, pixels[0])
        expected = normalize(torch.from_numpy(pixels))[0]
        path = Path(dataset.source.where(i))
        with Image.open(path) as opened:
            ways = [path, str(path), path.read_bytes(), opened]
            if i == 5:
                ways.append(np.asarray(opened))
            for given in ways:
                found = transform(given)
                assert found.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (b"words", ValueError),
        (b"", ValueError),
        ("no such file", FileNotFoundError),
        (np.zeros((4, 4, 3), np.float32), TypeError),
        (np.zeros((4, 4), np.uint8), TypeError),
        (np.zeros((0, 4, 3), np.uint8), TypeError),
        (7, TypeError),
    ],
    ids=["no image", "empty", "no file", "floats", "gray", "no pixels", "a number"],
)
def test_a_transform_refuses_what_is_no_image(given: object, error: type[Exception]) -> None:
    """With an error that says so."""
    with pytest.raises(error):
        Transform(DataConfig(), CPU)(given)  # type: ignore[arg-type]


def saved(path: Path, config: Config, network: torch.nn.Module) -> Path:
    """A checkpoint of a run of ``config``, without its record."""
    state = {
        "model": network.state_dict(),
        "settings": to_plain(config),
        "classes": ["cat", "dog", os_name()],
        "epoch": 1,
        "step": 2,
    }
    torch.save(state, path)
    return path


def os_name() -> str:
    """A name that is not UTF-8."""
    return b"\xff".decode(errors="surrogateescape")


def test_the_front_door(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network in evaluation mode, in fp32, with the checkpoint's size and classes."""
    bare = small(3)
    config = composed("data.image_size=48", "trainer.precision=bf16", "data.root=/nowhere")
    path = saved(tmp_path / "x.pt", config, bare)
    net = harness.load(path)
    assert net.classes == ("cat", "dog", os_name()) and not net.model.training
    image = net.transform(Image.new("RGB", (60, 50), (9, 8, 7)))
    assert image.shape == (3, 48, 48)
    with torch.no_grad():
        logits = net.model(image[None])
        assert torch.equal(logits, bare.eval()(image[None])) and logits.dtype == torch.float32
    assert capsys.readouterr().out == ""


def test_a_users_code_is_called_only_where_it_is_named(
    composed: Composed, write_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A file that somebody gave away imports nothing."""
    write_module("own_net", BUILD)
    bare = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 3))
    path = saved(tmp_path / "x.pt", composed("model.name=own_net:build"), bare)
    with pytest.raises(CheckpointError, match="trust it, add model.name=own_net:build"):
        harness.load(path)
    assert len(harness.load(path, model_name="own_net:build").model) == 3


def test_odd_classes_are_refused() -> None:
    """Names that no file could hold, and what are no names."""
    for classes in (["a", "b", "\ud800"], [1, 2, 3], []):
        with pytest.raises(CheckpointError, match=r"^x\.pt\b"):
            network(Saved("x.pt", {"model": {}, "classes": classes}), Config())
