"""Runs on shards in a bucket are those on the same shards in a folder."""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import commands
import numpy as np
import pytest
from buckets import Bucket, serving
from PIL import Image
from run_state import digest

from harness.config import Config, ConfigError, DataConfig
from harness.data import ahead, remote, shards
from harness.data.ahead import Ahead
from harness.data.remote import RemoteStore
from harness.feed import feeds
from harness.runtime.errors import DataError

pytest.importorskip("obstore")

Composed = Callable[..., Config]
COMMON = (
    "data=shards", "data.split_fraction=0.25", "data.image_size=16", "loader.batch_size=8",
    "trainer.epochs=2", "trainer.num_threads=1", "device=cpu", "watch.tensorboard=false",
    "run.name=x",
)  # fmt: skip
run = partial(commands.run_here, stopped=True)
DATA = bytes(range(256)) * 40


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Two shards of 24 noisy JPEGs of two classes, also in the folder ``shards``."""
    monkeypatch.setenv("WELLFED_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    (tmp_path / "shards").mkdir()
    objects = {"d/x": DATA}
    for shard in ("a", "b"):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for i in range(24):
                pixels = rng.integers(60 * (i % 2), 60 * (i % 2) + 190, (40, 36, 3), dtype=np.uint8)
                image = io.BytesIO()
                Image.fromarray(pixels).save(image, "jpeg")
                info = tarfile.TarInfo(f"{('ash', 'elm')[i % 2]}/{shard}{i}.jpg")
                info.size = len(image.getvalue())
                archive.addfile(info, io.BytesIO(image.getvalue()))
        objects[f"d/{shard}.tar"] = content.getvalue()
        (tmp_path / "shards" / f"{shard}.tar").write_bytes(content.getvalue())
    with serving(Bucket(objects)) as served:
        for name, value in served.env.items():
            monkeypatch.setenv(name, value)
        quick = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
        monkeypatch.setattr(remote, "_RETRIES", quick)
        yield served


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
def test_a_bucket_trains_the_weights_of_its_folder(
    bucket: Bucket,
    tmp_path: Path,
    composed: Composed,
    stop_at: Callable[[int | None], None],
) -> None:
    """Bitwise: all backends, with scratch, and a run of the folder that the bucket resumes."""
    run(composed(f"data.root={tmp_path / 'shards'}", *COMMON), tmp_path / "folder")
    expected = digest(tmp_path / "folder")
    scratch = f"data.scratch={tmp_path / 'scratch'}"
    ways = (
        ("loader.backend=threads",),
        ("loader.num_workers=0",),
        ("data.cache=ram",),
        (scratch,),
        (scratch,),
    )
    for place, way in enumerate(ways):
        before = len(bucket.asked)
        run(composed("data.root=s3://b/d", *COMMON, *way), tmp_path / f"{place}")
        assert digest(tmp_path / f"{place}") == expected, way
        if place == 4:
            # the index and all images are there: only the list is asked for
            assert len(bucket.asked) - before < 5
    # in a process of its own: the server that forks workers keeps its first environment
    ran = commands.trained(
        tmp_path, "data.root=s3://b/d", *COMMON, "loader.backend=processes",
        "loader.num_workers=2", f"hydra.run.dir={tmp_path / 'processes'}"
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert digest(tmp_path / "processes") == expected
    for first, second in (("shards", "s3"), ("s3", "shards"), ("s3", "s3")):
        roots = {"shards": f"data.root={tmp_path / 'shards'}", "s3": "data.root=s3://b/d"}
        out = tmp_path / f"{first}-{second}"
        stop_at(6)
        run(composed(roots[first], *COMMON), out)
        stop_at(None)
        run(composed(roots[second], *COMMON, "resume=auto"), out)
        assert digest(out) == expected


def test_ranges_are_read(bucket: Bucket) -> None:
    store = RemoteStore("s3://b/d/")
    assert store.names() == ["a.tar", "b.tar", "x"]
    size, tag = store.state("x")
    assert size == len(DATA) and tag != store.state("a.tar")[1]
    for offset, length in ((0, 5), (77, 4096), (len(DATA) - 1, 1), (9, 0)):
        assert store.read("x", offset, length) == DATA[offset : offset + length]
    again = pickle.loads(pickle.dumps(store))
    assert again.state("x") == (size, tag) and again.read("x", 3, 9) == DATA[3:12]
    with pytest.raises(OSError, match="ends before"):
        store.read("x", len(DATA) - 1, 2)


@pytest.mark.parametrize("fault", [500, 503, "short"])
def test_what_passes_is_tried_again(bucket: Bucket, fault: int | str) -> None:
    store = RemoteStore("s3://b/d")
    store.names()
    faults = iter([fault])
    bucket.fault = lambda method, path: next(faults, None)
    assert store.read("x", 100, 5000) == DATA[100:5100]


@pytest.mark.parametrize("fault", [401, 403, 404, 500, 503, "short"])
def test_what_stays_is_reported_in_a_line(bucket: Bucket, fault: int | str) -> None:
    store = RemoteStore("s3://b/d")
    store.names()
    bucket.fault = lambda method, path: fault
    for call in (lambda: store.read("x", 0, 500), store.names):
        if fault == "short" and call == store.names:
            continue
        with pytest.raises(OSError, match=".") as caught:
            call()
        assert not re.search(r"\n|://|hunter2|someone", str(caught.value))


def test_a_shard_that_is_replaced_is_refused(bucket: Bucket) -> None:
    store = RemoteStore("s3://b/d")
    store.names()
    bucket.tags["d/x"] = '"another"'
    for reader in (store, pickle.loads(pickle.dumps(store))):
        with pytest.raises(OSError, match="replaced"):
            reader.read("x", 0, 10)


@pytest.mark.parametrize("root", ["s3://me:hunter2@b/x", "s3://b/x?sig=hunter2", "ftp://hunter2/x"])
def test_an_address_of_no_store_is_refused(root: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteStore(root)
    assert root.startswith("ftp") or "hunter2" not in str(caught.value)


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(DataError, match="pip install obstore"):
        RemoteStore("s3://b/d")


def test_a_fork_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore("s3://b/d")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigError, match=r"loader\.start_method"):
        store.names()


def opened(scratch: Path | None = None, most: float = 1.0) -> Ahead:
    store = RemoteStore("s3://b/d")
    store.names()
    return Ahead(
        store, DataConfig(name="shards", scratch=scratch and str(scratch), scratch_gb=most)
    )


def test_what_is_announced_is_read_once_and_bounded(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MOST_BYTES", 1000)
    store = opened()
    parts = [("x", 512 * i, 100) for i in range(20)]
    for _ in range(2):
        # the last ten stay
        store.expect(parts)
        assert store._held == 1000 == sum(length for _, _, length in store._coming)
        asked = len(bucket.asked)
        for name, offset, length in parts[10:]:
            assert store.read(name, offset, length) == DATA[offset : offset + length]
        assert store._held == 0 and not store._coming
        assert len(bucket.asked) - asked <= 20
    bucket.fault = lambda method, path: 403
    store.expect(parts[:1])
    with pytest.raises(OSError, match="403"):
        store.read(*parts[0])


def test_scratch_keeps_mends_and_ends(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "scratch"
    part = ("x", 1024, 700)
    wanted = DATA[1024:1724]
    first = opened(folder)
    assert first.read(*part) == first.read(*part) == wanted
    assert first.counts() == {"requests": 1, "bytes": 700, "scratch_bytes": 700}
    asked = len(bucket.asked)
    other = opened(folder)
    asked += 1
    assert other.read(*part) == wanted and len(bucket.asked) == asked
    (file,) = folder.iterdir()
    with file.open("r+b") as damaged:
        damaged.seek(1100)
        damaged.write(b"!!")
    assert other.read(*part) == wanted and len(bucket.asked) == asked + 1
    assert other.read(*part) == wanted and len(bucket.asked) == asked + 1
    full = opened(folder, 1e-9)
    with caplog.at_level(logging.WARNING):
        for i in range(3, 8):
            assert full.read("x", 1024 * i, 9) == DATA[1024 * i : 1024 * i + 9]
    assert len(caplog.records) == 1
    bucket.tags["d/x"] = '"another"'
    assert opened(folder).read(*part) == wanted and len([*folder.iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("kept_globals")
@pytest.mark.parametrize("scratch", [False, True])
def test_lanes_fetch_whole_blocks(
    bucket: Bucket,
    tmp_path: Path,
    composed: Composed,
    monkeypatch: pytest.MonkeyPatch,
    scratch: bool,
) -> None:
    """The weights of the folder; an epoch fetches each block about once."""
    # four images in a block
    for module in (ahead, shards, feeds):
        monkeypatch.setattr(module, "BLOCK_BYTES", 8192)
    lanes = ("loader.order=lanes", "loader.lanes=2", "loader.backend=threads", "loader.window_mb=1")
    run(composed(f"data.root={tmp_path / 'shards'}", *COMMON, *lanes), tmp_path / "folder")
    kept = (f"data.scratch={tmp_path / 'scratch'}",) if scratch else ()
    run(composed("data.root=s3://b/d", *COMMON, *lanes, *kept), tmp_path / "bucket")
    assert digest(tmp_path / "bucket") == digest(tmp_path / "folder")
    read = [path for _, path, ranged in bucket.asked if ranged]
    sizes = [len(bucket.objects[f"d/{name}.tar"]) for name in ("a", "b")]
    # headers, 12 validation images, and the blocks of two epochs
    assert len(read) < 2 * (12 + sum(sizes) / 8192 + 4), len(read)


def test_a_block_serves_its_samples(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "BLOCK_BYTES", 4096)
    store = opened()
    asked = len(bucket.asked)
    store.expect_blocks([("x", 100, 4000), ("x", 4200, 900)], 2)
    for offset, length in ((100, 4000), (2000, 7), (4200, 900)):
        assert store.read("x", offset, length) == DATA[offset : offset + length]
    assert len(bucket.asked) - asked == 2
    # outside of what was fetched, before and after
    for offset, length in ((50, 60), (4150, 60), (5000, 500)):
        assert store.read("x", offset, length) == DATA[offset : offset + length]
    assert len(bucket.asked) - asked == 5
    store.expect_blocks([("x", 9000, 50)], 2)
    assert store.read("x", 4200, 5) == DATA[4200:4205] and len(store._blocks) == 2
    bucket.fault = lambda method, path: 403
    store.expect_blocks([("x", 100, 4000)], 2)
    with pytest.raises(OSError, match="403"):
        store.read("x", 100, 5)
    bucket.fault = lambda method, path: None
    store.expect_blocks([("x", 100, 4000)], 2)
    assert store.read("x", 100, 5) == DATA[100:105]


@pytest.mark.slow
def test_processes_that_read_and_end_succeed(bucket: Bucket) -> None:
    """Without waiting for their threads; asynchronous calls abort some of them."""
    script = (
        "import threading; from harness.data.remote import RemoteStore; "
        "s = RemoteStore('s3://b/d'); s.names(); "
        "[threading.Thread(target=s.read, args=('x', 0, 9000)).start() for _ in range(8)]; "
        "s.read('a.tar', 0, 10)"
    )
    runs = [subprocess.run([sys.executable, "-c", script], check=False) for _ in range(10)]
    assert [each.returncode for each in runs] == [0] * 10
