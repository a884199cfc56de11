"""Records as TensorBoard's event files have them, without a Python loop over their bytes."""

from __future__ import annotations

import functools
import struct

import numpy as np

# bytes that are added up together
_BLOCK = 1_024


def framed(data: bytes) -> bytes:
    """Returns ``data`` as one record: length, checksum, ``data``, checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """Returns the CRC-32C of four bytes or more, masked as TensorFlow does it.

    The CRC is linear: a block's is the sum of what each byte gives by its place. What comes before
    the block, at the beginning 32 ones, is added to its first four bytes; zeros before all of it
    add nothing.
    """
    padded = np.zeros(-(-len(data) // _BLOCK) * _BLOCK, np.uint8)
    own = padded[-len(data) :]
    own[:] = np.frombuffer(data, np.uint8)
    own[:4] ^= 255
    crc = 0
    for block in padded.reshape(-1, _BLOCK):
        block[:4] ^= np.frombuffer(struct.pack("<I", crc), np.uint8)
        crc = int(np.bitwise_xor.reduce(_table()[np.arange(_BLOCK), block]))
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


@functools.cache
def _table() -> np.ndarray:
    """Returns what each byte gives, uint32 ``[places, 256]``; the last place is a block's end."""
    byte: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        # Castagnoli's polynomial, its bits reversed
        byte = byte >> 1 ^ (byte & 1) * 0x82F63B78
    places = [byte]
    for _ in range(_BLOCK - 1):
        places.append(places[-1] >> 8 ^ byte[places[-1] & 255])
    return np.stack(places[::-1])
