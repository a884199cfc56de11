"""What the settings refuse, and in which words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import trained
from hydra import compose
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from harness import config as schema
from harness.cli.compose import cli_overrides, help_text, register
from harness.config import Config, ConfigError
from harness.runtime.errors import described

ROOT = Path(__file__).parents[1]

BAD = [
    ("optim.lrr=0.1", "optim.lrr"),
    ("optim.lr=", "optim.lr"),
    ("optim.lr=nan", "optim.lr=nan"),
    ("optim.lr=-1", "optim.lr=-1.0"),
    ("optim.lr=abc", "optim.lr"),
    ("optim.lr=[1,2]", "optim.lr"),
    ("optim.lr=${oc.env:NOPE}", "optim.lr"),
    ("optim.lr=${foo:1}", "optim.lr"),
    ("optim.betas=[0.9,1.0]", "optim.betas=[0.9,1.0]"),
    ("optim.nesterov=true optim.momentum=0", "optim.nesterov=true"),
    ("optim.name=RMSprop optim.eps=0.1", "optim.eps=0.1"),
    ("optim=adamw optim.momentum=0.5", "optim.momentum=0.5"),
    ("optim.clip_norm=0", "optim.clip_norm=0.0"),
    ("optim=adamm", "optim=adamm"),
    ("optim.loss=mse", "optim.loss"),
    ("trainer.epochs=2.5", "trainer.epochs"),
    ("trainer.epochs=true", "trainer.epochs"),
    ("trainer.epochs=null", "trainer.epochs"),
    ("trainer.epochs=0", "trainer.epochs=0"),
    ("trainer.precision=fp64", "trainer.precision"),
    ("loader.batch_size=0", "loader.batch_size=0"),
    ("loader.num_workers=-1", "loader.num_workers=-1"),
    ("loader.num_workers=0 loader.prefetch_factor=4", "loader.prefetch_factor=4"),
    ("loader.num_workers=0 loader.persistent_workers=true", "loader.persistent_workers=true"),
    ("loader.val.num_workers=0 loader.val.prefetch_factor=2", "loader.val.prefetch_factor=2"),
    ("loader.num_workers=0 loader.val.prefetch_factor=2", "loader.val.prefetch_factor=2"),
    ("loader.prefetch_factor=0", "loader.prefetch_factor=0"),
    ("loader.val.prefetch_factor=9223372036854775808", "loader.val.prefetch_factor"),
    ("loader.pin_memory=maybe", "loader.pin_memory"),
    ("loader.backend=carrier_pigeon", "loader.backend"),
    ("loader.backend=auto", "loader.backend=auto"),
    ("loader.backend=auto loader.autotune=true tuner=grid", "loader.backend=auto"),
    ("tuner.live=true", "tuner.live=true"),
    ("loader.autotune=true tuner=grid tuner.live=true", "tuner.live=true"),
    ("loader.backend=arrays loader.num_workers=2", "loader.num_workers=2"),
    ("loader.backend=arrays loader.val.num_workers=1", "loader.val.num_workers=1"),
    ("data.balance=1.5", "data.balance=1.5"),
    ("data.fraction=0", "data.fraction=0.0"),
    ("data=fake data.fraction=0.5", "data.fraction=0.5"),
    ("optim.class_weights=even", "optim.class_weights=even"),
    ("optim.class_weights=[]", "optim.class_weights=[]"),
    ("optim.class_weights=[1,[2]]", "optim.class_weights=[1,[2]]"),
    ("optim.class_weights={a:1}", "optim.class_weights="),
    ("optim.class_weights=[1,0]", "optim.class_weights=[1,0]"),
    ("data=fake optim.class_weights=balanced", "optim.class_weights=balanced"),
    ("watch.wandb=online mode=verify", "watch.wandb=online"),
    ("watch.wandb_project=x", "watch.wandb_project=x"),
    ("data.balance=0.5 optim.class_weights=balanced", "optim.class_weights=balanced"),
    ("data.cache=tape", "data.cache"),
    ("data.cache_gb=2", "data.cache_gb=2.0"),
    ("augment.color_jitter=[0.4,0.4,0.4]", "augment.color_jitter=[0.4,0.4,0.4]"),
    ("augment.color_jitter=[0.4,0.4,0.4,0.6]", "augment.color_jitter=[0.4,0.4,0.4,0.6]"),
    ("augment.rand_augment_magnitude=3", "augment.rand_augment_magnitude=3"),
    ("augment.auto=three augment.rand_augment_magnitude=3", "augment.rand_augment_magnitude=3"),
    ("augment.auto=rand augment.rand_augment=2", "augment.rand_augment=2"),
    ("augment.auto=trivial augment.rand_augment=1", "augment.rand_augment=1"),
    ("augment.auto=off", "augment.auto"),
    ("augment.rotate=181", "augment.rotate=181.0"),
    ("loader=fast", "loader=fast"),
    ("loader.timeout_s=-1", "loader.timeout_s=-1.0"),
    ("loader.drop_last=false dist=spawn", "loader.drop_last=false"),
    ("+loader.foo=1", "loader.foo"),
    ("+foo=1", "foo"),
    ("model._target_=os.system", "model._target_"),
    ("mode=training", "mode"),
    ("mode=predict resume=x", "mode=predict"),
    ("mode=predict data.root=x", "mode=predict"),
    ("mode=predict model.weights=DEFAULT model=resnet18 data.root=x", "mode=predict"),
    ("mode=export resume=x dist=spawn", "mode=export"),
    ("mode=export resume=x data.cache=ram", "data.cache=ram"),
    ("mode=predict resume=x data.root=x data.on_error=skip", "data.on_error=skip"),
    ("mode=evaluate", "mode=evaluate"),
    ("mode=evaluate resume=x loader.autotune=true", "loader.autotune=true"),
    ("data=fake loader.autotune=true", "loader.autotune=true"),
    ("mode=diagnose resume=x", "resume=x"),
    ("mode=diagnose data=fake", "mode=diagnose"),
    ("augment.scale=[0.5,0.1]", "augment.scale=[0.5,0.1]"),
    ("augment.hflip=1.5", "augment.hflip=1.5"),
    ("augment.pad=2", "augment.pad=2"),
    ("profile.steps=", "profile.steps="),
    ("data=cifar11", "data=cifar11"),
    ("data.mean=[0.5,0.5]", "data.mean=[0.5,0.5]"),
    ("optim.betas=\\\\${seed}", "optim.betas=0"),
    ("data.background=[1,{x:1},2]", "data.background="),
    ("data.image_size=4", "data.image_size=4"),
    ("data.eval_resize=32", "data.eval_resize=32"),
    ("data.split_fraction=1", "data.split_fraction=1.0"),
    ("schedule.warmup_epochs=100", "schedule.warmup_epochs=100.0"),
    ("schedule.milestones=[160,120]", "schedule.milestones=[160,120]"),
    ("dist.nprocs=2", "dist.nprocs=2"),
    ("seed=-1", "seed=-1"),
    ("run.name=../x", "run.name=../x"),
    ("run.name=", "run.name="),
    ("profile.steps=20-10", "profile.steps=20-10"),
    ("watch.sample_s=0", "watch.sample_s=0.0"),
    ("checkpoint.keep_last=1", "checkpoint.keep_last=1"),
    ("experiment=nope", "experiment=nope"),
    ("notakey", "notakey"),
    (f"optim.lr={400 * '9'}", "optim.lr"),
    (f"seed={400 * '9'}", f"seed={400 * '9'}"),
]


@pytest.mark.parametrize(("overrides", "text"), BAD, ids=[overrides for overrides, _ in BAD])
def test_a_bad_value_is_refused_in_one_line(
    composed: Callable[..., Config], overrides: str, text: str
) -> None:
    """Each is refused as a user's error, in one line that names the setting."""
    # whatever library refuses, the user sees one line
    with pytest.raises(Exception) as caught:  # noqa: PT011
        composed(*overrides.split())
    known = described(caught.value)
    assert known is not None, caught.value
    line, code = known
    assert text in line
    assert code == 2
    assert "\n" not in line


def test_settings_survive_a_round_trip(composed: Callable[..., Config]) -> None:
    """A config as plain values loads back equal: that is how a checkpoint keeps it."""
    more = ("loader.num_workers=2", "optim.class_weights=[1,2.5]")
    config = composed("data=cifar10", "trainer.precision=bf16", *more)
    assert config.optim.class_weights == (1, 2.5)
    assert schema.from_plain(schema.to_plain(config)) == config


def test_a_group_on_the_command_line_beats_the_data_sets_own(
    composed: Callable[..., Config],
) -> None:
    """data=cifar10 brings a crop and a network along, unless the user names others."""
    config = composed("data=cifar10")
    assert (config.augment.crop.name, config.model.name) == ("pad", "resnet20_cifar")
    config = composed("data=cifar10", "augment=center", "model=small")
    assert (config.augment.crop.name, config.model.name) == ("center", "small")
    config = composed("experiment=cifar10_fast", "data=cifar100")
    assert (config.data.name, config.model.name) == ("cifar100", "resnet9_cifar")


def test_every_setting_has_a_sentence() -> None:
    """The help page can say of every setting what it is."""
    for path, _, declared in schema.walk(Config()):
        assert declared.metadata["text"].endswith("."), path
        assert f"  {path}=" in help_text(Config())


def test_config_error_is_a_value_error() -> None:
    """The library's users catch ValueError."""
    assert issubclass(ConfigError, ValueError)


def test_what_was_typed_holds_other_places_of_settings(tmp_path: Path) -> None:
    """Overrides as they were, after the flags without which they mean something else."""

    def chosen(main: str, name: str, **more: str) -> Any:
        sources = [
            SimpleNamespace(provider=provider, path=path)
            for provider, path in {"main": main, **more}.items()
        ]
        runtime = SimpleNamespace(config_sources=sources)
        job = SimpleNamespace(config_name=name)
        overrides = OmegaConf.create({"task": ["data=digits"]})
        return SimpleNamespace(runtime=runtime, job=job, overrides=overrides)

    assert cli_overrides(chosen(str(ROOT / "conf"), "config")) == ("data=digits",)
    found = cli_overrides(chosen("/runs/1/.hydra", "other", **{"command-line": "/mine"}))
    assert found == (
        "--config-path=/runs/1/.hydra",
        "--config-name=other",
        "--config-dir=/mine",
        "data=digits",
    )


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        pytest.param(1, (), id="one GPU"),
        pytest.param(8, ("optim.lr=0.8", "schedule.warmup_epochs=5"), id="eight"),
        pytest.param(
            1, ("loader.batch_size=128", "trainer.accumulate_steps=2"), id="one with little memory"
        ),
    ],
)
def test_imagenet_s_rate_is_the_same_for_each_image(
    composed: Callable[..., Config], gpus: int, more: tuple[str, ...]
) -> None:
    """What the experiment says to type keeps 0.1 for 256 images; large batches warm up."""
    said = (ROOT / "conf/experiment/imagenet_resnet50.yaml").read_text()
    assert " ".join(more) in said
    config = composed("experiment=imagenet_resnet50", "data.root=x", *more)
    images = config.loader.batch_size * config.trainer.accumulate_steps * gpus
    assert config.optim.lr == pytest.approx(0.1 * images / 256)
    assert (config.schedule.warmup_epochs > 0) is (gpus > 1)


@pytest.mark.parametrize(
    ("overrides", "direction"),
    [
        (["hydra/sweeper=seeker"], "maximize"),
        (["hydra/sweeper='seeker'"], "maximize"),
        (["+search=wide"], "maximize"),
        (["+search=least"], "minimize"),
        (["+search=wide", "hydra.sweeper.direction=minimize"], "minimize"),
    ],
)
@pytest.mark.usefixtures("composed")
def test_a_sweeper_looks_for_the_highest(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], direction: str
) -> None:
    """Wherever a sweeper is chosen it maximizes top-1, unless another direction is set."""
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    store.store(group="hydra/sweeper", name="seeker", node={"direction": "minimize"})
    wide = {"defaults": [{"override /hydra/sweeper": "seeker"}]}
    store.store(group="search", name="wide", node=wide, package="_global_")
    least = {**wide, "hydra": {"sweeper": {"direction": "minimize"}}}
    store.store(group="search", name="least", node=least, package="_global_")
    register()
    found = compose("config", overrides=overrides, return_hydra_config=True)
    assert found.hydra.sweeper.direction == direction


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "single"),
        ({"WORLD_SIZE": "2"}, "torchrun"),
        ({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"WORLD_SIZE": "1", "RANK": "1"}, "single"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}, "single"),
    ],
)
def test_torchrun_is_seen(tmp_path: Path, variables: dict[str, str], launcher: str) -> None:
    """``dist`` is torchrun by itself in torchrun's processes, not by a variable that was left."""
    done = trained(tmp_path, "--cfg", "job", "--package", "dist.name", **variables)
    assert done.stdout == f"DistName.{launcher}\n"
