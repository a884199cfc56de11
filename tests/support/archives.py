"""Archives in CIFAR's published form, with few rows."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CIFAR10 = "cifar-10-python.tar.gz"
CIFAR100 = "cifar-100-python.tar.gz"
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

Pickled = Callable[[object], bytes]


def py2_pickle(value: object) -> bytes:
    """Returns ``value`` as Python 2 pickled it in protocol 2.

    Its strings are bytes, and numpy's modules have their old names.
    """
    return b"\x80\x02" + _py2(value) + b"."


def _py2(value: object) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_py2(key) + _py2(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_py2, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_py2, value)) + b"t"
    if isinstance(value, np.ndarray):
        dtype = (
            b"cnumpy\ndtype\n"
            + _py2(("u1", 0, 1))
            + b"R"
            + _py2((3, "|", None, None, None, -1, -1, 0))
            + b"b"
        )
        made = (
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
            + _py2((0,))
            + _py2("b")
            + b"tR"
        )
        return (
            made
            + b"("
            + _py2(1)
            + _py2(value.shape)
            + dtype
            + _py2(False)
            + _py2(value.tobytes())
            + b"tb"
        )
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return b"T" + struct.pack("<i", len(raw)) + raw
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    assert value is None
    return b"N"


def pictures(rows: int, classes: int, seed: int) -> tuple[NDArray[np.uint8], list[int]]:
    """Returns noise in a color for each class, uint8 ``[rows, 3072]``, and the labels.

    Planes come in CIFAR's order.
    """
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % classes
    colors = np.random.default_rng(classes).integers(60, 196, (classes, 3))
    noise = rng.integers(-60, 60, (rows, 3, 1024))
    return (colors[labels][:, :, None] + noise).astype(np.uint8).reshape(
        rows, 3072
    ), labels.tolist()


def cifar10_batches(rows: int = 20, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The content of each member of CIFAR-10, with ``rows`` images in each of the six batches."""
    members: dict[str, dict[str, Any]] = {
        "batches.meta": {
            "num_cases_per_batch": rows,
            "label_names": list(CIFAR10_CLASSES),
            "num_vis": 3072,
        }
    }
    for i, name in enumerate(
        (
            "data_batch_1",
            "data_batch_2",
            "data_batch_3",
            "data_batch_4",
            "data_batch_5",
            "test_batch",
        )
    ):
        data, labels = pictures(rows, 10, seed * 6 + i)
        filenames = [f"picture_{row}.png" for row in range(rows)]
        members[name] = {
            "batch_label": f"batch {i}",
            "labels": labels,
            "data": data,
            "filenames": filenames,
        }
    return {f"cifar-10-batches-py/{name}": content for name, content in members.items()}


def write_cifar10(
    folder: Path, rows: int = 20, seed: int = 0, pickled: Pickled = py2_pickle
) -> str:
    """Write ``cifar-10-python.tar.gz`` into ``folder``; returns its MD5 for ``data.md5``."""
    return write_members(
        folder / CIFAR10,
        {name: pickled(part) for name, part in cifar10_batches(rows, seed).items()},
    )


def write_cifar100(folder: Path, rows: int = 200, seed: int = 0) -> str:
    """Write ``cifar-100-python.tar.gz`` into ``folder``; returns its MD5 for ``data.md5``."""
    members = {
        "meta": py2_pickle(
            {
                "fine_label_names": [f"class_{label:02}" for label in range(100)],
                "coarse_label_names": ["thing"] * 20,
            }
        )
    }
    for i, name in enumerate(("train", "test")):
        data, labels = pictures(rows, 100, seed * 2 + i)
        coarse = [label // 5 for label in labels]
        members[name] = py2_pickle({"fine_labels": labels, "coarse_labels": coarse, "data": data})
    return write_members(
        folder / CIFAR100,
        {f"cifar-100-python/{name}": content for name, content in members.items()},
    )


def write_members(archive: Path, members: Mapping[str, bytes]) -> str:
    """Writes a ``.tar.gz`` of these files, and returns its MD5."""
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
