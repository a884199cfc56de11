"""What a new user types by guess, and what the command line answers."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from commands import trained
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from torchvision import models as zoo

from harness import config as schema
from harness import suggestions
from harness.cli import compose, job
from harness.config import Config, ConfigError, ModelConfig
from harness.data.datasets import DATASETS, FAKE
from harness.runtime.errors import DataError, described

ROOT = Path(__file__).parents[1]
Composed = Callable[..., Config]

# what was typed in a new user's first day, and what the answer must hold
GUESSES = [
    ("--lr 0.1", "optim.lr=0.1"),
    ("--lr=0.1", "optim.lr=0.1"),
    ("--batch-size 32", "loader.batch_size=32"),
    ("--pretrained", "model.weights=DEFAULT"),
    ("--nonsense", "--nonsense"),
    ("-seed 3", "seed=3"),
    ("-j 4", "loader.num_workers=4"),
    ("lr=0.1", "optim.lr"),
    ("trainer.lr=0.1", "optim.lr"),
    ("trainer.foo=1", "trainer.foo"),
    ("trainer.max_epochs=3", "trainer.epochs"),
    ("augment.color_jitter=0.4", "augment.color_jitter"),
    ("optim.lr=0.1,0.2", "-m"),
    ("epochs=3", "trainer.epochs"),
    ("batch_size=32", "loader.batch_size"),
    ("root=/x", "data.root"),
    ("backend=x", "loader.backend or dist.backend"),
    ("model=vit_b_61", "vit_b_16"),
    ("model.name=resnet51", "resnet50, resnet18"),
    ("optim=adam", "adamw, sgd, timm; did you mean adamw?"),
    ("optim.name=adamw", "optim.nesterov=true"),
    ("loader.num_workers=auto", "loader.autotune=true"),
    ("data=mnist", "imagefolder"),
    ("data=ImageFolder", "did you mean imagefolder, imagenet?"),
    ("data.name=cifar-10", "did you mean cifar10"),
    ("wandb=true", "watch.wandb=online"),
    ("logger=wandb", "watch.wandb=online"),
    ("model.pretrained=true", "model.weights=DEFAULT"),
    ("num_classes=4", "num_classes"),
    ("data.num_classes=4", "data.num_classes"),
    ("optimizer=adamw", "optim=adamw"),
    ("data.path=/x", "data.root"),
    ("trainer.amp=true", "trainer.precision=bf16"),
    ("loader=auto", "loader.autotune=true"),
    ("output_dir=/x", "run.name=NAME"),
    ("run.dir=/x", "run.name=NAME"),
    ("mode=eval", "did you mean evaluate?"),
    ("mode=2", "train, evaluate"),
    ("loader.backend=1", "processes, threads"),
    ("hydra/launcher=nope", "basic"),
    ("data.root=a=b", "data.root=a=b"),
    ("lr", "optim.lr"),
]


def answer(composed: Composed, *arguments: str) -> tuple[str, int]:
    """The line and the exit code that refuse a command line."""
    # whatever library refuses, the user sees one line
    with pytest.raises(Exception) as caught:  # noqa: PT011
        job.check(composed(*compose.prepared(list(arguments)).overrides))
    known = described(caught.value)
    assert known is not None, caught.value
    return known


@pytest.mark.parametrize(("typed", "text"), GUESSES, ids=[typed for typed, _ in GUESSES])
def test_a_guess_is_answered_with_what_to_write(composed: Composed, typed: str, text: str) -> None:
    """A user who guesses reads in one line what to type instead."""
    line, code = answer(composed, *typed.split())
    assert text in line
    assert code == 2
    assert "\n" not in line


def test_of_many_choices_the_nearest_are_named() -> None:
    """A list of 80 networks is no answer: three of them and those that may be meant are."""
    options = [f"net{i}" for i in range(20)]
    said = suggestions.no_choice("model", "net_19", options)
    assert (
        said
        == "model=net_19: no such choice; there are 20, such as net0, net1, net2; did you mean "
        "net19, net9, net1?"
    )


@pytest.mark.parametrize("name", ["vit_b_16", "efficientnet_b0", "resnet34", "resnet50", "small"])
def test_model_takes_every_classifier_of_torchvision(composed: Composed, name: str) -> None:
    """model=NAME works for torchvision's names as for the short forms."""
    assert composed(*compose.prepared([f"model={name}"]).overrides).model.name == name


def test_model_takes_a_name_of_timms(composed: Composed) -> None:
    """As torchvision's; a dot is before the name of weights. A sweep may have several."""
    name = "timm/convnext_tiny.in12k_ft_in1k"
    assert composed(*compose.prepared([f"model={name}", "seed=1"]).overrides).model.name == name
    several = compose.prepared(["-m", f"model=small,timm/resnet18,{name}"])
    assert several.overrides == [f"model.name=small,timm/resnet18,{name}"]


def test_model_takes_names_beside_networks_of_ones_own(tmp_path: Path) -> None:
    """A file in the user's ``model/`` is a choice of the group; any other name is a network's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("name: small")
    read = compose.prepared([f"--config-dir={tmp_path}", "model=mine"])
    assert read.overrides == ["model=mine"]
    read = compose.prepared([f"--config-dir={tmp_path}", "model=resnet34"])
    assert read.overrides == ["model.name=resnet34"]


def test_timm_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the commands that install it."""
    monkeypatch.setattr(schema.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="timm: .*uv sync --extra timm"):
        schema.check_model(ModelConfig(name="timm/resnet18"))


def test_torchvisions_names_are_known_without_importing_it() -> None:
    """The names read from torchvision's source are those that it lists itself."""
    assert schema.classifiers() == sorted(zoo.list_models(module=zoo))


def test_every_data_set_has_its_values_in_conf() -> None:
    """The names that are checked early are those that can be opened."""
    assert schema.choices("data") == sorted([*DATASETS, FAKE, "own"])


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the tilde after an equals sign alone; Hydra's deletion is left alone."""
    monkeypatch.setenv("HOME", "/home/me")
    assert compose.prepared(
        ["data.root=~/x,~/y", "resume=~", "~experiment", "a=b~c", "run.name=~"]
    ).overrides == [
        "data.root=/home/me/x,/home/me/y",
        "resume=/home/me",
        "~experiment",
        "a=b~c",
        "run.name=~",
    ]


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("-m", "multirun", True),
        ("--cfg job", "cfg", "job"),
        ("--multi", "multirun", True),
        ("--config-path=/x", "config_path", "/x"),
        ("-cn x", "config_name", "x"),
    ],
)
def test_flags_of_hydra_pass(flags: str, name: str, value: object) -> None:
    """Hydra's own flags, their short forms and beginnings, amid settings."""
    read = compose.prepared(["seed=1", *flags.split(), "optim.lr=1"])
    assert (getattr(read, name), read.overrides) == (value, ["seed=1", "optim.lr=1"])


def test_weights_that_a_resumed_run_does_not_read_may_be_gone(
    composed: Composed, tmp_path: Path
) -> None:
    """A run that goes on takes its weights from its checkpoint."""
    job.check(composed(f"resume={tmp_path}", "model.weights=gone.pt"))


def test_a_name_of_a_layout_unknown_here_is_left_to_torchvision(
    composed: Composed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torchvision's names cannot be read from its source, none is refused early."""
    monkeypatch.setattr(schema, "classifiers", list)
    job.check(composed("model.name=resnet51"))


def ran(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``train.py`` in a process in which importing torch is an error."""
    (cwd / "torch.py").write_text("raise ImportError('torch was imported')")
    path = os.pathsep.join([str(cwd), str(ROOT)])
    return trained(cwd, *arguments, PYTHONPATH=path)


@pytest.mark.parametrize(
    "typed",
    ["model.name=resnet51", "data.name=cifar11", "model.weights=nope", "resume=nope", "--lr 1"],
)
def test_a_wrong_name_costs_neither_torch_nor_a_folder(tmp_path: Path, typed: str) -> None:
    """Names are checked before torch is imported and before the run's folder is made."""
    done = ran(tmp_path, *typed.split())
    assert done.returncode in (2, 4)
    assert done.stderr.startswith("error: ") and "torch was imported" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_version_is_the_projects_own(tmp_path: Path) -> None:
    """--version says wellfed's, torch's and Python's version, and imports no torch."""
    done = ran(tmp_path, "--version")
    versions = (
        f"wellfed {metadata.version('wellfed')}, torch {metadata.version('torch')}, Python "
        f"{platform.python_version()}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{versions}\n", "")


def test_help_shows_what_a_run_would_use(tmp_path: Path) -> None:
    """--help has the composed values, those of a named data set, and the choices."""
    plain = ran(tmp_path, "--help")
    cifar = ran(tmp_path, "data=cifar10", "--help")
    assert (plain.returncode, plain.stderr) == (cifar.returncode, cifar.stderr) == (0, "")
    for text in (
        "  trainer.epochs=5\n",
        "  optim.weight_decay=0.0005\n",
        "  optim.nesterov=true\n",
        "  augment.scale=[0.5,1.0]\n",
        "  data= cifar10, cifar100, digits, fake, imagefolder, imagenet, own, shapes, shards, "
        "table\n",
        (
            "  model= resnet18, resnet18_cifar, resnet20_cifar, resnet50, resnet9_cifar, small, "
            "any torchvision classifier, timm/NAME, or model.name=my_module:build\n"
        ),
        "A run writes its files to outputs/ in the current folder.\n",
    ):
        assert text in plain.stdout
    for text in ("  data.name=cifar10\n", "  data.image_size=32\n", "  augment.crop=pad ["):
        assert text in cifar.stdout


@pytest.mark.parametrize(
    "value",
    ["a=b", "Fotos (Kopie)", "C#", "名前", "it's", "$x (1)", "a, b", "a!(b)", "a\n=b", "c=\\"],
)
def test_text_that_the_grammar_reads_otherwise_can_be_typed(value: str) -> None:
    """The advice, pasted into a shell, gives Hydra the same text."""
    parser = OverridesParser.create()
    # what Hydra says of several values in place of one
    error = HydraException(f"Ambiguous value for argument 'data.root={value}'\n1. To use it")
    if value != "a, b":
        with pytest.raises(HydraException) as caught:
            parser.parse_overrides([f"data.root={value}"])
        error = caught.value
    said = suggestions.explain(error)
    assert said is not None
    advised = said.partition("as plain text, write ")[2]
    typed = subprocess.check_output(["bash", "-c", f"printf %s {advised}"], text=True)
    assert parser.parse_override(typed).value() == value


@pytest.mark.parametrize("value", ["{image: id, label: dx}", "[0.1, 0.2]"])
def test_a_value_without_quotes_is_named(value: str) -> None:
    """A shell has split it; the advice is the setting in quotes."""
    [word, *_] = f"data.columns={value}".split()
    with pytest.raises(HydraException) as caught:
        OverridesParser.create().parse_overrides([word])
    assert f"quotes: '{word} ...{value[-1]}'" in str(suggestions.explain(caught.value))


def test_an_absent_folder_is_refused_before_torch(composed: Composed, tmp_path: Path) -> None:
    """With the exit code of data; ``data=shapes`` makes its folder."""
    with pytest.raises(DataError, match="data.root="):
        job.check(composed("data=imagefolder", f"data.root={tmp_path}/absent"))
    job.check(composed("data=shapes", f"data.root={tmp_path}/absent"))
