"""Measures reading from an object store: a server on loopback that delays each response.

The consumer sleeps instead of training and takes 300 images/s. Faults are injected in the server.
Two other readers get the same images from the same server.

    uv run --extra cloud python -m scripts.bench.cloud [--other PYTHON]

Writes ``scripts/bench/results/cloud.md``. ``--other`` is the interpreter of an environment with
litdata, webdataset, zstd and s3fs.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from buckets import Bucket, serving  # noqa: E402

from harness.feed.order import EpochRemainder  # noqa: E402
from scripts.bench.loader.measures import feeds  # noqa: E402
from scripts.bench.tables import machine, machine_line, markdown, tell, write  # noqa: E402

PAGE = ROOT / "scripts" / "bench" / "results" / "cloud.md"
BATCH = 64
IMAGES_PER_S = 300
SHARDS = 6
EACH = 800
SIDE = 128
SECRET = "hunter2hunter2"
SHORT = 200
# program of a short process
READ = (
    "from harness.data.remote import RemoteStore; from harness.data.ahead import Ahead; "
    "from harness.config import DataConfig; s = RemoteStore('s3://b/d'); n = s.names(); "
    "a = Ahead(s, DataConfig()); p = [(n[0], 512 * i, 9000) for i in range(40)]; "
    "a.expect(p); [a.read(*each) for each in p[:20]]"
)
# prints seconds to the first batch, fraction of time waiting, and images
CONSUME = f"""
import itertools, json, sys, time
def consumed(batches, size):
    begin = time.perf_counter(); waited = 0.0; first = None; images = 0
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        got = time.perf_counter()
        if batch is None: break
        if first is None: first = got - begin; begin = got
        else: waited += got - asked
        images += size
        time.sleep(size / {IMAGES_PER_S})
    wall = time.perf_counter() - begin
    print(json.dumps(dict(first_s=first, wait=waited / wall, images=images, wall_s=wall)))
"""
WEBDATASET = (
    CONSUME
    + f"""
import io, numpy as np, torch, webdataset as wds
from PIL import Image
urls = [f"{{sys.argv[1]}}/{{i}}.tar" for i in range({SHARDS})]
def decode(s):
    return np.array(Image.open(io.BytesIO(s["jpg"])).convert("RGB").resize((112, 112)))
made = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(1000).map(decode)
loader = torch.utils.data.DataLoader(made, batch_size={BATCH}, num_workers=2, drop_last=True)
begun = iter(loader)
consumed(begun, {BATCH})
"""
)
LITDATA = (
    CONSUME
    + f"""
import io, os, numpy as np, torch, litdata
from PIL import Image
def decode(item):
    return np.array(Image.open(io.BytesIO(item)).convert("RGB").resize((112, 112)))
options = dict(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
made = litdata.StreamingRawDataset(
    "s3://b/raw", cache_dir=sys.argv[1], transform=decode, storage_options=options)
loader = torch.utils.data.DataLoader(
    made, batch_size={BATCH}, num_workers=2, shuffle=True, drop_last=True)
consumed(iter(loader), {BATCH})
"""
)


def packed() -> dict[str, bytes]:
    """Returns shards of noisy JPEGs by object name."""
    rng = np.random.default_rng(0)
    objects = {}
    for shard in range(SHARDS):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for i in range(EACH):
                small = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                image = io.BytesIO()
                Image.fromarray(small).resize((SIDE, SIDE)).save(image, "jpeg", quality=95)
                data = image.getvalue()
                info = tarfile.TarInfo(f"c{i % 10}/{shard}-{i}.jpg")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
                objects[f"raw/c{i % 10}/{shard}-{i}.jpg"] = data
        objects[f"d/{shard}.tar"] = content.getvalue()
    return objects


def consume(root: str, resumed: bool) -> None:
    """Reads an epoch, or its second half, at the consumer's pace; prints results as JSON."""
    begin = time.perf_counter()
    how = ("data=shards", f"data.root={root}", "data.split_fraction=0.1", "data.image_size=112")
    with feeds(*how, f"loader.batch_size={BATCH}") as (made, settings):
        opened_s = time.perf_counter() - begin
        feed = made.train(settings)
        if resumed:
            length = len(made.splits.train) // BATCH * BATCH
            feed = made.train(settings, EpochRemainder(0, length // 2, length))
        begin = time.perf_counter()
        first_s, waited_s, images = 0.0, 0.0, 0
        asked = begin
        for batch in feed:
            got = time.perf_counter()
            if not images:
                first_s, begin = got - begin, got
            else:
                waited_s += got - asked
            images += len(batch.labels)
            time.sleep(len(batch.labels) / IMAGES_PER_S)
            asked = time.perf_counter()
        wall_s = asked - begin
        feed.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"first_s": first_s, "wait": waited_s / wall_s, "images": images, "wall_s": wall_s}
    print(json.dumps(figures | {"opened_s": opened_s, "peak_mb": peak, "setting": str(settings)}))


def ran(bucket: Bucket, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command configured for the server."""
    env = {**os.environ, **bucket.env, "AWS_SECRET_ACCESS_KEY": SECRET, **env}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )


def paced(bucket: Bucket, root: str, resumed: bool) -> dict[str, Any]:
    """Returns the results of a consumer in a separate process."""
    done = ran(bucket, sys.executable, "-m", "scripts.bench.cloud", "consume", root, str(resumed))
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def speeds(bucket: Bucket, folder: str, other: str | None) -> Iterator[dict[str, object]]:
    """Yields the rows of the speed table."""
    for delay_s in (None, 0.02, 0.05):
        bucket.delay_s = delay_s or 0.0
        for resumed in (False, True):
            asked = len(bucket.asked)
            root = folder if delay_s is None else "s3://b/d"
            found = paced(bucket, root, resumed)
            where = "folder" if delay_s is None else f"{1e3 * delay_s:g} ms"
            start = "resumed" if resumed else "begun"
            yield row("wellfed", where, start, found, len(bucket.asked) - asked)
        if delay_s and other:
            for name, code in (("webdataset", WEBDATASET), ("litData raw", LITDATA)):
                asked = len(bucket.asked)
                with tempfile.TemporaryDirectory() as cache:
                    url = f"http://127.0.0.1:{bucket.port}/b/d"
                    place = url if name == "webdataset" else cache
                    env = {"AWS_DEFAULT_REGION": "us-east-1"}
                    done = ran(bucket, other, "-c", code, place, **env)
                if done.returncode:
                    tell(f"{name}: {done.stderr[-600:]}")
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                yield row(name, f"{1e3 * delay_s:g} ms", "begun", found, len(bucket.asked) - asked)


def row(
    name: str, where: str, start: str, found: Mapping[str, Any], asked: int
) -> dict[str, object]:
    """Returns a row of the table."""
    made = {
        "reader": name,
        "an answer after": where,
        "start": start,
        "waits": f"{found['wait']:.1%}",
        "first batch": f"{found['first_s']:.2f} s",
        "images": found["images"],
        "images/s": f"{found['images'] / found['wall_s']:.0f}",
        "requests": asked,
        "peak": f"{found['peak_mb']:.0f} MB" if "peak_mb" in found else "",
    }
    tell(str(made))
    return made


def faults(bucket: Bucket, folder: Path) -> Iterator[dict[str, object]]:
    """Yields the rows of the fault table, each a run of ``train.py``."""
    chance = random.Random(0)
    cut = iter(["short"])
    seen: list[str] = []

    def replaced(method: str, path: str) -> int | str | None:
        seen.append(path)
        if len(seen) == 100:
            bucket.tags["d/0.tar"] = '"another"'
        return None

    ways: Iterable[tuple[str, Callable[[str, str], int | str | None], tuple[str, ...]]] = (
        ("no fault", lambda method, path: None, ()),
        ("503 for 5 %", lambda method, path: 503 if chance.random() < 0.05 else None, ()),
        (
            "a body cut short",
            lambda method, path: next(cut, None) if path.endswith("tar") else None,
            (),
        ),
        (
            "scratch full",
            lambda method, path: None,
            (f"data.scratch={folder}/scratch", "data.scratch_gb=0.001"),
        ),
        ("wrong credentials", lambda method, path: 403, ()),
        ("a shard replaced", replaced, ()),
    )
    for what, fault, more in ways:
        bucket.fault = fault
        done = ran(
            bucket, sys.executable, "train.py", "data=shards", "data.root=s3://b/d",
            "data.split_fraction=0.1", "data.image_size=32", "trainer.epochs=1", "device=cpu",
            "watch.tensorboard=false", "model=small", "trainer.max_steps=12",
            f"hydra.run.dir={folder}/{what.replace(' ', '-').replace('%', '')}", *more,
        )  # fmt: skip
        bucket.fault = lambda method, path: None
        bucket.tags.clear()
        text = done.stdout + done.stderr
        lines = re.findall(r"(?m)^.*(?:s3://|data\.scratch=|server answered|Traceback).*$", text)
        said = next((line for line in reversed(lines) if "data.root" not in line), "")
        made = {
            "fault": what,
            "exit": done.returncode,
            "secret printed": "yes" if SECRET in text else "no",
            "traceback": "yes" if "Traceback" in text else "no",
            "line": said.replace(str(folder), "FOLDER").strip()[:160],
        }
        tell(str(made))
        yield made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--other")
    other = parser.parse_args().other
    with tempfile.TemporaryDirectory() as folder, serving(Bucket(packed())) as bucket:
        os.environ["WELLFED_CACHE"] = f"{folder}/cache"
        shards = Path(folder) / "shards"
        shards.mkdir()
        for name, data in bucket.objects.items():
            if name.endswith(".tar"):
                (shards / name.removeprefix("d/")).write_bytes(data)
        fast = [*speeds(bucket, str(shards), other)]
        bucket.delay_s = 0.005
        broken = [*faults(bucket, Path(folder))]
        codes = [ran(bucket, sys.executable, "-c", READ).returncode for _ in range(SHORT)]
        load = os.getloadavg()[0]
    mean = sum(map(len, bucket.objects.values())) / 2 / SHARDS / EACH
    text = f"""# Reading from an object store

`uv run --extra cloud python -m scripts.bench.cloud`, {machine_line(machine())};
obstore {version("obstore")}; load average {load:.1f} at the end. One run per row. {SHARDS} shards
of {EACH} JPEGs of {SIDE}x{SIDE}, {mean / 1e3:.0f} kB each, on a server in another process on
loopback. The consumer takes {IMAGES_PER_S} images/s in batches of {BATCH} and sleeps instead of
training.

{markdown(fast)}

A resumed row reads the second half of the epoch. The peak is of the whole process, including torch.

## Faults

Runs of `train.py` of 12 steps.

{markdown(broken)}

## Short processes

{SHORT} processes that announce 40 reads, do 20 and end: {codes.count(0)} exit codes 0.
"""
    write(PAGE, text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["consume"]:
        consume(sys.argv[2], sys.argv[3] == "True")
    else:
        main()
