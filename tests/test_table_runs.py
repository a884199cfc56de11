"""Runs on a table are those on its folder."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
from PIL import Image
from run_state import digest

from harness.config import Config
from harness.data.table import main
from harness.runtime.errors import DataError

Composed = Callable[..., Config]
COMMON = (
    "data.split_fraction=0.25", "data.image_size=16", "loader.batch_size=8", "trainer.epochs=2",
    "trainer.num_threads=1", "device=cpu", "watch.tensorboard=false", "run.name=x",
)  # fmt: skip
run = partial(commands.run_here, stopped=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of 24 noisy JPEGs."""
    root = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for place, name in enumerate(("ash", "elm")):
        (root / name).mkdir(parents=True)
        for i in range(24):
            pixels = rng.integers(60 * place, 60 * place + 190, (40, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.jpg")
    return root


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
def test_a_table_trains_the_weights_of_its_folder(
    root: Path,
    tmp_path: Path,
    composed: Composed,
    capsys: pytest.CaptureFixture[str],
    stop_at: Callable[[int | None], None],
) -> None:
    """Bitwise: with its rows shuffled and quoted, the folder renamed, other backends, a resume."""
    assert main([str(root)]) == 0
    rows = [*csv.reader(capsys.readouterr().out.splitlines())]
    run(composed("data=imagefolder", f"data.root={root}", *COMMON), tmp_path / "folder")
    expected = digest(tmp_path / "folder")
    for seed, way in enumerate(
        ("loader.num_workers=0", "loader.backend=processes", "data.cache=ram", "resume=auto")
    ):
        root = root.rename(tmp_path / f"photos {seed}")
        with (root / "labels.csv").open("w", newline="") as file:
            quoting = csv.QUOTE_ALL if seed % 2 else csv.QUOTE_MINIMAL
            table = csv.writer(file, delimiter=",;\t|"[seed], quoting=quoting)
            table.writerows([rows[0], *random.Random(seed).sample(rows[1:], len(rows) - 1)])
        typed = ("data=table", f"data.root='{root}'", "data.table=labels.csv", *COMMON, way)
        if way == "resume=auto":
            stop_at(3)
            run(composed(*typed), tmp_path / way)
            stop_at(None)
        run(composed(*typed), tmp_path / way)
        assert digest(tmp_path / way) == expected, way


@pytest.mark.usefixtures("kept_globals")
def test_verify_reads_the_images_of_test(root: Path, tmp_path: Path, composed: Composed) -> None:
    """And needs no split."""
    (root / "ash/1.jpg").write_bytes(b"damaged")
    rows = "".join(f"ash/{i}.jpg,ash,{'test' * (i < 2)}\n" for i in range(4))
    (root / "labels.csv").write_text(f"path,label,split\n{rows}")
    for more in (("data=table", "data.table=labels.csv"), ("data=imagefolder",)):
        with pytest.raises(DataError, match=r"^1 of (4|48) images .*ash/1\.jpg"):
            run(composed("mode=verify", *more, f"data.root={root}", "device=cpu"), tmp_path / "out")


@pytest.mark.usefixtures("kept_globals")
def test_verify_names_rows_without_an_image(root: Path, tmp_path: Path, composed: Composed) -> None:
    """They are not left out."""
    (root / "labels.csv").write_text("path,label,split\nash/0.jpg,a,train\nash/99.jpg,a,val\n")
    typed = ("mode=verify", "data=table", f"data.root={root}", "data.table=labels.csv")
    with pytest.raises(DataError, match=r"ash/99\.jpg in row 3"):
        run(composed(*typed, "device=cpu"), tmp_path / "out")
