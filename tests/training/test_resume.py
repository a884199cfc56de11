"""What a run takes over from a checkpoint, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import commit

from harness.config import Config, DataCache, Interpolation, Mode, Precision, to_plain, walk
from harness.feed.order import EpochRemainder, Lanes
from harness.runtime.distributed import World
from harness.runtime.errors import CheckpointError
from harness.training import models, resume
from harness.training.checkpoint_read import Saved
from harness.training.state import TrainState, make_state

Composed = Callable[..., Config]

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
CLASSES = ("ant", "bee")
# Every setting that decides pixels, labels or the network, with a value that no data set here has
# by itself.
TRAINED: dict[str, Any] = {
    "data.root": "/elsewhere",
    "data.download": False,
    "data.mirror": "http://localhost/x",
    "data.md5": "0" * 32,
    "data.train": "t-*.tar",
    "data.val": "v-*.tar",
    "data.scratch": "/scratch",
    "data.scratch_gb": 9.0,
    "data.image_size": 56,
    "data.eval_resize": 57,
    "data.eval_squash": True,
    "data.interpolation": Interpolation.bicubic,
    "data.mean": (0.1, 0.2, 0.3),
    "data.std": (0.4, 0.5, 0.6),
    "data.split_fraction": 0.25,
    "data.table": "labels.csv",
    "data.columns.image": "ID",
    "data.columns.label": "dx",
    "data.columns.split": "part",
    "data.columns.group": "lesion",
    "data.fold": 2,
    "data.folds": 4,
    "data.fraction": 0.75,
    "data.balance": 0.5,
    "data.exif_orientation": True,
    "data.background": (1, 2, 3),
    "data.max_pixels": 4321,
    "data.cache": DataCache.ram,
    "data.cache_gb": 1.5,
    "data.cache_max_side": 99,
    "data.generate.classes": 7,
    "data.generate.train_images": 70,
    "data.generate.val_images": 71,
    "data.generate.width": 72,
    "data.generate.height": 73,
    "data.generate.quality": 74,
    "data.generate.seed": 75,
    "data.repeats": 1,
    "data.train_size": (40,),
    "data.train_size_epochs": None,
    "data.name": "imagefolder",
    "model.name": "resnet18",
    "trainer.precision": Precision.bf16,
    "trainer.channels_last": False,
}
PIXELS = [path for path in TRAINED if path in resume.PIXELS]
# What says how much a machine may do for these images is the command's.
COMMANDS = {
    "data.mirror": None,
    "data.scratch": None,
    "data.scratch_gb": 100.0,
    "data.fraction": 1.0,
    "data.balance": 0.0,
    "data.repeats": 1,
    "data.train_size": None,
    "data.max_pixels": 50_000_000,
    "data.cache": DataCache.none,
    "data.cache_gb": None,
    "data.cache_max_side": None,
}


def set_(config: Config, path: str, value: Any) -> None:
    """Set one setting by its dotted name."""
    place: Any = config
    *groups, name = path.split(".")
    for group in groups:
        place = getattr(place, group)
    setattr(place, name, value)


def values(config: Config) -> dict[str, Any]:
    """Every setting by its dotted name."""
    return {path: value for path, value, _ in walk(config)}


@pytest.fixture
def trained(composed: Composed) -> Saved:
    """A checkpoint of a run that set everything that matters."""
    config = composed()
    for path, value in TRAINED.items():
        set_(config, path, value)
    return Saved("best.pt", {"settings": to_plain(config), "classes": list(CLASSES)}, in_run=True)


def evaluated(composed: Composed, saved: Saved, *typed: str) -> dict[str, Any]:
    """The settings that an evaluation with this command line has."""
    typed = ("mode=evaluate", "resume=best.pt", *typed)
    return values(resume.settings(composed(*typed), saved, typed))


def test_the_list_of_settings_is_whole(composed: Composed) -> None:
    """Every setting of the data set is in this file's list."""
    commands = {"data.on_error", "data.max_bad_fraction", "data.evaluate"}
    assert {path for path in values(composed()) if path.startswith("data.")} - commands == {
        p for p in TRAINED if p.startswith("data.")
    }


def test_evaluation_needs_no_setting_again(
    composed: Composed, trained: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    """What decides pixels, labels and network is the checkpoint's, and is printed."""
    found = evaluated(composed, trained)
    assert {path: found[path] for path in TRAINED} == TRAINED | COMMANDS
    printed = capsys.readouterr().out
    assert "from the checkpoint: data.name=imagefolder data.root=/elsewhere" in printed
    assert "data.mean=[0.1,0.2,0.3]" in printed and "trainer.precision=bf16" in printed


def test_columns_in_braces_are_typed(composed: Composed, trained: Saved) -> None:
    """Together they win over the checkpoint's, as each of them does by its own name."""
    found = evaluated(composed, trained, "data.columns={image: Datei}")
    assert (found["data.columns.image"], found["data.columns.label"]) == ("Datei", None)


@pytest.mark.parametrize(
    ("path", "text", "value", "line"),
    [
        ("data.image_size", "48", 48, "data.image_size 56, now 48"),
        (
            "data.mean",
            "[0.3,0.3,0.3]",
            (0.3, 0.3, 0.3),
            "data.mean [0.1,0.2,0.3], now [0.3,0.3,0.3]",
        ),
        ("data.root", "/here", "/here", "data.root /elsewhere, now /here"),
        ("data.table", "new.csv", "new.csv", "data.table labels.csv, now new.csv"),
        ("data.split_fraction", "null", None, "data.split_fraction 0.25, now null"),
        ("trainer.precision", "fp32", Precision.fp32, "trainer.precision bf16, now fp32"),
        ("model.name", "small", "small", "model.name resnet18, now small"),
    ],
)
def test_what_is_typed_is_used_and_printed(
    composed: Composed,
    trained: Saved,
    capsys: pytest.CaptureFixture[str],
    path: str,
    text: str,
    value: Any,
    line: str,
) -> None:
    """A setting of the command line wins over the checkpoint's, and a line has both."""
    found = evaluated(composed, trained, f"{path}={text}")
    expected = TRAINED | COMMANDS | {path: value}
    if path in ("data.root", "data.table"):
        # no image of this tree or table was trained on
        expected |= {"data.split_fraction": None, "data.fold": None, "data.folds": 5}
        expected |= {"data.columns.group": None, "data.columns.split": None}
    if path == "data.root":
        # the command may fill it
        expected |= {"data.download": True}
    assert {key: found[key] for key in TRAINED} == expected
    assert f"checkpoint: {line}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    ["data=imagefolder", "model=resnet18", "data.name=imagefolder"],
    ids=["data", "model", "name"],
)
def test_a_choice_that_says_the_same_changes_nothing(
    composed: Composed, trained: Saved, typed: str
) -> None:
    """Naming the data set or the network again does not bring its file's values back."""
    found = evaluated(composed, trained, typed)
    assert {path: found[path] for path in TRAINED} == TRAINED | COMMANDS


@pytest.mark.parametrize("mode", ["evaluate", "predict", "export"])
def test_a_file_from_elsewhere_names_no_images(
    composed: Composed, trained: Saved, mode: str
) -> None:
    """A checkpoint outside a run's folder decides pixels and the network, and nothing else."""
    foreign = Saved("best.pt", trained.state)
    typed = (f"mode={mode}", "resume=best.pt", "data.name=shapes", "data.root=here")
    ours = values(composed(*typed))
    found = values(resume.settings(composed(*typed), foreign, typed))
    changed = {path for path, value in found.items() if value != ours[path]}
    assert {path for path in changed if path.startswith("data.")} == {*PIXELS}
    if mode == "evaluate":
        with pytest.raises(CheckpointError, match="data.name=imagefolder data.root=/elsewhere"):
            evaluated(composed, foreign)


@pytest.mark.parametrize(
    ("mode", "needed"),
    [("evaluate", "model.name=net:build data.name=sets:open"), ("export", "model.name=net:build")],
)
def test_all_functions_of_a_run_are_asked_for_at_once(
    composed: Composed, mode: str, needed: str
) -> None:
    """An export reads no images."""
    config = composed("model.name=net:build", "data.name=sets:open")
    saved = Saved("best.pt", {"settings": to_plain(config), "classes": [*CLASSES]}, in_run=True)
    typed = (f"mode={mode}", "resume=best.pt")
    with pytest.raises(CheckpointError, match=rf"add {needed} \(for"):
        resume.settings(composed(*typed), saved, typed)
    typed += (*needed.split(),)
    assert values(resume.settings(composed(*typed), saved, typed))["model.name"] == "net:build"


@pytest.mark.parametrize("typed", ["data=cifar10", "experiment=cifar10_resnet18"])
def test_another_data_set_is_seen_as_the_network_was_trained(
    composed: Composed, trained: Saved, typed: str
) -> None:
    """Where the images lie is the command's; their size and normalization stay the checkpoint's."""
    found = evaluated(composed, trained, typed)
    assert (found["data.name"], found["data.root"], found["data.md5"]) == ("cifar10", None, None)
    assert {path: found[path] for path in PIXELS} == {path: TRAINED[path] for path in PIXELS}


def test_training_goes_on_with_its_own_settings(
    composed: Composed, trained: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed training keeps this command's settings and prints each difference."""
    config = composed("data.image_size=48", "resume=best.pt")
    assert resume.settings(config, trained, ("data.image_size=48",)) == config
    assert "checkpoint: data.image_size 56, now 48\n" in capsys.readouterr().out


def test_other_ways_of_training_are_told(
    composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each setting that training goes on by is printed if it differs; evaluation prints none."""
    settings = to_plain(composed("optim.lr=0.5", "seed=7", "augment.hflip=0.25"))
    saved = Saved("last.pt", {"settings": settings}, in_run=True)
    resume.settings(composed("resume=last.pt"), saved, ())
    told = capsys.readouterr().out
    assert "checkpoint: optim.lr 0.5, now 0.1\n" in told
    assert (
        all(f"checkpoint: {name} " in told for name in ("seed", "augment.hflip"))
        and told.count("\n") == 3
    )
    evaluated(composed, saved)
    assert "optim" not in capsys.readouterr().out


def test_what_a_nameless_run_saved_is_read(composed: Composed) -> None:
    """A run that resumed in a folder of its launcher's or the user's leaves checkpoints."""
    saved = Saved("last.pt", {"settings": to_plain(composed("resume=auto"))}, in_run=True)
    assert evaluated(composed, saved)["run.name"] is None


def test_a_foreign_file_says_that_it_has_no_settings(
    composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights alone know no normalization: the command's settings count, and a line says it."""
    config = composed("mode=evaluate", "model.weights=x.pth", "data.image_size=48")
    assert resume.settings(config, Saved("x.pth", {}), ()) == config
    assert "x.pth contains no settings; data.*, model.name" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [None, 5, "x", ["a"], {"data": 5}, {"data": {"image_size": -1}}, {"model": {"nome": "x"}}],
    ids=repr,
)
def test_odd_settings_are_refused(composed: Composed, settings: Any) -> None:
    """Settings that are none name the file, before anything is loaded."""
    with pytest.raises(CheckpointError, match="^best.pt: cannot be used: "):
        evaluated(composed, Saved("best.pt", {"settings": settings}))


@pytest.fixture
def state(composed: Composed) -> TrainState:
    """A fresh network of two classes."""
    return make_state(composed(), 2, ALONE, 10)


def take(
    state: TrainState,
    composed: Composed,
    weights: dict[str, Any],
    classes: Any = list(CLASSES),  # noqa: B006
) -> None:
    """Evaluate what a checkpoint with these weights and classes holds."""
    saved = Saved(
        "best.pt", {"model": weights, "classes": classes, "settings": {}, "epoch": 3, "step": 30}
    )
    state.config = composed("mode=evaluate", "resume=x")
    resume.take_over(state, saved, CLASSES, 0)


def test_evaluation_takes_the_network_alone(state: TrainState, composed: Composed) -> None:
    """A checkpoint of another optimizer is evaluated; its step is that of the logged result."""
    weights = {key: torch.ones_like(value) for key, value in state.network.state_dict().items()}
    take(state, composed, weights)
    assert state.step == 30
    assert all(
        torch.equal(value, weights[key]) for key, value in state.network.state_dict().items()
    )


@pytest.mark.parametrize("mode", ["evaluate", "train"])
def test_other_classes_name_both(state: TrainState, composed: Composed, mode: str) -> None:
    """The error has the checkpoint's classes, the data set's, and the way out."""
    saved = Saved("best.pt", {"model": {}, "classes": ["x\x1b[31m", "y"]})
    state.config = composed(f"mode={mode}", "resume=x")
    text = r"x\\x1b\[31m, y, not ant, bee; choose its dataset with data= and data.root=$"
    with pytest.raises(CheckpointError, match=text):
        resume.take_over(state, saved, CLASSES, 0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w[:1], r"is \[1.*\], not \[2"),
        (lambda w: w.to(torch.complex64), "is torch.complex64, not torch.float32"),
        (lambda w: w.to(torch.int8), "is torch.int8, not torch.float32"),
    ],
    ids=["head", "complex", "integers"],
)
def test_weights_that_would_give_a_wrong_result_are_refused(
    state: TrainState, composed: Composed, change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    """No random head is evaluated and no part of a number dropped; the network stays."""
    before = {key: value.clone() for key, value in state.network.state_dict().items()}
    head = max(models.head_keys(state.network))
    with pytest.raises(
        CheckpointError, match=f"best.pt: does not fit model.name=small: {head} {text}"
    ):
        take(state, composed, before | {head: change(before[head])})
    assert all(torch.equal(value, before[key]) for key, value in state.network.state_dict().items())


def test_nothing_to_evaluate_is_an_error(composed: Composed, tmp_path: Path) -> None:
    """resume=auto without a checkpoint starts a training, and never evaluates random weights."""
    config = composed("mode=train", "resume=auto", "run.name=x")
    assert resume.find(config, tmp_path, ALONE) is None
    config.mode = Mode.evaluate
    with pytest.raises(CheckpointError, match="no checkpoint; .*resume=PATH"):
        resume.find(config, tmp_path, ALONE)


def test_a_copy_without_its_record_has_its_settings(composed: Composed, tmp_path: Path) -> None:
    """A copied best.pt is evaluated through model.weights with the pixels of its settings."""
    settings = to_plain(composed("data=digits", "data.image_size=9"))
    state = {"model": {}, "settings": settings, "step": 1, "epoch": 1}
    record = commit(tmp_path, state)
    copy = tmp_path / "copied.pt"
    copy.write_bytes(record.path.read_bytes())
    typed = ("mode=evaluate", f"model.weights={copy}", "data=digits")
    saved = resume.find(composed(*typed), tmp_path, ALONE)
    assert resume.settings(composed(*typed), saved, typed).data.image_size == 9


def test_a_network_of_published_weights_is_built_as_it_was(composed: Composed) -> None:
    """The input of googlenet is transformed if it was in training, whatever this command says."""
    for weights in ("DEFAULT", None):
        config = composed("model.name=googlenet")
        config.model.weights = weights
        saved = Saved("best.pt", {"settings": to_plain(config)}, in_run=True)
        used = resume.settings(composed("mode=evaluate", "resume=best.pt"), saved, ())
        network = models.build(used.model, 2, image_size=96, filled=True)
        assert network.transform_input is (weights == "DEFAULT")


def kept(composed: Composed, ranks: int, samples: int = 0, **more: Any) -> Saved:
    """A checkpoint of ``ranks`` ranks with batches of 64, within an epoch of 1,000 images."""
    counts = {
        "ranks": ranks,
        "epoch": 1,
        "samples": samples,
        "stop": 960,
        "length": 1000,
        "steps_per_epoch": 15,
    }
    return Saved(
        "last.pt",
        {"settings": to_plain(composed()), "pending": False, "best_top1": None, **counts, **more},
    )


def world(size: int) -> World:
    return World(0, size, 0, size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ranks", "now", "batch", "parts"),
    [
        (2, 1, 64, 2),
        (4, 1, 64, 4),
        (1, 2, 32, 1),
        (3, 6, 32, 1),
        (2, 2, 64, 1),
        (2, 3, 64, 1),
        (4, 3, 64, 1),
    ],
)
def test_another_number_of_ranks_keeps_the_update(
    composed: Composed,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    now: int,
    batch: int,
    parts: int,
) -> None:
    """An update keeps its images where the ranks can share them; a line says which."""
    config = resume.settings(composed(), kept(composed, ranks), (), now)
    assert (config.loader.batch_size, config.trainer.accumulate_steps) == (batch, parts)
    printed = capsys.readouterr().out
    if ranks == now:
        assert printed == ""
    else:
        assert printed == (
            f"checkpoint: {ranks} ranks, now {now}: using loader.batch_size={batch} "
            f"trainer.accumulate_steps={parts}: effective batch size {batch * parts * now} "
            f"(was {64 * ranks})\n"
        )


def test_a_batch_size_that_was_chosen_stays(composed: Composed) -> None:
    """Where the command asks for another batch, the number of ranks changes nothing."""
    config = composed("loader.batch_size=16")
    assert resume.settings(config, kept(composed, 2), ()) == config


def test_the_rest_of_the_epoch_is_found(composed: Composed) -> None:
    """A checkpoint within an epoch leaves the samples up to where the epoch would end."""
    saved = kept(composed, 1, 320)
    assert resume.rest(saved, composed(), ALONE, 1000) == EpochRemainder(1, 320, 960)
    state: Any = SimpleNamespace(step=5, epoch=1, samples=320, load=lambda _: None, world=ALONE)
    state.config = composed("resume=x")
    assert resume.take_over(state, saved, CLASSES, 1000) == EpochRemainder(1, 320, 960)
    state.samples = 0
    assert resume.take_over(state, saved, CLASSES, 1000) is None


@pytest.mark.parametrize(
    ("size", "length", "more", "text"),
    [
        (1, 999, {}, r"number of training images\W.*1000, .* 999,"),
        (1, 1000, {"settings": {"seed": 3}}, r"seed\W.*3, .* 0, .* different samples"),
        (3, 1000, {"samples": 958}, "epoch 1: 3 ranks cannot share samples 958 to 960"),
    ],
    ids=["length", "seed", "ranks"],
)
def test_a_rest_that_cannot_be_had_is_refused(
    composed: Composed, size: int, length: int, more: dict[str, Any], text: str
) -> None:
    """Other images, another order and too few samples are errors that name the checkpoint."""
    state = kept(composed, size, 320).state
    state["settings"].update(more.get("settings", {}))
    saved = Saved("last.pt", {**state, **more, "settings": state["settings"]})
    with pytest.raises(CheckpointError, match=text):
        resume.rest(saved, composed(), world(size), length)


def test_the_rest_of_another_draw_is_refused(composed: Composed) -> None:
    """Within an epoch, another balance of the classes would have other samples left."""
    with pytest.raises(CheckpointError, match=r"data\.balance\W.*0\.0, .* 0\.5, "):
        resume.rest(kept(composed, 1, 320), composed("data.balance=0.5"), ALONE, 1000)


def test_the_rest_of_another_order_is_refused(
    composed: Composed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lanes, windows, blocks that were packed anew and a uniform order have other samples left."""
    saved = kept(composed, 1, 320)
    blocks = np.arange(1000, dtype=np.int32) // 10
    lanes = Lanes(blocks, 8, 2)
    others = (None, Lanes(blocks, 4, 2), Lanes(blocks, 8, 3), Lanes(blocks[::-1].copy(), 8, 2))
    for other in others:
        for then, now in ((lanes, other), (other, lanes)):
            state = {**saved.state, "lanes": str(then or "uniform")}
            with pytest.raises(CheckpointError, match=r"loader\.order\W.* different samples"):
                resume.rest(Saved("last.pt", state), composed(), ALONE, 1000, now)
    state = {**saved.state, "lanes": str(lanes)}
    assert resume.rest(Saved("last.pt", state), composed(), ALONE, 1000, lanes)
    resume.settings(composed("loader.order=lanes"), saved, ())
    assert "checkpoint: loader.order uniform, now lanes\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "count"), [(10, 13), (20, 27), (5, 7)], ids=["same", "twice as many", "half"]
)
def test_the_schedule_goes_on_by_the_share_of_the_epoch(
    composed: Composed, now: int, count: int
) -> None:
    """With other updates in an epoch, the learning rate is that of the same share."""
    trained = make_state(composed(), 2, ALONE, 10)
    trained.epoch = 1
    trained.step = 13
    trained.samples = 320
    trained.schedule.last_epoch = 13
    saved = trained.to_dict(
        {"settings": to_plain(composed()), "stop": 960, "length": 1000, "ranks": 1}
    )
    state = make_state(composed(), 2, ALONE, now)
    state.load(Saved("last.pt", saved))
    assert (state.epoch, state.step, state.samples, state.schedule.last_epoch) == (
        1,
        13,
        320,
        count,
    )
    assert state.optimizer.param_groups[0]["lr"] == 0.1 * state.schedule.factor(count)


def test_lost_records_are_no_fresh_start(composed: Composed, tmp_path: Path) -> None:
    """With resume=auto, checkpoints without records are an error, and stay where they are."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        state = {"w": torch.ones(1), "step": step, "epoch": 0}
        commit(folder, state)
    for record in tmp_path.glob("checkpoints/*.json"):
        record.unlink()
    with pytest.raises(CheckpointError, match="the records .* are missing"):
        resume.find(composed("resume=auto", "run.name=x"), tmp_path, ALONE)
    assert len(list(tmp_path.glob("checkpoints/step-*.pt"))) == 2
    (tmp_path / "checkpoints/step-1.pt").unlink()
    assert resume.find(composed("resume=auto", "run.name=x"), tmp_path, ALONE) is None
