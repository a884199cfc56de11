"""data.on_error=skip: a sample that cannot be read is replaced, the same way everywhere."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import run_here, trained
from PIL import Image
from run_state import digest

from harness.config import Config
from harness.runtime.errors import BadSample, DataError
from harness.training.checkpoint_write import StopAgreement

Composed = Callable[..., Config]
run = partial(run_here, stopped=True)
BAD = ("train/b/3.jpg", "train/c/7.jpg", "val/a/1.jpg")
WAYS = (
    "loader.num_workers=0",
    "loader.backend=processes loader.num_workers=1",
    "loader.backend=processes loader.num_workers=2 loader.prefetch_factor=4",
    "loader.backend=threads loader.num_workers=2",
    "loader.backend=threads loader.num_workers=3 loader.prefetch_factor=1",
    "loader.backend=arrays",
    "data.cache=ram loader.backend=threads loader.num_workers=2",
    "data.cache=disk loader.backend=processes loader.num_workers=1",
    "loader.device_prefetch=false loader.backend=threads loader.num_workers=2",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 16 images to train and 4 to validate, of which three are damaged."""
    root = tmp_path_factory.mktemp("bad")
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 4)):
        for name in "abc":
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (4, 4, 3), np.uint8)
                image = Image.fromarray(pixels).resize((20, 20))
                image.save(root / part / name / f"{i}.jpg")
    for place in BAD:
        whole = (root / place).read_bytes()
        (root / place).write_bytes(whole[: len(whole) // 2])
    return root


def settings(tree: Path, *more: str) -> list[str]:
    """Of a run of two epochs that skips."""
    return [
        "data=imagefolder", f"data.root={tree}", "data.image_size=16", "augment.crop=pad",
        "augment.hflip=0.5", "data.on_error=skip", "data.max_bad_fraction=0.1", "device=cpu",
        "trainer.num_threads=1", "trainer.epochs=2", "loader.batch_size=8", "run.name=x", *more,
    ]  # fmt: skip


def listed(folder: Path) -> list[str]:
    """The files in the list, by their place in the tree."""
    lines = map(json.loads, (folder / "bad_samples.jsonl").read_text().splitlines())
    return sorted("/".join(Path(line["where"]).parts[-3:]) for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
def test_no_setting_of_the_loader_changes_what_is_trained_on(
    composed: Composed, tree: Path, tmp_path: Path
) -> None:
    """One hash for nine ways to load; the list names each file once."""
    hashes = set()
    for number, way in enumerate(WAYS):
        folder = tmp_path / str(number)
        assert run(composed(*settings(tree, *way.split())), folder)["bad_samples"] == 3
        hashes.add(digest(folder))
        assert listed(folder) == sorted(BAD)
    assert len(hashes) == 1


@pytest.mark.usefixtures("kept_globals")
def test_a_resumed_run_replaces_alike(
    composed: Composed, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within each epoch and resumed in another way: one hash, and no file twice."""
    run(composed(*settings(tree, WAYS[0])), tmp_path / "whole")
    ask = StopAgreement.ask
    for step, way in ((2, WAYS[3]), (8, WAYS[5]), (None, WAYS[2])):
        monkeypatch.setattr(
            StopAgreement,
            "ask",
            lambda self, now, at=step: (15, False) if now == at else ask(self, now),
        )
        run(composed(*settings(tree, "resume=auto", *way.split())), tmp_path / "parts")
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
    assert listed(tmp_path / "parts") == sorted(BAD)


@pytest.mark.slow
def test_ranks_write_one_list(tree: Path, tmp_path: Path) -> None:
    """Two ranks, of which each meets other samples in each epoch, name each file once."""
    more = ("dist=spawn", "dist.nprocs=2", "loader.num_workers=1", "loader.batch_size=4")
    done = trained(tmp_path, *settings(tree, *more))
    assert done.returncode == 0, done.stderr
    assert listed(tmp_path / "outputs/x") == sorted(BAD)
    assert "bad samples    3 replaced by others, listed in" in done.stdout


@pytest.mark.usefixtures("kept_globals")
def test_too_many_end_the_run(composed: Composed, tree: Path, tmp_path: Path) -> None:
    """Past data.max_bad_fraction the run ends, with those that it met in the list."""
    with pytest.raises(DataError, match=r"of 48 training images .* data\.max_bad_fraction=0\.03"):
        run(composed(*settings(tree, "data.max_bad_fraction=0.03", WAYS[0])), tmp_path)
    assert set(listed(tmp_path)) <= set(BAD)
    assert json.loads((tmp_path / "report.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_ranks_judge_what_they_have_met_together(tree: Path, tmp_path: Path) -> None:
    """No rank alone has met too many: all end with 3, in one line, and the list is whole."""
    more = ("dist=spawn", "dist.nprocs=2", "loader.num_workers=1", "data.max_bad_fraction=0.03")
    done = trained(tmp_path, *settings(tree, *more, "loader.batch_size=4", "seed=1"))
    assert done.returncode == 3, done.stderr
    assert "error: 2 of 48 training images cannot be read" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert set(BAD[:2]) <= set(listed(tmp_path / "outputs/x"))


@pytest.mark.usefixtures("kept_globals")
def test_mended_samples_count_no_more(composed: Composed, tree: Path, tmp_path: Path) -> None:
    """A run that ended for too many goes on once they are mended; the list keeps them."""
    root = tmp_path / "tree"
    shutil.copytree(tree, root)
    few = ("data.max_bad_fraction=0.03", WAYS[0])
    with pytest.raises(DataError, match="of 48 training images"):
        run(composed(*settings(root, *few)), tmp_path / "run")
    named = listed(tmp_path / "run")
    for place in BAD:
        shutil.copy(root / "train/a/0.jpg", root / place)
    report = run(composed(*settings(root, *few, "resume=auto")), tmp_path / "run")
    assert report["status"] == "completed" and "bad_samples" not in report
    assert listed(tmp_path / "run") == named


@pytest.mark.usefixtures("kept_globals")
def test_what_tuning_read_counts_too(composed: Composed, tree: Path, tmp_path: Path) -> None:
    """Arrays that probes have filled: the training feed still names what was replaced."""
    more = ("loader.backend=arrays", "loader.autotune=true", "tuner.budget_s=2", "tuner.fresh=true")
    run(composed(*settings(tree, *more)), tmp_path)
    assert listed(tmp_path) == sorted(BAD)


@pytest.mark.usefixtures("kept_globals")
def test_an_evaluation_may_raise_after_a_run_that_skipped(
    composed: Composed, tree: Path, tmp_path: Path
) -> None:
    """What a bad sample does is the command's to say, not the checkpoint's."""
    run(composed(*settings(tree, WAYS[0])), tmp_path / "run")
    typed = (*settings(tree), "mode=evaluate", f"resume={tmp_path / 'run'}", "data.on_error=raise")
    typed = tuple(text for text in typed if "max_bad" not in text)
    with pytest.raises(BadSample):
        run(composed(*typed), tmp_path / "again", *typed)


@pytest.mark.usefixtures("kept_globals")
def test_a_data_set_of_the_users_is_replaced_too(
    composed: Composed, write_module: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A Dataset that raises for a sample gives another one in its place."""
    write_module(
        "broken_set",
        textwrap.dedent("""
        from PIL import Image

        class Broken:
            classes = ("a", "b")
            def __len__(self):
                return 24
            def __getitem__(self, i):
                if i == 0:
                    raise OSError("gone")
                return Image.new("RGB", (16, 16), (i, i, i)), i % 2

        def splits(data, seed):
            return Broken(), Broken()
        """),
    )
    own = (
        "data=own", "data.name=broken_set:splits", "data.image_size=16", "data.on_error=skip",
        "data.max_bad_fraction=0.1", "loader.num_workers=0", "loader.batch_size=8",
        "trainer.epochs=1", "device=cpu",
    )  # fmt: skip
    run(composed(*own), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "bad_samples.jsonl").read_text().splitlines()]
    assert [(line["set"], line["index"]) for line in lines] == [("training", 0), ("validation", 0)]
    assert "OSError: gone" in lines[0]["reason"]


@pytest.mark.usefixtures("kept_globals")
def test_verify_reads_every_file(
    composed: Composed, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mode=verify names every file that cannot be read; a second look replaces the first's list."""
    for _ in range(2):
        with pytest.raises(DataError, match="^3 of 60 images cannot be read; the first is "):
            run(composed("mode=verify", "data=imagefolder", f"data.root={tree}"), tmp_path)
        assert listed(tmp_path) == sorted(BAD)
    printed = capsys.readouterr().out
    assert "verify: 2 of 48 training images cannot be read" in printed
    assert "verify: 1 of 12 validation images cannot be read" in printed


@pytest.mark.usefixtures("kept_globals")
def test_verify_of_a_good_set_ends_well(
    composed: Composed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a bad image nothing is raised, and nothing listed."""
    run(composed("mode=verify", "data=digits"), tmp_path)
    assert "verify: 0 of 359 validation images cannot be read" in capsys.readouterr().out
    assert not (tmp_path / "bad_samples.jsonl").exists()


@pytest.mark.slow
def test_ranks_verify_together(tree: Path, tmp_path: Path) -> None:
    """Each reads its share; the command ends with 3 and one line; nothing is trained."""
    more = ("data=imagefolder", f"data.root={tree}", "run.name=x", "dist=spawn", "dist.nprocs=2")
    done = trained(tmp_path, "mode=verify", *more)
    assert done.returncode == 3
    assert "error: 3 of 60 images cannot be read; the first is " in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert listed(tmp_path / "outputs/x") == sorted(BAD)
    assert not (tmp_path / "outputs/x/checkpoints").exists()
