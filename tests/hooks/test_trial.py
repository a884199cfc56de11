"""``wellfed watch --try``: the script as it is, and with the change that its report names."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from harness.hooks import trial

SLEEPS = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 4000

        def __getitem__(self, index):
            time.sleep({sleep_s})
            return torch.full((4,), 1.0), index % 2

    if __name__ == "__main__":
        net = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for images, labels in DataLoader(Slow(), 20):
            time.sleep({step_s})
            torch.nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
"""


@pytest.fixture
def tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    """Tries a script for some seconds; returns both reports and what was said."""

    def run(text: str, limit_s: float = 4.0) -> tuple[list[dict[str, Any]], str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(trial, "_LIMIT_S", limit_s)
        assert trial.run(["train.py"], tmp_path / "out") == 0
        found = sorted((tmp_path / "out").glob("*/report.json"))
        return [json.loads(path.read_text()) for path in found], capfd.readouterr().err

    return run


@pytest.mark.slow
def test_other_arguments_are_tried(tried: Any) -> None:
    """The loader at the line gets them, and what they give is told beside what was expected."""
    (after, before), said = tried(SLEEPS.format(sleep_s=0.002, step_s=0.01))
    assert before["loader"]["num_workers"] == 0
    assert after["loader"]["num_workers"] == before["change"]["arguments"]["num_workers"] > 0
    assert after["images_per_s"] > 1.3 * before["images_per_s"]
    assert f"{before['images_per_s']:.0f} and {after['images_per_s']:.0f} samples/s" in said


@pytest.mark.slow
def test_a_script_that_does_not_wait_is_run_once(tried: Any) -> None:
    """It has no change that can be made from outside."""
    found, said = tried(SLEEPS.format(sleep_s=0, step_s=0.1))
    assert len(found) == 1 and "no change to try" in said


@pytest.mark.parametrize("where", ["train.py:7", "train.py:8"])
def test_the_decoder_is_put_in(tmp_path: Path, where: str) -> None:
    """Into the loader of that line; others stay, and so do the other arguments."""
    (tmp_path / "a").mkdir()
    Image.new("RGB", (50, 50)).save(tmp_path / "a" / "1.jpg")
    plain = ImageFolder(str(tmp_path), T.Compose([T.RandomResizedCrop(32), T.ToTensor()]))
    change = trial._changing({"where": "train.py:7", "arguments": None, "faster": True})
    given, named = change(DataLoader.__init__, where, plain, 8, num_workers=0, drop_last=True)
    loader = DataLoader(*given, **named)
    assert (loader.batch_size, loader.num_workers, loader.drop_last) == (8, 0, True)
    assert (loader.dataset.transform is plain.transform) == (where == "train.py:8")
