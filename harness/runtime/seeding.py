"""Derives random numbers from the seed, epoch and sample, never from the worker or time.

All randomness in a sample comes from ``SampleRng(seed, epoch, index)``, so workers, their timing
and tuning cannot change the training data. Torch's global RNGs are only used by the network
(initialization, dropout).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from . import accelerator

# Streams separate uses of one (seed, epoch). Stream 1 is for the order; per-sample and per-batch
# operations have one each.
SAMPLE = 2
BATCH = 3
_INSTEAD = 6
# user functions on samples and on batches
OWN = 8
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


class SampleRng:
    """The random numbers for one sample in one epoch: a seed, epoch < 2**32 and index < 2**48.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) with a keyed initial state.

    A draw is a few integer operations, so ``uniforms`` computes the same numbers for a whole batch;
    seeding ``random.Random`` takes longer than copying a small image.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int, epoch: int, index: int, stream: int = SAMPLE) -> None:
        self._state: int = _mixed((_start(seed, epoch, stream) + index) & _MASK)

    def random(self) -> float:
        """Returns a number in [0, 1)."""
        self._state = (self._state + _GAMMA) & _MASK
        return float((_mixed(self._state) >> 11) * 2.0**-53)

    def uniform(self, low: float, high: float) -> float:
        """Returns a number between ``low`` and ``high``."""
        return low + (high - low) * self.random()

    def randrange(self, stop: int) -> int:
        """Returns an integer from 0 to ``stop`` - 1, for ``stop`` far below 2**53."""
        return int(stop * self.random())


def uniforms(
    seed: int, epoch: int, indices: np.ndarray, draws: int, stream: int = SAMPLE
) -> np.ndarray:
    """Returns the first ``draws`` numbers of each sample's ``SampleRng``, in [0, 1).

    The result is float64 ``[len(indices), draws]``.
    """
    states = _mixed(indices.astype(np.uint64) + np.uint64(_start(seed, epoch, stream)))
    steps = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    drawn: np.ndarray = (_mixed(states[:, None] + steps) >> 11) * 2.0**-53
    return drawn


def instead_of(index: int, length: int) -> list[int]:
    """Returns which of the ``length`` samples to try instead of an unreadable one.

    The samples depend on nothing else, so every worker, rank and epoch tries the same ones.
    """
    rng = SampleRng(0, 0, index, _INSTEAD)
    return [rng.randrange(length) for _ in range(32)]


@lru_cache(maxsize=64)
def _start(seed: int, epoch: int, stream: int) -> Any:
    return _mixed((_mixed(stream) + (seed << 32 | epoch)) & _MASK)


def _mixed(z: Any) -> Any:
    """Mixes the bits of an int, or of each element of a uint64 array."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def order_rng(seed: int, epoch: int, part: int = 0, stream: int = 1) -> np.random.Generator:
    """Returns the generator for an epoch's order (Philox: the same numbers on every platform).

    Each ``part`` of an order and each use of the epoch (``stream``) draws its own random numbers.
    """
    return np.random.Generator(np.random.Philox(stream << 112 | seed << 80 | epoch << 48 | part))


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seeds the global RNGs of Python, numpy and torch, including devices.

    Args:
        seed: the run's seed.
        deterministic: use only deterministic kernels; otherwise, cuDNN benchmarks kernels and
            chooses the fastest.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


@contextmanager
def seeded(seed: int, epoch: int, index: int) -> Iterator[None]:
    """A block in which the host's global RNGs are seeded from a sample's key.


    For code that uses the global RNGs, such as torchvision transforms. No other thread may use them
    in the meantime.
    """
    former = random_state()
    key = SampleRng(seed, epoch, index).randrange(2**32)
    random.seed(key)
    np.random.seed(key)
    # not torch.manual_seed, which also seeds GPUs
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        restore_random_state(former)


def random_state(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Returns all global RNG states, loadable by ``torch.load(weights_only=True)``.

    Includes only the GPU ``device``. All ranks start from the same seed and draw the same numbers,
    so the first rank's state is valid for all.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": kind,
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": position,
            "has_gauss": has_gauss,
            "cached": cached,
        },
        "torch": torch.get_rng_state(),
        "cuda": accelerator.get(device).random_state(),
    }


def restore_random_state(state: dict[str, Any], device: torch.device | str = "cpu") -> None:
    """Restores all global RNG states, including a GPU's, from ``random_state``."""
    random.setstate(state["python"])
    kept = state["numpy"]
    keys = kept["keys"].numpy().astype(np.uint32)
    np.random.set_state((kept["kind"], keys, kept["position"], kept["has_gauss"], kept["cached"]))
    torch.set_rng_state(state["torch"])
    accelerator.get(device).set_random_state(state["cuda"])
