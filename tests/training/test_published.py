"""What published weights expect of images, without fetching any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models as zoo

from harness.cli import job
from harness.config import Config, ConfigError, Interpolation
from harness.runtime.distributed import World
from harness.training import models, resume

Composed = Callable[..., Config]


def followed(composed: Composed, *typed: str) -> Config:
    return resume.settings(composed(*typed), None, typed)


def test_images_are_those_that_the_weights_expect(
    composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Side, resizing, filter, mean and standard deviation are taken over, and told in one line."""
    data = followed(
        composed,
        "data=imagefolder",
        "data.root=x",
        "model.name=efficientnet_b2",
        "model.weights=DEFAULT",
    ).data
    assert (data.image_size, data.eval_resize, data.eval_squash) == (288, 288, False)
    assert data.interpolation is Interpolation.bicubic
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert capsys.readouterr().out == (
        "from the weights of efficientnet_b2: data.image_size=288 data.eval_resize=288 "
        "data.interpolation=bicubic\n"
    )


def test_what_was_typed_stays(composed: Composed, capsys: pytest.CaptureFixture[str]) -> None:
    """The difference is told; the resizing goes with the side that was typed."""
    data = followed(
        composed,
        "model.name=efficientnet_v2_l",
        "model.weights=DEFAULT",
        "data.image_size=240",
        "data.interpolation=bilinear",
        "data.std=[0.2,0.2,0.2]",
    ).data
    assert (data.image_size, data.eval_resize) == (240, 240)
    assert data.interpolation is Interpolation.bilinear
    assert (data.mean, data.std) == ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    assert capsys.readouterr().out == (
        "the weights of efficientnet_v2_l: data.interpolation bicubic, now bilinear\n"
        "the weights of efficientnet_v2_l: data.std [0.5,0.5,0.5], now [0.2,0.2,0.2]\n"
        "from the weights of efficientnet_v2_l: data.eval_resize=240 data.mean=[0.5,0.5,0.5]\n"
    )


def test_what_was_typed_may_contradict_them(composed: Composed) -> None:
    """As on the command line."""
    with pytest.raises(
        ConfigError, match="^data.eval_resize=256: smaller than data.image_size=300"
    ):
        followed(
            composed, "model.name=efficientnet_b3", "model.weights=DEFAULT", "data.eval_resize=256"
        )


@pytest.mark.parametrize(
    "typed",
    [
        ("model.name=resnet50",),
        ("model.name=resnet50", "model.weights=file.pth"),
        ("model.name=resnet50", "model.weights=file.safetensors"),
        ("model.name=resnet50", "model.weights=DEFAULT", "mode=evaluate", "resume=run"),
    ],
    ids=["random", "a file", "a file of a form that is not read", "a run's"],
)
def test_without_published_weights_all_settings_stay(
    composed: Composed, typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """They are what the user, the data set or the checkpoint say."""
    assert followed(composed, *typed) == composed(*typed)
    assert capsys.readouterr().out == ""


def test_a_run_that_goes_on_follows_them_again(composed: Composed) -> None:
    """So that it sees the images that it was trained on."""
    typed = ("model.name=efficientnet_b2", "model.weights=DEFAULT", "resume=run")
    assert followed(composed, *typed).data.image_size == 288


def test_every_classifier_of_torchvision_says_what_it_expects() -> None:
    """Of a size that was typed, the same share is cut out."""
    for name in zoo.list_models(module=zoo):
        made = zoo.get_model_weights(name).DEFAULT.transforms()
        size, short, squash, interpolation, mean, std = models.expected(name, None).values()
        assert ([size], [short], squash) == (made.crop_size, made.resize_size, False)
        assert (interpolation, [*mean], [*std]) == (made.interpolation.value, made.mean, made.std)
        assert tuple(models.expected(name, 2 * size).values())[:2] == (2 * size, 2 * short)


def test_every_rank_follows_them_before_it_opens_anything(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_globals: None
) -> None:
    """Data sets, the tuner, checkpoints and the report have these settings."""
    seen = []
    monkeypatch.setattr(job, "_wire", lambda world, given, saved: seen.append(given.config.data))
    typed = ("model.name=efficientnet_b2", "model.weights=DEFAULT", "device=cpu")
    job.main_worker(0, job.Job(composed(*typed), tmp_path, typed))
    assert [data.eval_resize for data in seen] == [288]


class Named(nn.Module):
    """A network that names its head, as timm's do."""

    def __init__(self, facts: Any) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
        self.last = nn.Linear(3, 3)
        self.default_cfg = facts


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        ({"classifier": "heads.a"}, {"heads.a.weight", "heads.a.bias"}),
        (
            {"classifier": ("heads.a", "heads.b")},
            {"heads.a.weight", "heads.a.bias", "heads.b.weight", "heads.b.bias"},
        ),
        ({"classifier": None}, {"last.weight", "last.bias"}),
        ({"classifier": "gone"}, {"last.weight", "last.bias"}),
        ("of the user's", {"last.weight", "last.bias"}),
    ],
    ids=["one", "two", "none", "removed", "something else"],
)
def test_a_head_that_is_named(facts: Any, keys: set[str]) -> None:
    """Its parameters are the head's, in place of the last layer's."""
    assert models.head_keys(Named(facts)) == keys


def test_what_they_expect_is_what_a_run_evaluates_with(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a transformer is followed before it is checked."""
    monkeypatch.setattr(models, "_published", lambda model, size: {"size": torch.tensor(size)})
    typed = ("model.name=vit_b_16", "model.weights=DEFAULT", "mode=evaluate")
    config = resume.settings(composed(*typed), None, typed)
    saved = resume.find(config, tmp_path, World(0, 1, 0, 1, torch.device("cpu")))
    assert saved is not None and int(saved.state["model"]["size"]) == 224
    assert resume.settings(config, saved, typed) == config
