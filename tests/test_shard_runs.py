"""Runs on tar shards: the weights of the folder that they were packed from."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
from commands import trained
from PIL import Image
from run_state import digest

from harness.config import Config

Composed = Callable[..., Config]
COMMON = (
    "device=cpu", "trainer.num_threads=1", "data.image_size=32", "model=small",
    "loader.batch_size=8", "trainer.epochs=2",
)  # fmt: skip
run = partial(commands.run_here, stopped=True)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[str, ...]:
    """The settings of a folder of 48 and 16 noisy JPEGs, and those of two shards of each set."""
    tree, shards = tmp_path / "tree", tmp_path / "shards"
    shards.mkdir()
    rng = np.random.default_rng(0)
    for part, count in (("train", 24), ("val", 8)):
        files = []
        for place, name in enumerate(("ash", "elm")):
            (tree / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(60 * place, 60 * place + 190, (40, 36, 3), dtype=np.uint8)
                files.append(tree / part / name / f"{i}.jpg")
                Image.fromarray(pixels).save(files[-1])
        random.Random(part).shuffle(files)
        for number in range(2):
            with tarfile.open(shards / f"{part}-{number}.tar", "w") as archive:
                for file in files[number::2]:
                    archive.add(file, file.relative_to(tree / part).as_posix())
    return f"data=imagefolder data.root={tree}", (
        f"data=shards data.root={shards} data.train='train-*.tar' data.val='val-*.tar'"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
def test_shards_train_the_weights_of_their_folder(
    roots: tuple[str, str],
    tmp_path: Path,
    composed: Composed,
    stop_at: Callable[[int | None], None],
) -> None:
    """Bitwise, by other backends, from a cache, and if a run on the folder resumes on shards."""
    folder, shards = (root.split() for root in roots)
    run(composed(*folder, *COMMON), tmp_path / "folder")
    expected = digest(tmp_path / "folder")
    for way in ("loader.num_workers=0", "loader.backend=processes", "data.cache=ram"):
        run(composed(*shards, *COMMON, way), tmp_path / way)
        assert digest(tmp_path / way) == expected, way
    stop_at(3)
    run(composed(*folder, *COMMON), tmp_path / "resumed")
    stop_at(None)
    run(composed(*shards, *COMMON, "resume=auto"), tmp_path / "resumed", *shards)
    assert digest(tmp_path / "resumed") == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_train_on_shards_as_on_the_folder(roots: tuple[str, str], tmp_path: Path) -> None:
    """One hash of weights, also if the second half of an epoch comes from shards."""
    folder, shards = (root.split() for root in roots)
    ranks = (*COMMON, "dist=spawn", "dist.nprocs=2", "loader.num_workers=1")
    for name, *typed in (
        ("folder", *folder),
        ("resumed", *folder, "trainer.max_steps=1"),
        ("resumed", *shards, "resume=auto", "trainer.max_steps=null"),
    ):
        done = trained(tmp_path, *ranks, *typed, f"run.name={name}", timeout_s=180)
        assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "outputs/resumed") == digest(tmp_path / "outputs/folder")
