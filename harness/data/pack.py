"""Packs images into shuffled tar shards: ``wellfed pack``.

    wellfed pack /data/photos /data/shards --max-side 500
    wellfed pack /data/labels.csv /data/shards
    wellfed pack --unpack /data/shards /data/photos

SOURCE is a folder that data=imagefolder can read, a table next to its images, or a folder of
Parquet files from the Hugging Face Hub. A shard has WebDataset's layout: CLASS/PATH.jpg with the
image's bytes, CLASS/PATH.cls with its class number, and CLASS/PATH.error if the image cannot be
read. A second call continues after the last complete shard. Exit codes: 0: success; 2: the folders
or options are rejected; 3: an image cannot be read; 7: the disk is full.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import io
import json
import os
import re
import tarfile
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ConfigError, DataConfig
from ..monitor.console import progress
from ..runtime.errors import DataError, say
from ..runtime.files import read_json, write_whole
from ..runtime.seeding import order_rng
from ..suggestions import typed
from . import shrink
from .decode import HEAD_BYTES, reader
from .shard_index import INDEX, INFO, indexed
from .storage import FolderSource, Source, evenly_spaced, find_sets, in_classes
from .stores import FolderStore
from .table import SPELLINGS, SPLITS, TableSource
from .tar import members

# stream of random numbers, different from those for epochs
_STREAM = 9
# number of images whose mean size determines how many fill a shard
_TRIED = 256
_BESIDE = (".cls", ".error")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="wellfed pack", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("source", type=Path, help="the images; with --unpack, the shards")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--unpack", action="store_true", help="write the images in shards as files")
    parser.add_argument(
        "--shard-mb",
        type=shrink.positive,
        default=256,
        help="approximate shard size in MB (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the order (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=shrink.positive,
        default=shrink.cores(),
        help="number of threads (default: %(default)s)",
    )
    return shrink.command(parser, None, arguments, pack)


def pack(
    source: Path,
    out: Path,
    unpack: bool,
    shard_mb: int,
    seed: int,
    jobs: int,
    max_side: int | None,
    quality: int,
) -> None:
    """Writes ``source`` as shards with an index or, with ``unpack``, shards as files.

    Raises:
        ConfigError: the folders are rejected, or ``out`` has other contents.
        DataError: an image is unreadable; all images are packed anyway.
    """
    if unpack:
        _unpack(source, out)
        return
    sets = _sets(source, out)
    classes = [*next(iter(sets.values()))[0].classes]
    names = {name: [*map(partial(_member, *own), range(len(own[0])))] for name, own in sets.items()}
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:16]
    packed = f" --seed {seed} --shard-mb {shard_mb}, names {digest}"
    base = source if source.is_dir() else source.parent
    shrink.claim(base, out, shrink.Copy(str(source.resolve()), max_side, quality, packed))
    info: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    with progress("Packing", sum(map(len, names.values())), "images") as bar:
        for split, (images, _) in sets.items():
            work = partial(_sample, images, names[split], max_side, quality)
            tried = [len(work(i)[0][1]) for i in evenly_spaced(len(images), _TRIED)]
            count = max(1, int(shard_mb * 1e6 / np.mean(tried)))
            order = order_rng(seed, 0, stream=_STREAM).permutation(len(images))
            parts = np.split(order, range(count, len(order), count))
            files = [f"{split}-{number:05}.tar" for number in range(len(parts))]
            for name, places in zip(files, parts, strict=True):
                shard = out / name
                if not shard.exists():
                    _write(shard, bar.over(shrink.in_order(work, places.tolist(), jobs)))
                sizes[name] = shard.stat().st_size
            info[split] = {
                "name": split,
                "filenames": files,
                "shard_lengths": [*map(len, parts)],
                "num_samples": len(order),
            }
    store = FolderStore(str(out))
    columns, _ = indexed(store, sizes, classes, True)
    index = io.BytesIO()
    kinds = zip(("shard", "offset", "length", "label"), columns, "iqii", strict=True)
    known: dict[str, Any] = {name: np.asarray(column, kind) for name, column, kind in kinds}
    known |= {"shards": [*sizes], "sizes": [*sizes.values()], "classes": classes}
    np.savez(index, **known)
    write_whole(out / INDEX, index.getbuffer())
    write_whole(out / INFO, json.dumps({"splits": info, "classes": classes}, indent=1).encode())
    more = "" if "val" in sets else " data.split_fraction=0.1"
    say(f"{len(sizes)} shards; train with data=shards {typed('data.root', out)}{more}")
    read = (members(partial(store.read, name), sizes[name], (b".error",)) for name in sizes)
    shrink.check_read([os.fsdecode(content) for *_, content in chain(*read) if content])


def _sets(source: Path, out: Path) -> dict[str, tuple[Any, Any]]:
    """Returns each set with the folder to which its names are relative, by set name.

    Raises:
        DataError: training would reject the source.
    """
    if source.is_file():
        table = TableSource(str(source.parent), DataConfig(table=str(source)))
        found: dict[str, Any] = {name: (own, table.root) for name, own in table.sets().items()}
    elif files := sorted(source.rglob("*.parquet")):
        by_split: dict[str, list[Path]] = {}
        for path in files:
            words = re.findall("[a-z]+", str(path.relative_to(source)).lower())
            split = next((SPELLINGS[word] for word in words if word in SPELLINGS), 0)
            by_split.setdefault(SPLITS[split], []).append(path)
        rows = {name: _Rows(own, out) for name, own in by_split.items()}
        found = {name: (own, "/") for name, own in rows.items() if len(own)}
    else:
        base, sets = find_sets(source, None)
        if "train" not in sets:
            sets = {"train": base}
        classes = FolderSource(sets["train"]).classes
        found = {
            name: (in_classes(FolderSource(path), classes, path), path)
            for name, path in sets.items()
        }
    return {{"val": "validation"}.get(name, name): own for name, own in found.items()}


def _member(images: Source, root: Any, i: int) -> str:
    """Returns an image's name in its shard, CLASS/PATH."""
    folder = images.classes[images.labels[i]].replace("/", "%2F")
    path = os.path.relpath(images.where(i), root)
    # a table's images can be anywhere
    return path if isinstance(root, Path) else os.path.join(folder, path)


def _sample(
    images: Source, names: Sequence[str], max_side: int | None, quality: int, i: int
) -> list[tuple[str, bytes]]:
    """Returns an image's members: its bytes, its class number, and its error if unreadable.

    Raises:
        BadSample: the file cannot be read.
    """
    data: Any
    data, label = images.read(i)
    wrong = None
    if max_side:
        data, wrong = shrink.attempted(data, images.where(i), max_side, quality)
    stem = os.path.splitext(names[i])[0]
    found = [(names[i], data), (f"{stem}.cls", b"%d" % label)]
    return found + ([(f"{stem}.error", wrong.encode(errors="replace"))] if wrong else [])


def _write(shard: Path, samples: Iterable[list[tuple[str, bytes]]]) -> None:
    """Writes a shard atomically."""
    part = shard.with_name(f".{shard.name}.part")
    with open(part, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for sample in samples:
                for name, data in sample:
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())
    part.replace(shard)


def _unpack(shards: Path, folder: Path) -> None:
    """Writes the images in ``shards`` below ``folder``, with subfolders if there are several sets.

    Raises:
        ConfigError: ``folder`` is not empty.
        DataError: a shard is damaged.
        OSError: there are no shards.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} contains other files; specify a new folder")
    info = read_json(shards / INFO)["splits"]
    with progress("Unpacking", sum(own["num_samples"] for own in info.values()), "images") as bar:
        for split, own in info.items():
            place = folder / SPLITS[SPELLINGS[split]] if len(info) > 1 else folder
            for name in own["filenames"]:
                try:
                    with tarfile.open(shards / name) as tar:
                        images = (each for each in tar if not each.name.endswith(_BESIDE))
                        tar.extractall(place, bar.over(images), filter="data")
                except tarfile.TarError as error:
                    raise DataError(f"{shards / name}: {error}; fetch it again") from error


class _Rows:
    """The images in Parquet ``files`` from the Hugging Face Hub, by class and row.

    Rows cannot be read in random order, so the images are copied to a temporary file next to
    ``out``.

    Raises:
        DataError: pyarrow is missing, or the files do not have exactly one image column and one
            class column.
    """

    def __init__(self, files: Sequence[Path], out: Path) -> None:
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise DataError(f"{files[0]} needs pyarrow; run pip install pyarrow") from error
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        self._copy = tempfile.TemporaryFile(dir=out.absolute().parent)  # noqa: SIM115
        weakref.finalize(self, self._copy.close)
        found: list[tuple[int, int, int, str]] = []
        for path in files:
            file = parquet.ParquetFile(path)
            facts = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            features = facts.get("info", {}).get("features", {})
            # features that are lists have no type
            images, labels = (
                [name for name, own in features.items() if "_type" in own and own["_type"] == kind]
                for kind in ("Image", "ClassLabel")
            )
            if not len(images) == len(labels) == 1:
                raise DataError(
                    f"{path} needs one Image column and one ClassLabel column, as on the "
                    "Hugging Face Hub; save it with the datasets library"
                )
            image, label = images[0], labels[0]
            self.classes = tuple(features[label]["names"])
            for batch in file.iter_batches(64, columns=[f"{image}.bytes", label]):
                for row in batch.to_pylist():
                    data, number = (row[image] or {}).get("bytes"), row[label]
                    if not data or number is None or number < 0:
                        continue
                    plugin = reader(data[:HEAD_BYTES])
                    name = f"{len(found):08}.{str(plugin and plugin.format).lower()}"
                    found.append((number, self._copy.tell(), len(data), name))
                    self._copy.write(data)
        self._copy.flush()
        self._rows = sorted(found)
        self.labels = [number for number, *_ in self._rows]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> tuple[bytes, int]:
        """Returns an image's bytes and label."""
        number, begin, length, _ = self._rows[i]
        return os.pread(self._copy.fileno(), length, begin), number

    def where(self, i: int) -> str:
        """Returns a name made from the row number."""
        return f"/{self._rows[i][-1]}"
