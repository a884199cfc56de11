"""Sample by sample, from where it lies to a row of a batch."""

from __future__ import annotations

import numpy as np

from harness.data.cache import PixelCache
from harness.data.decode import DecodeOptions, Undecodable, decode
from harness.data.storage import Source
from harness.data.transforms import Transform
from harness.runtime.errors import BadSample
from harness.runtime.seeding import SampleRng
from harness.watch.stages import Lap


class ImageDataset:
    """A source, decoded and transformed to ``image_size`` pixels; a sample depends on (seed, epoch,
    index) alone.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        options: DecodeOptions,
        image_size: int,
        seed: int,
        cache: PixelCache | None = None,
    ) -> None:
        self.source = source
        self.transform = transform
        self.options = options
        self.cache = cache
        self.image_size = image_size
        self.seed = seed
        # the names that ``fill`` gives its laps, in order
        self.stages = ("read", "decode", *transform.stages)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def classes(self) -> tuple[str, ...]:
        """As in ``Source``."""
        return self.source.classes

    @property
    def labels(self) -> np.ndarray:
        """As in ``Source``, which may hold them in memory that workers share: they are not sent to
        each of them.
        """
        return self.source.labels

    def where(self, i: int) -> str:
        """As in ``Source``."""
        return self.source.where(i)

    def fill(self, epoch: int, index: int, out: np.ndarray, lap: Lap | None = None) -> int:
        """Write sample ``index`` as of ``epoch`` into ``out``, uint8 ``[3, image_size,
        image_size]``; returns its label.

        ``lap`` is called at the end of each of the ``stages``, with its name. Several threads may
        call at once.

        Raises:
            BadSample: the sample cannot be read, whatever the reason.
        """
        assert 0 <= index < len(self.source.labels)
        assert out.dtype == np.uint8 and out.shape == (3, self.image_size, self.image_size)
        try:
            # looking into the cache is part of the first stage, and what the cache has is not
            # decoded
            pixels = self.cache.get(index) if self.cache is not None else None
            image = self.source.read(index)[0] if pixels is None else pixels
            if lap is not None:
                lap("read")
            if pixels is None:
                pixels = decode(image, self.options) if isinstance(image, bytes) else image
                if self.cache is not None:
                    pixels = self.cache.put(index, pixels)
                if lap is not None:
                    lap("decode")
            self.transform(pixels, SampleRng(self.seed, epoch, index), out, lap)
            return int(self.labels[index])
        except (BadSample, MemoryError):
            raise
        except Exception as error:
            # a StopIteration that got out would end a worker's epoch in silence
            reason = (
                str(error) if isinstance(error, Undecodable) else f"{type(error).__name__}: {error}"
            )
            raise BadSample(self.where(index), reason) from error
