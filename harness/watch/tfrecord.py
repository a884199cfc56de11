"""Records as TensorBoard's event files have them, without a Python loop over their bytes."""

from __future__ import annotations

import functools
import struct
from itertools import pairwise

import numpy as np

# bytes; masks of megabytes would take seconds to make
_BLOCK = 4_096


def framed(data: bytes) -> bytes:
    """Returns ``data`` as one record: length, checksum, ``data``, checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C of four bytes or more, masked as TensorFlow does it.

    The CRC is linear: each of its bits is the parity of some of the bits of a block. What comes
    before the block, at the beginning 32 ones, is added to its first 32 bits.
    """
    crc = 0xFFFFFFFF
    # the first block has what is left over, and four bytes at least
    ends = range((len(data) - 4) % _BLOCK + 4, len(data) + 1, _BLOCK)
    for start, end in pairwise((0, *ends)):
        message = int.from_bytes(data[start:end])
        message ^= int.from_bytes(crc.to_bytes(4, "little")) << 8 * (end - start) - 32
        crc = 0
        for mask in _masks((8 * (end - start)).bit_length()):
            crc = crc << 1 | (message & mask).bit_count() & 1
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


@functools.cache
def _masks(size: int) -> list[int]:
    """Returns for each bit of a checksum which message bits count for it.

    The last ``2**size`` bits of a message; the highest bit of the checksum comes first.
    """
    # Castagnoli's, its bits reversed
    polynomial = 0x82F63B78
    adds = [polynomial]
    while len(adds) < 1 << size:
        adds.append(adds[-1] >> 1 ^ (adds[-1] & 1) * polynomial)
    chosen = np.array(adds) >> np.arange(31, -1, -1)[:, None] & 1
    return [int.from_bytes(bits.tobytes(), "little") for bits in np.packbits(chosen, axis=1)]
