"""Keyed randomness and the global random states."""

from __future__ import annotations

import io
import itertools
import random

import numpy as np
import pytest
import samples
import torch

from harness.runtime.seeding import order_rng, random_state, restore_random_state, sample_rng, seed_everything


def test_the_streams_are_frozen() -> None:
    """One key is one stream on every machine and in every version: a change here changes every resumed run."""
    assert sample_rng(0, 1, 2).random() == 0.43567777632469173
    assert sample_rng(2**32 - 1, 7, 12345).random() == 0.9382183276062166
    assert order_rng(0, 1).permutation(8).tolist() == [2, 0, 1, 7, 3, 4, 6, 5]


def test_no_two_keys_share_a_stream() -> None:
    """Every (seed, epoch, index) from small and extreme numbers begins with draws of its own."""
    numbers = (0, 1, 2, 255, 2**31, 2**32 - 1)
    keys = list(itertools.product(numbers, numbers, (*numbers, 2**48 - 1)))
    assert len({sample_rng(*key).getrandbits(128) for key in keys}) == len(keys)


def test_order_and_samples_do_not_share_a_stream() -> None:
    """The epoch's order is drawn from another stream than the sample 0 of the same seed and epoch."""
    assert order_rng(3, 4).bytes(16) != sample_rng(3, 4, 0).randbytes(16)


def test_the_order_differs_by_seed_and_epoch() -> None:
    """Each (seed, epoch) shuffles in its own way."""
    orders = {tuple(order_rng(*key).permutation(20)) for key in itertools.product(range(4), repeat=2)}
    assert len(orders) == 16


@pytest.mark.parametrize("key", [(-1, 0, 0), (2**32, 0, 0), (0, 2**32, 0), (0, 0, 2**48), (0, -1, 0)])
def test_a_key_out_of_range_is_refused(key: tuple[int, int, int]) -> None:
    """Numbers that would run into each other are a fault of ours."""
    with pytest.raises(AssertionError):
        sample_rng(*key)


def test_seed_everything_seeds_every_generator() -> None:
    """Python's, numpy's and torch's generators repeat after the same seed."""
    seed_everything(5)
    first = samples.draw()
    seed_everything(5)
    assert samples.draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(samples.draw(), first, strict=True))


def test_random_states_survive_a_checkpoint() -> None:
    """random_state passes through torch.load(weights_only=True), and restoring it repeats every generator's numbers."""
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.randn()
    buffer = io.BytesIO()
    torch.save(random_state(), buffer)
    expected = [samples.draw(), random.gauss(0, 1), np.random.randn()]
    buffer.seek(0)
    restore_random_state(torch.load(buffer, weights_only=True))
    assert [samples.draw(), random.gauss(0, 1), np.random.randn()] == expected
