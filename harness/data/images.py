"""Sample by sample, from where it lies to a row of a batch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from harness.data.decode import DecodeOptions, decode
from harness.data.storage import Source
from harness.data.transforms import Transform
from harness.runtime.errors import BadSample
from harness.runtime.seeding import SampleRng
from harness.watch.stages import Lap


class DecodedCache(Protocol):
    """Keeps decoded pixels, uint8 ``[H, W, 3]``, by sample; several threads and processes may call at once."""

    def get(self, i: int) -> np.ndarray | None:
        """The pixels of sample ``i``, read-only, where it has them."""

    def put(self, i: int, pixels: np.ndarray) -> np.ndarray:
        """What to go on with in place of ``pixels``, of which it keeps a copy where there is room."""


class ImageDataset:
    """A source, decoded and transformed to ``image_size`` pixels; a sample depends on (seed, epoch, index) alone."""

    def __init__(
        self,
        source: Source,
        transform: Transform,
        options: DecodeOptions,
        image_size: int,
        seed: int,
        cache: DecodedCache | None = None,
    ) -> None:
        self.source, self.transform, self.options, self.cache = source, transform, options, cache
        self.image_size, self.seed = image_size, seed
        self.stages = ("read", "decode", *transform.stages)  # the names that ``fill`` gives its laps, in order

    def __len__(self) -> int:
        return len(self.source)

    @property
    def classes(self) -> tuple[str, ...]:
        """As in ``Source``."""
        return self.source.classes

    @property
    def labels(self) -> np.ndarray:
        """As in ``Source``, which may hold them in memory that workers share: they are not sent to each of them."""
        return self.source.labels

    def where(self, i: int) -> str:
        """As in ``Source``."""
        return self.source.where(i)

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        """The label of sample ``index``, whose pixels in ``epoch`` go into ``out``, uint8 ``[3, image_size, image_size]``.

        Where there is a ``lap``, it is called at the end of each of the ``stages``. Several threads may call at once.

        Raises:
            BadSample: the sample cannot be read, whatever the reason.
        """
        assert 0 <= index < len(self.source)
        assert out.dtype == np.uint8 and out.shape == (3, self.image_size, self.image_size)
        try:
            self.transform(self._pixels(index, lap), SampleRng(self.seed, epoch, index), out, lap)
            return int(self.labels[index])
        except (BadSample, MemoryError):  # no sample's fault
            raise
        except Exception as error:  # a StopIteration that got out would end a worker's epoch in silence
            raise BadSample(self.where(index), f"{type(error).__name__}: {error}") from error

    def _pixels(self, index: int, lap: Lap | None) -> np.ndarray:
        """The whole image; one that the cache has is not decoded, and looking for it is part of ``read``."""
        pixels = self.cache.get(index) if self.cache is not None else None
        image = self.source.read(index)[0] if pixels is None else pixels
        if lap is not None:
            lap("read")
        if pixels is None:
            pixels = decode(image, self.where(index), self.options) if isinstance(image, bytes) else image
            if self.cache is not None:
                pixels = self.cache.put(index, pixels)
            if lap is not None:
                lap("decode")
        return pixels
