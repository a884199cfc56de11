"""Keyed randomness and the global random states."""

from __future__ import annotations

import io
import itertools
import random

import numpy as np
import samples
import torch

from harness.runtime.seeding import (
    BATCH,
    SampleRng,
    order_rng,
    random_state,
    restore_random_state,
    seed_everything,
    uniforms,
)


def test_the_streams_are_frozen() -> None:
    """One key is one stream on every machine and in every version: a change here changes every
    resumed run.
    """
    assert SampleRng(0, 1, 2).random() == 0.33807151412286607
    assert SampleRng(2**32 - 1, 7, 12345).random() == 0.3800650928249607
    assert order_rng(0, 1).permutation(8).tolist() == [2, 0, 1, 7, 3, 4, 6, 5]


def draws(*key: int) -> tuple[float, ...]:
    rng = SampleRng(*key)
    return tuple(rng.random() for _ in range(3))


def test_no_two_keys_share_a_stream() -> None:
    """Every (seed, epoch, index) from small and extreme numbers begins with draws of its own."""
    numbers = (0, 1, 2, 255, 2**31, 2**32 - 1)
    keys = list(itertools.product(numbers, numbers, (*numbers, 2**48 - 1)))
    assert len({draws(*key) for key in keys}) == len(keys)
    assert len({draws(0, 0, index)[0] for index in range(20_000)}) == 20_000


def test_what_is_done_to_batches_draws_from_another_stream() -> None:
    """A sample's own numbers and those of batch-wise work on it have nothing in common."""
    assert not {*draws(0, 1, 2)} & {*draws(0, 1, 2, BATCH)}


def test_a_batch_draws_what_its_samples_draw() -> None:
    """``uniforms`` gives bit for bit each sample's own numbers, wherever the sample lies in the
    batch.
    """
    indices = np.array([5, 0, 2**48 - 1, 17])
    assert uniforms(3, 4, indices, 3).tolist() == [
        list(draws(3, 4, index)) for index in indices.tolist()
    ]
    assert uniforms(3, 4, indices, 1, BATCH)[3, 0] == SampleRng(3, 4, 17, BATCH).random()


def test_draws_are_uniform() -> None:
    """The numbers of many samples fill [0, 1) evenly, draw by draw and in pairs (chi square, 0.1
    %).
    """
    found = uniforms(0, 1, np.arange(50_000), 2)
    assert found.min() >= 0 and found.max() < 1
    for values in (*found.T, found[:, 0] * 16 % 1, (found[:, 0] + found[:, 1]) % 1):
        counts = np.histogram(values, 100, (0, 1))[0]
        assert ((counts - 500) ** 2 / 500).sum() < 149  # 99 degrees of freedom


def test_seed_everything_seeds_every_generator() -> None:
    """Python's, numpy's and torch's generators repeat after the same seed."""
    seed_everything(5)
    first = samples.draw()
    seed_everything(5)
    assert samples.draw() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(samples.draw(), first, strict=True))


def test_random_states_survive_a_checkpoint() -> None:
    """random_state passes through torch.load(weights_only=True), and restoring it repeats every
    generator's numbers.
    """
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.randn()
    buffer = io.BytesIO()
    torch.save(random_state(), buffer)
    expected = [samples.draw(), random.gauss(0, 1), np.random.randn()]
    buffer.seek(0)
    restore_random_state(torch.load(buffer, weights_only=True))
    assert [samples.draw(), random.gauss(0, 1), np.random.randn()] == expected
