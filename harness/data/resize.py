"""The one resize of the project: bilinear and antialiased as Pillow's, on uint8, from a part of an image into a batch.

It is the kernel of torch's ``interpolate``, given its result's memory: the private name saves a copy, the public one serves
where it is missing. On ``[H, W, 3]`` in order the kernel runs in the thread that calls it and without the interpreter lock;
whatever else is to be copied is copied by numpy, for torch would begin a team of threads for each that decodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

Box = tuple[int, int, int, int]  # left, top, width and height in pixels
_Kernel = Callable[[np.ndarray, np.ndarray], None]  # from uint8 [h, w, 3] into uint8 [H, W, 3], both contiguous


def resize_into(pixels: np.ndarray, box: Box, out: np.ndarray, flip: bool = False, size: tuple[int, int] | None = None) -> None:
    """Write part ``box`` of ``pixels``, uint8 ``[H, W, 3]``, resized, into ``out``, uint8 ``[3, S, S]`` of any strides.

    The filter does not reach over the edge of the box. Strides as of a row of a channels_last batch are the quickest.

    Args:
        pixels: the image.
        box: the part of it.
        out: where the result goes.
        flip: mirror it, left and right.
        size: width and height to give the box, at least S each, of which ``out`` gets the centre; None: S each.
    """
    left, top, width, height = box
    part, rows = pixels[top : top + height, left : left + width], out.transpose(1, 2, 0)
    side = len(rows)
    new_width, new_height = size or (side, side)
    assert min(new_width, new_height) >= side
    if rows.flags.c_contiguous and not flip and new_width == new_height == side and part.shape != rows.shape:
        _kernel(_plain(part), rows)
        return
    x, y = round((new_width - side) / 2), round((new_height - side) / 2)
    result = resized(part, new_width, new_height)[y : y + side, x : x + side]
    if flip:
        mirror_into(result, rows)
    else:
        rows[...] = result


def mirror_into(pixels: np.ndarray, out: np.ndarray) -> None:
    """Write ``pixels``, uint8 ``[..., H, W, 3]``, mirrored left and right into ``out``, other memory of that shape."""
    for channel in range(3):  # in a quarter of the time of all three at once
        out[..., channel] = pixels[..., ::-1, channel]


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """``pixels``, uint8 ``[H, W, 3]``, as ``[height, width, 3]``; what has that size already is returned as it is."""
    if pixels.shape == (height, width, 3):
        return pixels
    result = np.empty((height, width, 3), np.uint8)
    _kernel(_plain(pixels), result)
    return result


def _plain(pixels: np.ndarray) -> np.ndarray:
    """Contiguous, for the kernel knows no strides, and writable, for torch warns of memory that is not."""
    return pixels if pixels.flags.c_contiguous and pixels.flags.writeable else pixels.copy()


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None])  # numpy turns axes in a third of torch's time


def _into(source: np.ndarray, target: np.ndarray) -> None:
    resize = torch.ops.aten._upsample_bilinear2d_aa.out
    resize(_tensor(source), target.shape[:2], False, None, None, out=_tensor(target))


def _anew(source: np.ndarray, target: np.ndarray) -> None:
    result = F.interpolate(_tensor(source), target.shape[:2], mode="bilinear", antialias=True)
    target[...] = result[0].permute(1, 2, 0).numpy()


def _chosen() -> _Kernel:
    """The kernel that writes where it is told, or where this torch has none of that name, or another one, the public one."""
    source, targets = np.arange(75, dtype=np.uint8).reshape(5, 5, 3), np.zeros((2, 3, 3, 3), np.uint8)
    _anew(source, targets[0])
    try:
        _into(source, targets[1])
    except (AttributeError, RuntimeError, TypeError):
        return _anew
    return _into if np.array_equal(*targets) else _anew


_kernel = _chosen()
