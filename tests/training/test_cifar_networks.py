"""CIFAR's networks and recipes beside the code that published them.

The sources are fetched, never kept here: WELLFED_REFERENCES names a folder that holds checkouts of
akamaster/pytorch_resnet_cifar10, kuangliu/pytorch-cifar, uoguelph-mlrg/Cutout and
davidcpage/cifar10-fast. Without it the numbers that they gave are compared.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from harness.config import Config, ModelConfig
from harness.runtime.distributed import World
from harness.training import models
from harness.training.state import TrainState, make_state

Composed = Callable[..., Config]
ALONE = World(0, 1, 0, 1, torch.device("cpu"))

# number of parameters of each shape, printed from the four sources
SHAPES = {
    "resnet20_cifar": {
        (16, 3, 3, 3): 1, (16, 16, 3, 3): 6, (32, 16, 3, 3): 1, (32, 32, 3, 3): 5,
        (64, 32, 3, 3): 1, (64, 64, 3, 3): 5, (16,): 14, (32,): 12, (64,): 12, (10, 64): 1,
        (10,): 1,
    },
    "resnet18_cifar": {
        (64, 3, 3, 3): 1, (64, 64, 3, 3): 4, (128, 64, 3, 3): 1, (128, 128, 3, 3): 3,
        (128, 64, 1, 1): 1, (256, 128, 3, 3): 1, (256, 256, 3, 3): 3, (256, 128, 1, 1): 1,
        (512, 256, 3, 3): 1, (512, 512, 3, 3): 3, (512, 256, 1, 1): 1, (64,): 10, (128,): 10,
        (256,): 10, (512,): 10, (10, 512): 1, (10,): 1,
    },
    "resnet9_cifar": {
        (64, 3, 3, 3): 1, (128, 64, 3, 3): 1, (128, 128, 3, 3): 2, (256, 128, 3, 3): 1,
        (512, 256, 3, 3): 1, (512, 512, 3, 3): 2, (64,): 2, (128,): 6, (256,): 2, (512,): 6,
        (10, 512): 1,
    },
}  # fmt: skip
# by experiment: updates in an epoch of 50,000 images, weight decay, and the rates of some updates
# from the sources' schedulers
RATES = {
    "cifar10_resnet20": (391, 1e-4, {0: 0.1, 39099: 0.1, 39100: 0.01, 58650: 0.001, 78199: 0.001}),
    "cifar10_best": (391, 5e-4, {0: 0.1, 23459: 0.1, 23460: 0.02, 46920: 0.004, 62560: 0.0008}),
    "cifar10_fast": (
        97,
        5e-4,
        {0: 0.4 / 485, 96: 0.08, 484: 0.4, 485: 0.4 - 0.4 / 1843, 2327: 0.0},
    ),
}


def state_of(composed: Composed, experiment: str) -> tuple[TrainState, int]:
    """The state of an experiment before its first update on CIFAR-10, and its updates in all."""
    config = composed(f"experiment={experiment}")
    images = 50_000 / config.loader.batch_size
    steps = math.floor(images) if config.loader.drop_last else math.ceil(images)
    return make_state(config, 10, ALONE, steps), steps * config.trainer.epochs


def rates(state: TrainState, updates: Iterable[int]) -> list[float]:
    """The learning rate of every parameter in some updates."""
    (base,), factor = {*state.schedule.base_lrs}, state.schedule.factor
    return [base * factor(number) for number in updates]


def decay(state: TrainState) -> float:
    """The weight decay of every parameter."""
    groups = [group for group in state.optimizer.param_groups if group["params"]]
    assert sum(len(group["params"]) for group in groups) == len([*state.network.parameters()])
    (found,) = {group["weight_decay"] for group in groups}
    return float(found)


@pytest.mark.parametrize("name", SHAPES)
def test_layers_are_those_of_the_source(name: str) -> None:
    """As many parameters of each shape."""
    network = models.build(ModelConfig(name=name), 10, image_size=32)
    assert Counter(tuple(p.shape) for p in network.parameters()) == SHAPES[name]


@pytest.mark.parametrize("name", RATES)
def test_rates_are_those_of_the_source(composed: Composed, name: str) -> None:
    """At the first update, at the last, and around each bend; weight decay is on everything."""
    steps, weight_decay, known = RATES[name]
    state, _ = state_of(composed, name)
    assert (state.steps_per_epoch, decay(state)) == (steps, weight_decay)
    assert rates(state, known) == pytest.approx([*known.values()], abs=1e-12)


REFERENCES = os.environ.get("WELLFED_REFERENCES", "")
fetched = pytest.mark.skipif(not REFERENCES, reason="WELLFED_REFERENCES names no checkouts")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Imports a module of a checkout: its folder below REFERENCES, and the module's name."""
    before = {*sys.modules}
    # for its tables of figures alone
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))

    def load(folder: str, name: str) -> Any:
        monkeypatch.syspath_prepend(str(Path(REFERENCES) / folder))
        sys.modules.pop(name, None)
        return import_module(name)

    yield load
    for name in {*sys.modules} - before:
        del sys.modules[name]


def lived(network: nn.Module, *given: Any) -> nn.Module:
    """The network after two passes, so that its norms have statistics of their own."""
    with torch.no_grad():
        for _ in range(2):
            network(*given)
    return network.eval()


def network_of(
    source: Callable[[str, str], Any], name: str, images: torch.Tensor, folder: Path
) -> tuple[str, nn.Module, Path]:
    """Our name of a source's network, that network, and a file with its weights."""
    path = folder / "weights.pth"
    if name == "davidcpage":
        graph = source("cifar10-fast", "torch_backend").Network(
            source("cifar10-fast", "dawn_utils").net()
        )
        theirs = lived(graph, {"input": images})
        own = models.build(ModelConfig(name="resnet9_cifar"), 10, image_size=32).state_dict()
        # its names are of its own kind
        torch.save(dict(zip(own, theirs.state_dict().values(), strict=True)), path)
        return "resnet9_cifar", theirs, path
    if name == "akamaster":
        theirs = source("pytorch_resnet_cifar10", "resnet").resnet20().eval()
        (path,) = Path(REFERENCES).glob("pytorch_resnet_cifar10/pretrained_models/resnet20-*")
        saved = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
        theirs.load_state_dict({k.removeprefix("module."): v for k, v in saved.items()})
        return "resnet20_cifar", theirs, path
    place = {"kuangliu": "pytorch-cifar/models", "Cutout": "Cutout/model"}[name]
    theirs = lived(source(place, "resnet").ResNet18(), images)
    names = {"shortcut": "downsample", "linear": "fc"}
    saved = {
        ".".join(names.get(part, part) for part in key.split(".")): value
        for key, value in theirs.state_dict().items()
    }
    torch.save(saved, path)
    return "resnet18_cifar", theirs, path


@fetched
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["akamaster", "kuangliu", "Cutout", "davidcpage"])
def test_logits_are_those_of_the_source(
    source: Callable[[str, str], Any], name: str, tmp_path: Path
) -> None:
    """To 1e-5, with its weights from a file; akamaster's are those that it trained."""
    torch.manual_seed(0)
    images = torch.randn(64, 3, 32, 32)
    ours, theirs, path = network_of(source, name, images, tmp_path)
    network = models.build(ModelConfig(name=ours, weights=str(path)), 10, image_size=32)
    both = network.eval(), theirs
    one, two = (sum(p.numel() for p in each.parameters()) for each in both)
    assert one == two
    with torch.no_grad():
        expected = theirs({"input": images})["logits"] if name == "davidcpage" else theirs(images)
        found = network(images)
    print(name, one, "parameters, largest difference", float((found - expected).abs().max()))
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@fetched
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RATES)
def test_every_rate_is_the_source_s(
    source: Callable[[str, str], Any], composed: Composed, name: str
) -> None:
    """For each update of the whole recipe, with the source's own arguments and schedulers."""
    state, updates = state_of(composed, name)
    steps = state.steps_per_epoch
    if name == "cifar10_fast":
        schedule = source("cifar10-fast", "core").PiecewiseLinear([0, 5, 24], [0, 0.4, 0])
        # dawn.py adds the losses of 512 images up, with a 512th of the rate and 512 times the decay
        weight_decay = 5e-4
        theirs = [schedule(number / steps) for number in range(1, updates + 1)]
    else:
        # train.py of Cutout, with its scheduler's line for torch since 1.4
        rate, weight_decay, milestones, gamma, epochs = 0.1, 5e-4, [60, 120, 160], 0.2, 200
        if name == "cifar10_resnet20":
            a = source("pytorch_resnet_cifar10", "trainer").parser.parse_args([])
            rate, weight_decay, epochs = a.lr, a.weight_decay, a.epochs
            milestones, gamma = [100, 150], 0.1
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), rate)
        scheduler = MultiStepLR(optimizer, milestones, gamma)
        theirs = []
        for _ in range(epochs):
            theirs += [optimizer.param_groups[0]["lr"]] * steps
            optimizer.step()
            scheduler.step()
    assert decay(state) == weight_decay
    assert rates(state, range(updates)) == pytest.approx(theirs, rel=0, abs=1e-12)
