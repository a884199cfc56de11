"""Networks by name and with weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import commit
from torch import nn
from torchvision import models as zoo
from torchvision.models.regnet import BlockParams

from harness.config import OURS, ConfigError, ModelConfig
from harness.runtime.errors import CheckpointError
from harness.training import models


@pytest.mark.parametrize(
    "name", ["small", "resnet18", "mobilenet_v3_small", "squeezenet1_1", "vit_b_16"]
)
def test_a_head_for_the_classes(name: str) -> None:
    """Every network gives one logit a class."""
    network = models.build(ModelConfig(name=name), 7, image_size=64).eval()
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OURS, *zoo.list_models(module=zoo)])
def test_every_name_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that is offered can be built for other classes (on the meta device)."""
    make = BlockParams.from_init_params

    # the regnets read numbers out of tensors
    def on_cpu(**arguments: Any) -> BlockParams:
        with torch.device("cpu"):
            return make(**arguments)

    monkeypatch.setattr(BlockParams, "from_init_params", on_cpu)
    with torch.device("meta"):
        network = models.build(ModelConfig(name=name), 7, image_size=224)
    assert models.head_keys(network) <= network.state_dict().keys()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_auxiliary_heads_give_one_tensor(name: str) -> None:
    """In training they have no auxiliary outputs."""
    network = models.build(ModelConfig(name=name), 3, image_size=96)
    assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


def test_saved_weights_with_a_new_head(tmp_path: Path) -> None:
    """Weights of another number of classes are taken over, all but the head."""
    torch.manual_seed(1)
    donor = zoo.resnet18(num_classes=5)
    path = tmp_path / "donor.pth"
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in donor.state_dict().items()}}, path
    )
    network = models.build(ModelConfig(name="resnet18", weights=str(path)), 7, image_size=64)
    assert torch.equal(network.get_parameter("conv1.weight"), donor.conv1.weight)
    assert network.get_parameter("fc.weight").shape == (7, 512)


def test_a_run_of_ours_gives_its_weights(tmp_path: Path) -> None:
    """A checkpoint of ours gives weights, the head too where the classes are the same."""
    donor = models.build(ModelConfig(name="small"), 4, image_size=64)
    state = {"model": donor.state_dict(), "step": 1, "epoch": 1}
    record = commit(tmp_path, state)
    network = models.build(ModelConfig(name="small", weights=str(record.path)), 4, image_size=64)
    for key, value in donor.state_dict().items():
        assert torch.equal(network.state_dict()[key], value)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    """The error says what does not fit, the first five and how many more."""
    path = tmp_path / "donor.pth"
    torch.save(zoo.resnet34(num_classes=7).state_dict(), path)
    with pytest.raises(
        CheckpointError,
        match=r"does not fit model\.name=resnet18 for .*=64: .* is not expected; .* and \d+ more",
    ):
        models.build(ModelConfig(name="resnet18", weights=str(path)), 7, image_size=64)


def test_a_missing_file_is_named() -> None:
    """A path that does not exist by now: what is typed is checked before."""
    with pytest.raises(CheckpointError, match=r"^none\.pth .*: No such file or directory$"):
        models.build(ModelConfig(name="small", weights="none.pth"), 7, image_size=64)


def test_published_weights_that_cannot_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a network the error says what to do instead."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with pytest.raises(
        ConfigError,
        match=r"model\.weights=DEFAULT: cannot be loaded for resnet18: OSError: no route",
    ):
        models.build(ModelConfig(name="resnet18", weights="DEFAULT"), 7, image_size=64)


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], nn.Module]:
    """Makes a network whose weights are then the published ones, under their old keys."""

    def make(name: str) -> nn.Module:
        extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        donor: nn.Module = zoo.get_model(name, weights=None, **extra)
        weights: dict[str, torch.Tensor] = donor.state_dict()
        # written by a torch that allowed dots in names and did not count batches
        if name.startswith("densenet"):
            old = {
                re.sub(r"(denselayer\d+\.(?:norm|conv))([12]\.)", r"\1.\2", key): value
                for key, value in weights.items()
            }
            weights = {
                key: value for key, value in old.items() if not key.endswith("num_batches_tracked")
            }
        monkeypatch.setattr(
            "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: weights
        )
        return donor

    return make


@pytest.mark.parametrize(
    "name", ["resnet18", "densenet121", "mnasnet0_5", "googlenet", "inception_v3"]
)
def test_published_weights_are_taken_over_with_a_new_head(
    name: str, publish: Callable[[str], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole body is the published one; a line says that the head is new."""
    published = publish(name).state_dict()
    network = models.build(ModelConfig(name=name, weights="DEFAULT"), 7, image_size=64)
    head = models.head_keys(network)
    for key, value in network.state_dict().items():
        assert key in head or torch.equal(value, published[key]), key
    assert {network.state_dict()[key].shape[0] for key in head} == {7}
    assert "new head for 7 classes" in capsys.readouterr().out


def test_the_published_head_is_taken_where_it_fits(
    publish: Callable[[str], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    """For 1000 classes the network is the published one, head and all."""
    published = publish("resnet18").state_dict()
    network = models.build(ModelConfig(name="resnet18", weights="DEFAULT"), 1000, image_size=64)
    assert all(torch.equal(value, published[key]) for key, value in network.state_dict().items())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("weights", [None, "DEFAULT"], ids=["random", "published"])
def test_googlenet_sees_what_its_weights_were_trained_on(
    weights: str | None, publish: Callable[[str], nn.Module]
) -> None:
    """The published weights want TensorFlow's normalization; random ones do not."""
    publish("googlenet")
    network = models.build(ModelConfig(name="googlenet", weights=weights), 7, image_size=64)
    assert network.transform_input is (weights == "DEFAULT")


def test_published_weights_of_another_form_are_refused(publish: Callable[[str], nn.Module]) -> None:
    """Weights that do not fit are an error, never a network left random."""
    publish("resnet34")
    with pytest.raises(
        ConfigError,
        match=r"model\.weights=DEFAULT: cannot be .*resnet18: .*Error\(s\) in loading state_dict",
    ):
        models.build(ModelConfig(name="resnet18", weights="DEFAULT"), 7, image_size=64)


def test_saved_weights_of_a_mnasnet(tmp_path: Path) -> None:
    """A file without the version that torchvision's mnasnets want is taken all the same."""
    donor = models.build(ModelConfig(name="mnasnet0_5"), 7, image_size=64)
    path = tmp_path / "donor.pth"
    torch.save(dict(donor.state_dict()), path)
    network = models.build(ModelConfig(name="mnasnet0_5", weights=str(path)), 7, image_size=64)
    assert all(
        torch.equal(value, donor.state_dict()[key]) for key, value in network.state_dict().items()
    )


def test_an_image_size_that_a_vit_cannot_take() -> None:
    """The error names the network, the setting and the value."""
    with pytest.raises(
        ConfigError,
        match=r"^model\.name=vit_b_32: for data\.image_size=80 it failed with .*patch size",
    ):
        models.build(ModelConfig(name="vit_b_32"), 7, image_size=80)


def test_an_image_size_that_the_weights_of_a_vit_are_not_for(
    publish: Callable[[str], nn.Module],
) -> None:
    """The error names the weights, the setting and what differs."""
    publish("vit_b_32")
    with pytest.raises(
        CheckpointError,
        match=(
            r"^model\.weights=DEFAULT: does not fit model\.name=vit_b_32 for "
            r"data\.image_size=64: encoder\.pos_embedding is \[1, 50, 768\], not \[1, 5, 768\]$"
        ),
    ):
        models.build(ModelConfig(name="vit_b_32", weights="DEFAULT"), 7, image_size=64)


OWN = """
import torch
from torch import nn

def build(num_classes, image_size):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.Dropout(0.5), nn.Linear(4, num_classes))

def keyed(num_classes):
    return {"net": 1}

def eight(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8))

class Two(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.LazyLinear(num_classes)

    def forward(self, images):
        return self.head(images.flatten(1)), None

def narrow(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(5, num_classes))

def empty(num_classes):
    return nn.Flatten()

class Kept(nn.Linear):
    def get_extra_state(self):
        return object()

def kept(num_classes):
    return nn.Sequential(nn.Flatten(), Kept(192, num_classes))

def unused(num_classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))
    network[0].spare = nn.LazyLinear(3)
    return network
"""


def test_a_network_of_the_users_own(write_module: Callable[[str, str], None]) -> None:
    """Its lazy layers have their sizes, and it is ready to train."""
    write_module("mine", OWN)
    network = models.build(ModelConfig(name="mine:build"), 7, image_size=8)
    assert [tuple(weight.shape) for weight in network.parameters()] == [
        (4, 192),
        (4,),
        (7, 4),
        (7,),
    ]
    assert network.training


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("keyed", "returned dict, not a torch.nn.Module"),
        ("eight", r"the network returns torch.float32 \[2, 8\] for 2 images; .* \[2, 7\], .*"),
        ("Two", r"the network returns tuple for 2 images; .*"),
        (
            "narrow",
            "for data.image_size=8 it failed with RuntimeError: .*mat1 and mat2 shapes .*",
        ),
        ("empty", "the network has no parameters to train"),
        ("kept", "1._extra_state in its state_dict is not a dense tensor, .*"),
        ("unused", "0.spare.weight in its state_dict is not a dense tensor, .*"),
    ],
)
def test_a_network_that_cannot_be_trained_is_one_line(
    write_module: Callable[[str, str], None], name: str, error: str
) -> None:
    """It names the function as typed."""
    write_module("mine", OWN)
    with pytest.raises(ConfigError, match=f"^model.name=mine:{name}: {error}$"):
        models.build(ModelConfig(name=f"mine:{name}"), 7, image_size=8)


@pytest.mark.parametrize("size", [(16, 16), (28, 28), (48, 64), (96, 96)], ids=str)
def test_small_takes_images_of_any_size(size: tuple[int, int]) -> None:
    """From 16 pixels on, with fewer than half a million parameters, each of which learns."""
    network = models.small(7)
    logits = network(torch.randn(2, 3, *size))
    assert logits.shape == (2, 7)
    logits.logsumexp(1).sum().backward()
    assert sum(p.numel() for p in network.parameters()) < 500_000
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
