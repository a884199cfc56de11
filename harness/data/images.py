"""One sample at a time, from its source to a row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.data.cache import PixelCache
from harness.data.decode import DecodeOptions, Undecodable, decode
from harness.data.storage import Source
from harness.data.transforms import TrainTransform
from harness.runtime import parts
from harness.runtime.errors import BadSample, is_out_of_memory
from harness.runtime.seeding import SampleRng
from harness.watch.stages import Lap


@dataclass(eq=False)
class ImageDataset:
    """A source, decoded and transformed; a sample depends on (seed, epoch, index) alone."""

    source: Source
    transform: TrainTransform
    options: DecodeOptions
    image_size: int
    seed: int
    cache: PixelCache | None = None
    # whether a sample that cannot be read is replaced
    skips: bool = False
    # whether black pixels replace it: another one may not be readable either
    blanks: bool = False

    def __len__(self) -> int:
        return len(self.source)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names that ``fill`` gives its laps, in order."""
        return ("read", "decode", *self.transform.stages)

    def fill(
        self,
        epoch: int,
        index: int,
        out: np.ndarray,
        lap: Lap | None = None,
        instead: int | None = None,
    ) -> int:
        """Writes sample ``index`` of ``epoch`` into ``out``; returns its label.

        Several threads may call at once.

        Args:
            epoch: chooses the sample's random numbers, with the index.
            index: place in the source, plus its length each time that an epoch has it again.
            out: uint8 ``[3, image_size, image_size]``.
            lap: called at the end of each of the ``stages``, with its name.
            instead: place of another image to read.

        Raises:
            BadSample: the sample cannot be read, for any reason.
        """
        if instead is not None and self.blanks:
            out[:] = 0
            return 0
        place = index % len(self) if instead is None else instead
        try:
            # looking into the cache is part of the first stage; cached pixels are not decoded
            pixels = None if self.cache is None else self.cache.get(place)
            if pixels is None:
                image, _ = self.source.read(place)
            if lap is not None:
                lap("read")
            if pixels is None:
                pixels = decode(image, self.options) if isinstance(image, bytes) else image
                if self.cache is not None:
                    pixels = self.cache.put(place, pixels)
                if lap is not None:
                    lap("decode")
            self.transform(pixels, SampleRng(self.seed, epoch, index), out, lap)
            return int(self.source.labels[place])
        except Exception as error:
            if isinstance(error, BadSample) or is_out_of_memory(error):
                raise
            # any error: a StopIteration that got out would end a worker's epoch in silence
            reason = str(error) if isinstance(error, Undecodable) else parts.told(error)
            raise BadSample(self.source.where(place), reason) from error
