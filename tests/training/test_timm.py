"""Networks of timm's: names, weights, images, and a step of many families.

timm has a dependency group of its own: ``uv run --group timm pytest -m "slow or not slow"
tests/training/test_timm.py``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import trained
from pictures import NAMES, photograph

timm = pytest.importorskip("timm", reason="needs timm: uv sync --group timm")

from huggingface_hub import constants
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.optim import param_groups_layer_decay

from harness import config as schema
from harness.config import Config, ConfigError, ModelConfig
from harness.data.datasets import as_evaluated
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.runtime.seeding import SampleRng
from harness.training import models, optimizer, resume
from harness.training.evaluate import evaluate
from harness.training.optimizer import depths
from harness.training.state import make_state
from harness.training.step import Step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Composed = Callable[..., Config]
CPU = World(0, 1, 0, 1, torch.device("cpu"))
# a few layers, for images of 160 pixels
SMALL = "timm/test_resnet.r160_in1k"


def test_names_are_timms_own() -> None:
    """The names read from its source are those that it lists."""
    assert schema.classifiers("timm") == sorted(f"timm/{name}" for name in timm.list_models())


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [
        (
            ModelConfig(name="timm/resnet19"),
            64,
            "model.name=timm/resnet19: unknown; did you mean timm/resnet18",
        ),
        (
            ModelConfig(name="timm/resnet18.a1_in2k"),
            64,
            "model.name=timm/resnet18.a1_in2k: no such weights: ",
        ),
        (
            ModelConfig(name="timm/maxvit_pico_rw_256"),
            50,
            "model.name=timm/maxvit_pico_rw_256: for data.image_size=50 it failed with ",
        ),
        (
            ModelConfig(name="timm/inception_v4"),
            32,
            "model.name=timm/inception_v4: for data.image_size=32 it failed with ",
        ),
    ],
    ids=["name", "weights", "fixed size", "too small"],
)
def test_what_cannot_be_built(model: ModelConfig, size: int, message: str) -> None:
    """The line names the setting, and what to use."""
    with pytest.raises(ConfigError, match=f"^{message}"):
        models.build(model, 7, image_size=size)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file as timm publishes it."""
    torch.manual_seed(3)
    made = timm.create_model(SMALL.removeprefix("timm/"))
    path = tmp_path / "model.safetensors"
    save_file(made.state_dict(), path)
    return path


@pytest.fixture
def hub(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's with that file, and no way to the hub."""
    model = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k"
    place = model / "snapshots" / ("0" * 40)
    place.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    shutil.copy(weights, place)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(model.parent))
    return model.parent


def test_weights_are_those_of_the_hubs_cache(hub: Path, weights: Path) -> None:
    """All but the head, which is new for other classes; all of them for as many."""
    donor = timm.create_model(SMALL.removeprefix("timm/"), checkpoint_path=str(weights))
    for classes in (7, 1000):
        made = models.build(ModelConfig(name=SMALL, weights="DEFAULT"), classes, image_size=96)
        head = models.head_keys(made)
        assert head == {"fc.weight", "fc.bias"}
        state = made.state_dict()
        for key, value in donor.state_dict().items():
            if classes == 7 and key in head:
                assert state[key].shape[0] == 7
            else:
                assert torch.equal(state[key], value)


def test_weights_of_a_file_of_timms(weights: Path, composed: Composed) -> None:
    """As published ones, which it is: what they expect of images is followed."""
    model = ModelConfig(name=SMALL, weights=str(weights))
    donor = timm.create_model(SMALL.removeprefix("timm/"), checkpoint_path=str(weights))
    made = models.build(model, 7, image_size=96)
    assert torch.equal(made.get_parameter("conv1.0.weight"), donor.get_parameter("conv1.0.weight"))
    typed = (f"model.name={SMALL}", f"model.weights={weights}")
    data = resume.settings(composed(*typed), None, typed).data
    assert (data.image_size, data.eval_resize, data.interpolation.name) == (160, 168, "bilinear")
    assert (data.mean, data.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("kind", ["damaged", "of another network", "missing", "a pipe"])
def test_a_file_that_cannot_be_used(tmp_path: Path, weights: Path, kind: str) -> None:
    """The line names it; nothing waits."""
    name = SMALL
    if kind == "damaged":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif kind == "of another network":
        name = "timm/test_vit.r160_in1k"
    else:
        weights.unlink()
        if kind == "a pipe":
            os.mkfifo(weights)
    with pytest.raises(
        CheckpointError, match=rf"^model\.weights={weights}: cannot be loaded for {name}: "
    ):
        models.build(ModelConfig(name=name, weights=str(weights)), 7, image_size=160)


def test_weights_that_cannot_be_had(hub: Path) -> None:
    """One line with the way out."""
    shutil.rmtree(hub)
    with pytest.raises(
        ConfigError,
        match=r"^model\.weights=DEFAULT: cannot be loaded for timm/test_resnet\.r160_in1k: .*; "
        r"use null, or fetch https://huggingface\.co/timm/test_resnet\.r160_in1k/resolve/main/"
        r"model\.safetensors and pass that file$",
    ):
        models.build(ModelConfig(name=SMALL, weights="DEFAULT"), 7, image_size=96)


def test_weights_that_nobody_has_published(composed: Composed) -> None:
    """They are refused before anything is opened."""
    typed = ("model.name=timm/coatnet_0_224", "model.weights=DEFAULT")
    with pytest.raises(ConfigError, match="^model.weights=DEFAULT: .*name=timm/coatnet_0_224"):
        resume.settings(composed(*typed), None, typed)


def test_positions_go_with_the_size(tmp_path: Path) -> None:
    """A transformer's weights are brought to other images by timm's loader."""
    name = "timm/test_vit.r160_in1k"
    path = tmp_path / "model.safetensors"
    save_file(timm.create_model(name.removeprefix("timm/")).state_dict(), path)
    made = models.build(ModelConfig(name=name, weights=str(path)), 7, image_size=96)
    assert made(torch.zeros(1, 3, 96, 96)).shape == (1, 7)


# bilinear and bicubic; a share of 0.875, 0.95, 0.887, 0.9, 1.0; the last one without its sides
PUBLISHED = (
    "timm/resnet18.tv_in1k",
    SMALL,
    "timm/resnet18.a1_in1k",
    "timm/cspdarknet53.ra_in1k",
    "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "timm/mixer_b16_224.goog_in21k_ft_in1k",
    "timm/beit_base_patch16_384.in22k_ft_in22k_in1k",
    "timm/convnext_base.fb_in22k_ft_in1k_384",
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_evaluation_sees_timms_pixels(name: str, composed: Composed) -> None:
    """Within a gray level in the mean of ``timm.data.create_transform``'s, on photographs."""
    typed = (f"model.name={name}", "model.weights=DEFAULT")
    data = resume.settings(composed(*typed), None, typed).data
    facts = timm.get_pretrained_cfg(name.removeprefix("timm/")).to_dict()
    theirs = create_transform(**resolve_data_config(pretrained_cfg=facts), normalize=False)
    transform = as_evaluated(data)
    assert data.interpolation.name == facts["interpolation"]
    for picture in NAMES:
        for image in (photograph(picture), photograph(picture).rotate(90, expand=True)):
            expected = theirs(image).numpy()
            ours = np.empty((3, data.image_size, data.image_size), np.uint8)
            transform(np.array(image), SampleRng(0, 0, 0), ours)
            assert np.abs(ours.astype(int) - expected).mean() <= 0.2


def test_all_that_is_published_can_be_followed() -> None:
    """What timm says of each of its weights are settings that can be used."""
    filters = set()
    for name in timm.list_pretrained():
        size, short, _, interpolation, mean, std = models.expected(f"timm/{name}", None).values()
        assert 8 <= size <= short <= 4096 and len(mean) == len(std) == 3
        assert min(std) > 0 and max(mean) <= 1
        filters.add(interpolation)
    assert filters == {"bilinear", "bicubic"}


def test_a_run_and_its_evaluation(tmp_path: Path, weights: Path) -> None:
    """From published weights to a checkpoint, which has all that its evaluation needs."""
    small = ("data.generate.train_images=32", "data.generate.val_images=16", "loader.batch_size=8")
    run = trained(
        tmp_path,
        f"model={SMALL}",
        f"model.weights={weights}",
        "data.image_size=96",
        "trainer.epochs=1",
        "run.name=a",
        *small,
        HF_HUB_OFFLINE="1",
    )
    assert run.returncode == 0, run.stderr
    assert "data.eval_resize=101 data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]" in run.stdout
    assert "new head for 10 classes" in run.stdout
    later = trained(tmp_path, "mode=evaluate", "resume=outputs/a", *small)
    assert later.returncode == 0, later.stderr
    assert f"model.name={SMALL}" in later.stdout and "data.eval_resize=101" in later.stdout
    top1 = [re.findall(r"top-1 +([\d.]+) on 16", each.stdout)[-1] for each in (run, later)]
    assert top1[0] == top1[1]


# small networks of many of timm's modules
FAMILIES = """
    cait_xxs24_224 convmixer_768_32 densenet121 efficientformer_l1 fastvit_t8 hgnetv2_b0
    hiera_tiny_224 inception_v3 levit_128s mobilevit_xxs regnetx_002 resnetv2_18
    swin_tiny_patch4_window7_224
    test_byobnet test_convnext test_efficientnet test_nfnet test_resnet test_vit xcit_nano_12_p8_224
"""


@pytest.mark.parametrize("name", FAMILIES.split())
def test_a_family_trains_and_evaluates(name: str) -> None:
    """Its smallest network builds, makes an update and is evaluated, at its own size."""
    torch.manual_seed(0)
    name = f"timm/{name}"
    size = models._facts(name).input_size[-1]
    network = models.build(ModelConfig(name=name), 5, image_size=size)
    heads = {key: network.get_parameter(key) for key in models.head_keys(network)}
    assert heads and {len(value) for value in heads.values()} == {5}
    # for layer-wise rates and for training the head alone
    depth = optimizer.depths(network)
    assert depth.keys() == {*network.parameters()}
    assert {depth[value] for value in heads.values()} == {max(depth.values())}
    assert heads.keys().isdisjoint(optimizer.frozen_names(network, "all_but_head", name))
    before = {key: value.detach().clone() for key, value in network.named_parameters()}
    config = Config()
    step = Step(make_state(config, 0, CPU, 10, network=network), 5)
    images = torch.randn(2, 3, size, size)
    labels = torch.tensor([1, 3])
    step(images, labels)
    assert np.isfinite(step.read().loss)
    assert any(not torch.equal(value, before[key]) for key, value in network.named_parameters())
    found = evaluate(network, [(images, labels)], CPU, step.autocast)
    assert found.images == 2 and np.isfinite(found.loss)


@pytest.mark.parametrize(
    ("name", "blocks"), [("convnext_atto", 14), ("vit_tiny_patch16_224", 14), ("resnet18", 10)]
)
def test_its_blocks_are_its_own(name: str, blocks: int) -> None:
    """Layer decay goes by the blocks that timm tells: the first is the stem, the last the head."""
    network = models.build(ModelConfig(name=f"timm/{name}"), 7, image_size=224)
    found = depths(network)
    assert sorted({*found.values()}) == [*range(blocks)]
    heads = {found[network.get_parameter(key)] for key in models.head_keys(network)}
    assert heads == {blocks - 1}
    theirs = param_groups_layer_decay(network, layer_decay=0.5)
    scales = {p: group["lr_scale"] for group in theirs for p in group["params"]}
    assert scales == {p: 0.5 ** (blocks - 1 - number) for p, number in found.items()}
