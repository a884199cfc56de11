"""The readers of a data set's files and of its caches."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np

from harness import config as schema
from harness.config import DataCache, DataConfig, GenerateConfig
from harness.data import cache, folder_index, shapes
from harness.data.cache import PixelCache
from harness.data.datasets import ImageDataset
from harness.data.mapped import MappedFile, memory
from harness.data.storage import FolderSource
from harness.data.transforms import CropTransform
from harness.runtime.errors import BadSample, DataError
from tests.hostile.fuzz import images as fuzz_images
from tests.hostile.fuzz.changes import mutated_json, png_sealed
from tests.hostile.fuzz.reader import Reader, Told

_FACTS = "f" * 64


class _One:
    """A source of one image."""

    classes: tuple[str, ...] = ("a",)
    labels = np.zeros(1, np.int64)

    def __init__(self) -> None:
        self.content = b""

    def __len__(self) -> int:
        return 1

    def read(self, i: int) -> tuple[bytes, int]:
        return self.content, 0

    def where(self, i: int) -> str:
        return "image"


def images(kind: str, place: Path) -> Reader:
    source = _One()
    transform = CropTransform(32)
    dataset = ImageDataset(source, transform, DataConfig(exif_orientation=True), 32, 0)
    out = np.empty((3, 32, 32), np.uint8)

    def read(data: bytes) -> str:
        source.content = data
        try:
            dataset.fill(0, 0, out)
        except BadSample as error:
            return f"BadSample, {error.reason.partition(':')[0].partition(' (')[0][:40]}"
        return ""

    return Reader(fuzz_images.seeds()[kind], read, seal=png_sealed if kind == "PNG" else None)


def _tree(place: Path) -> FolderSource:
    (place / "set/a").mkdir(parents=True)
    (place / "set/b").mkdir()
    for i in range(6):
        (place / f"set/{'ab'[i % 2]}/{i:04d}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(i))
    # folders of just now are not trusted
    folder_index._RACY_NS = -(10**15)
    return FolderSource(place / "set")


def decoded(place: Path) -> Reader:
    os.environ["WELLFED_CACHE"] = str(place / "cache")
    source = _tree(place)
    pixels = [np.full((3 + i, 4, 3), 40 * i, np.uint8) for i in range(len(source))]
    data_config = DataConfig(cache=DataCache.disk, cache_gb=1e-5)
    (place / "decoded").mkdir()
    path = place / "decoded/file"

    def opened() -> PixelCache:
        file = cache._on_disk(path, data_config, _FACTS, len(source))
        assert file is not None
        checked = MappedFile(memory(len(source)), writable=True)
        return PixelCache(file, checked, 0, source, None, "bilinear")

    def read(data: bytes) -> str:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        refused = ""
        try:
            kept = opened()
        except schema.ConfigError:
            return "ConfigError"
        for _ in range(2):
            for i, right in enumerate(pixels):
                found = kept.get(i)
                if found is None:
                    refused = "image, or file, made again"
                    kept.put(i, right)
                elif not np.array_equal(found, right):
                    raise AssertionError("other pixels")
            kept.stats()
            kept.summary()
        return refused

    first = opened()
    for i, right in enumerate(pixels):
        first.put(i, right)
    return Reader([path.read_bytes()[: int(first._head["used"])], path.read_bytes()], read)


def index_file(place: Path) -> Reader:
    os.environ["WELLFED_CACHE"] = str(place / "cache")
    source = _tree(place)
    root = os.fsencode(source.root)
    (path,) = (place / "cache/index").iterdir()
    told = Told()

    def read(data: bytes) -> str:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        told.lines.clear()
        found = folder_index.open_index(root, place / "cache/index")
        paths = [
            (found.names[:end], found.folders[i])
            for end, i in zip(found.ends, found.labels, strict=True)
        ]
        assert len(paths) == len(found.labels)
        found.digest()
        pickle.loads(pickle.dumps(found))
        return told.reason()

    return Reader([path.read_bytes()], read)


def shapes_file(place: Path) -> Reader:
    generate = GenerateConfig(classes=2, train_images=2, val_images=2, width=32, height=32)
    data = DataConfig(root=str(place / "tree"), generate=generate)
    shapes.open_shapes(data)
    path = place / "tree/shapes.json"

    def read(content: bytes) -> str:
        path.write_bytes(content)
        try:
            shapes.open_shapes(data)
        except DataError:
            return "DataError"
        return ""

    return Reader([path.read_bytes()], read, mutated_json)
