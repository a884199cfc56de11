"""Randomness that depends on what is computed, never on who computes it or when.

Everything random about a sample comes from ``sample_rng(seed, epoch, index)``, so that workers, order of arrival and
tuning cannot change what the model sees. Torch's global generators serve the network alone (initialisation, dropout).
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

_ORDER = 1  # streams: two uses of one (seed, epoch) must not share random numbers
_SAMPLE = 2


def sample_rng(seed: int, epoch: int, index: int) -> random.Random:
    """The generator of one sample in one epoch.

    The three numbers are packed without overlap into one integer, which ``random.Random`` spreads over its whole state
    (MT19937's ``init_by_array``), so that no two samples share a stream.
    """
    return random.Random(_packed(_SAMPLE, seed, epoch, index))


def order_rng(seed: int, epoch: int) -> np.random.Generator:
    """The generator of an epoch's sample order (Philox: the same numbers on every platform)."""
    return np.random.Generator(np.random.Philox(_packed(_ORDER, seed, epoch, 0)))


def _packed(stream: int, seed: int, epoch: int, index: int) -> int:
    assert 0 <= seed < 2**32 and 0 <= epoch < 2**32 and 0 <= index < 2**48
    return (stream << 112) | (seed << 80) | (epoch << 48) | index


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's global generators, those of all devices among them.

    Args:
        seed: the run's seed.
        deterministic: let torch use deterministic kernels only; else cuDNN may choose its kernels by trying them.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """All global random states as plain containers and tensors, which ``torch.load(weights_only=True)`` accepts.

    Of the GPUs it holds ``device`` alone. Ranks start from one seed and draw alike, so the first rank's state serves all.
    """
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Set all global random states, and that of ``device`` if it is a GPU, to what ``random_state`` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy_state["kind"], keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]))
    torch.set_rng_state(state["torch"])
    if device is not None and device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
