"""Networks by name and with weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchvision import models as zoo

from harness.config import ConfigError, ModelConfig
from harness.runtime.errors import CheckpointError
from harness.training import checkpoint, models


@pytest.mark.parametrize("name", ["small", "resnet18", "mobilenet_v3_small", "squeezenet1_1", "vit_b_16"])
def test_a_head_for_the_classes(name: str) -> None:
    """Every network gives one logit a class."""
    network = models.build(ModelConfig(name=name), 7).eval()
    size = 224 if name == "vit_b_16" else 64
    assert network(torch.zeros(2, 3, size, size)).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_every_name_builds(name: str) -> None:
    """Every name that is offered can be built for other classes than ImageNet's (on the meta device, so no memory)."""
    with torch.device("meta"):
        network = models.build(ModelConfig(name=name), 7)
    assert models._head_keys(network) <= network.state_dict().keys()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_heads_give_one_tensor(name: str) -> None:
    """In training they have no auxiliary outputs."""
    network = models.build(ModelConfig(name=name), 3)
    assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """The error names the setting, the value and what may have been meant."""
    with pytest.raises(ConfigError, match=r"model\.name=resnet51: unknown; did you mean resnet5?"):
        models.build(ModelConfig(name="resnet51"), 10)


def test_saved_weights_with_a_new_head(tmp_path: Path) -> None:
    """Weights of another number of classes are taken over, all but the head."""
    torch.manual_seed(1)
    donor = zoo.resnet18(num_classes=5)
    path = tmp_path / "donor.pth"
    torch.save({"state_dict": {f"module.{key}": value for key, value in donor.state_dict().items()}}, path)
    network = models.build(ModelConfig(name="resnet18", weights=str(path)), 7)
    assert torch.equal(network.conv1.weight, donor.conv1.weight)  # type: ignore[union-attr, arg-type]
    assert network.fc.weight.shape == (7, 512)  # type: ignore[union-attr]


def test_a_run_of_ours_gives_its_weights(tmp_path: Path) -> None:
    """A checkpoint of ours gives weights, the head too where the classes are the same."""
    donor = models.build(ModelConfig(name="small"), 4)
    record = checkpoint.save(tmp_path, {"model": donor.state_dict()}, step=1, epoch=1, top1=None, keep_last=2)
    network = models.build(ModelConfig(name="small", weights=str(record.path)), 4)
    for key, value in donor.state_dict().items():
        assert torch.equal(network.state_dict()[key], value)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    """The error says what does not fit, the first five and how many more."""
    path = tmp_path / "donor.pth"
    torch.save(zoo.resnet34(num_classes=7).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"does not fit model\.name=resnet18: .* is not expected; .* and \d+ more"):
        models.build(ModelConfig(name="resnet18", weights=str(path)), 7)


def test_a_missing_file_is_named() -> None:
    """A path that does not exist is an error with the way out."""
    with pytest.raises(CheckpointError, match=r"model\.weights=.*none\.pth: no such file; use null, DEFAULT or a path"):
        models.build(ModelConfig(name="small", weights="none.pth"), 7)


def test_published_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a network the error says what to do instead."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with pytest.raises(ConfigError, match=r"model\.weights=DEFAULT: the weights of resnet18 cannot be fetched \(no route\)"):
        models.build(ModelConfig(name="resnet18", weights="DEFAULT"), 7)


def test_published_weights_are_taken_over_with_a_new_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published weights fill the body, also of networks with auxiliary heads; the head is new."""
    for name in ("resnet18", "googlenet"):
        published = zoo.get_model(
            name, weights=None, num_classes=1000, **({"init_weights": False} if name != "resnet18" else {})
        )
        monkeypatch.setattr("torch.hub.load_state_dict_from_url", lambda *_, p=published, **__: p.state_dict())
        monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, p=published, **__: p.state_dict())
        network = models.build(ModelConfig(name=name, weights="DEFAULT"), 7)
        assert network.fc.out_features == 7
        first = next(iter(published.state_dict()))
        assert torch.equal(network.state_dict()[first], published.state_dict()[first])
