"""Parts of JPEGs: the pixels of the whole, and only of files that were decoded whole."""

from __future__ import annotations

import io
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import samples
import simplejpeg
import torch
from pictures import encoded, photo
from PIL import Image
from xxhash import xxh3_64_intdigest

from harness.config import Config, DataConfig, LoaderConfig
from harness.data import libraries
from harness.data.datasets import ImageDataset, Splits
from harness.data.decode import decode
from harness.data.storage import FolderSource
from harness.data.transforms import CropTransform
from harness.data.whole import open_whole
from harness.feed.base import THREADS
from harness.feed.feeds import Feeds
from harness.runtime.distributed import World
from harness.runtime.errors import BadSample

pytestmark = pytest.mark.skipif(
    "parts of JPEG" not in libraries.in_use(), reason="needs libjpeg-turbo 3: the package turbojpeg"
)
OPTIONS = DataConfig(exif_orientation=True)
WIDTH, HEIGHT = 333, 251
CPU = World(0, 1, 0, 1, torch.device("cpu"))


def jpeg(subsampling: str = "420", **options: object) -> bytes:
    image = photo(WIDTH, HEIGHT)
    if options:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", **{"quality": 90, **options})
        return buffer.getvalue()
    pixels = np.ascontiguousarray(image)
    if subsampling == "Gray":
        return simplejpeg.encode_jpeg(pixels[..., :1].copy(), 90, "GRAY", "Gray")
    return simplejpeg.encode_jpeg(pixels, 90, "RGB", subsampling)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "Gray"])
def test_a_part_has_the_pixels_of_the_whole(subsampling: str) -> None:
    data = jpeg(subsampling)
    whole = decode(data, OPTIONS)
    draws = random.Random(subsampling)
    for _ in range(40):
        box = draws.randrange(WIDTH), draws.randrange(HEIGHT)
        box += draws.randint(1, WIDTH - box[0]), draws.randint(1, HEIGHT - box[1])
        found = libraries.decode_jpeg_part(data, lambda width, height, box=box: box)
        assert found is not None
        pixels, (x, y, w, h) = found
        left, top, *sides = box
        assert [w, h] == sides
        wanted = whole[top : top + h, left : left + w]
        assert np.array_equal(pixels[y : y + h, x : x + w], wanted), box


@pytest.mark.parametrize(
    "data",
    [jpeg(progressive=True), encoded(photo(99, 99)), jpeg()[:100], b""],
    ids=["progressive", "small", "header alone", "empty"],
)
def test_other_images_are_left_whole(data: bytes) -> None:
    assert libraries.decode_jpeg_part(data, pytest.fail) is None


def test_what_is_above_the_part_must_be_whole() -> None:
    with pytest.raises(ValueError, match="libjpeg-turbo"):
        libraries.decode_jpeg_part(jpeg()[:9000], lambda width, height: (0, 0, width, height))


def folder(root: Path, *files: bytes) -> FolderSource:
    (root / "a").mkdir(parents=True)
    for i, data in enumerate(files):
        (root / "a" / f"{i}.jpg").write_bytes(data)
    return FolderSource(root)


def filled(source: FolderSource, epoch: int, whole: bool = True) -> list[np.ndarray]:
    known = open_whole(source, OPTIONS) if whole else None
    images = ImageDataset(source, CropTransform(64), OPTIONS, 64, 5, whole=known)
    found = []
    for i in range(len(source)):
        out = np.empty((3, 64, 64), np.uint8)
        images.fill(epoch, i, out)
        found.append(out)
    return found


def test_crops_are_the_same_from_the_second_epoch_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    decode_part = libraries.decode_jpeg_part

    def counted(*arguments: object) -> object:
        parts.append(decode_part(*arguments))
        return parts[-1]

    monkeypatch.setattr("harness.data.datasets.decode_jpeg_part", counted)
    turned = Image.Exif()
    turned[274] = 6
    source = folder(
        tmp_path, jpeg(), jpeg("444"), jpeg(exif=Image.Exif()), jpeg(exif=turned), jpeg(comment="c")
    )
    for epoch in (0, 1, 2):
        plain = filled(source, epoch, whole=False)
        assert np.array_equal(filled(source, epoch), plain)
    # all but the one that is turned, which is not asked for
    assert [part is not None for part in parts] == 8 * [True]


def test_a_file_that_changed_is_decoded_whole(tmp_path: Path) -> None:
    source = folder(tmp_path, jpeg())
    data = (tmp_path / "a" / "0.jpg").read_bytes()
    filled(source, 0)
    known = open_whole(source, OPTIONS)
    assert known is not None and known.has(0, xxh3_64_intdigest(data))
    # missing below any part
    (tmp_path / "a" / "0.jpg").write_bytes(data[:-200])
    for epoch in (1, 2):
        with pytest.raises(BadSample, match="JPEG"):
            filled(source, epoch)


def test_probes_decode_parts_and_the_same_pixels(tmp_path: Path) -> None:
    """Tuning measures what loading costs from the second epoch on."""
    source = folder(tmp_path, *[jpeg(quality=90 - i) for i in range(8)])
    known = open_whole(source, OPTIONS)
    images = ImageDataset(source, CropTransform(64), OPTIONS, 64, 5, whole=known)
    config = Config(loader=LoaderConfig(batch_size=4))
    feeds = Feeds(Splits(images, images, ("a",), "x", ""), config, CPU)
    settings = samples.settings(2, backend=THREADS)
    with closing(feeds.probe(settings)) as feed:
        probed = next(iter(feed))
    # nothing was decoded whole for it
    assert known is not None and not any(
        known.has(i, xxh3_64_intdigest(source.read(i)[0])) for i in range(8)
    )
    with closing(feeds.train(settings)) as feed:
        trained = {
            int(i): image
            for batch in feed
            for i, image in zip(batch.indices, batch.images, strict=True)
        }
    assert all(known.has(i, xxh3_64_intdigest(source.read(i)[0])) for i in range(8))
    for i, image in zip(probed.indices, probed.images, strict=True):
        assert torch.equal(image, trained[int(i)])
