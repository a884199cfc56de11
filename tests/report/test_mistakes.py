"""Wrong answers: the same for any number of ranks, and equal to scikit-learn's figures."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import nn

from harness.feed.order import Order
from harness.runtime.distributed import World
from harness.training.evaluate import evaluate
from harness.training.pictures import PredictionLog

CPU = World(0, 1, 0, 1, torch.device("cpu"))
CLASSES = 7


def evaluated(ranks: int, batch_size: int) -> tuple[Any, PredictionLog, torch.Tensor, torch.Tensor]:
    """An evaluation on so many ranks; logits and labels of the whole set."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, CLASSES)).eval()
    images = torch.randn(101, 3, 2, 2)
    labels = torch.randint(0, CLASSES, (101,))
    logits = network(images).detach()
    # answers of equal probability
    images[90:] = images[:11]
    logits[90:] = logits[:11]
    gathered: list[Any] = []
    for rank in range(ranks):
        order = Order(101, batch_size, shuffle=False, rank=rank, world_size=ranks)
        kept: list[Any] = []
        batches = [*order.batches(0)]
        if batches:
            result = evaluate(
                network,
                [(images[batch], labels[batch]) for batch in batches],
                CPU,
                contextlib.nullcontext,
                kept,
            )
        all_ranks: Any = SimpleNamespace(gathered=lambda own: gathered.append(own) or gathered)
        answers = PredictionLog.gathered(kept, batches, all_ranks)
    return result, answers, logits, labels


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 16), (1, 101), (2, 8), (3, 8), (3, 60)])
def test_every_rank_count_gives_the_same_answers(ranks: int, batch_size: int) -> None:
    """Labels and answers by index are those of the whole set at once; a rank may have no image."""
    _, answers, logits, labels = evaluated(ranks, batch_size)
    order = np.argsort(answers.indices)
    assert answers.indices[order].tolist() == list(range(101))
    assert answers.labels[order].tolist() == labels.tolist()
    assert answers.given[order].tolist() == logits.argmax(1).tolist()
    assert np.allclose(answers.probabilities[order], logits.softmax(1).amax(1))


def test_confusions_are_scikit_learns() -> None:
    """Kinds of mistakes are the matrix without its diagonal, the most frequent first."""
    result, answers, logits, labels = evaluated(2, 16)
    matrix = confusion_matrix(labels, logits.argmax(1), labels=range(CLASSES))
    found = np.zeros_like(matrix)
    kinds = answers.confused().tolist()
    for label, given, count in kinds:
        found[label, given] = count
    assert np.array_equal(found, matrix - np.diag(matrix.diagonal()))
    assert [kind[2] for kind in kinds] == sorted((kind[2] for kind in kinds), reverse=True)
    result, answers, *_ = evaluated(1, 16)
    assert result.top1 * result.images == matrix.trace()


@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 101), (2, 8), (3, 8)])
def test_the_surest_mistakes_are_those_of_the_whole_set(ranks: int, batch_size: int) -> None:
    """Of equally probable ones the first image comes first, wherever it was evaluated."""
    _, answers, logits, labels = evaluated(ranks, batch_size)
    sure, given = logits.softmax(1).max(1)
    wrong = (given != labels).nonzero().flatten().tolist()
    expected = sorted(wrong, key=lambda i: (-round(float(sure[i]), 5), i))[:24]
    assert answers.indices[answers.surest(24)].tolist() == expected
    assert not {*expected}.isdisjoint(range(90, 101))


def test_answers_change_no_result() -> None:
    """Accuracy and loss are bitwise those where no answer is kept, in bfloat16 too."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8))
    batches = [(torch.randn(16, 3, 2, 2), torch.randint(0, 8, (16,))) for _ in range(5)]
    for dtype in (torch.float32, torch.bfloat16):

        def autocast(dtype: torch.dtype = dtype) -> Any:
            return torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)

        with_it = evaluate(network, batches, CPU, autocast, [])
        assert with_it == evaluate(network, batches, CPU, autocast)


def test_no_mistake_is_none() -> None:
    """A network that is always right, or gives no numbers, has nothing that breaks."""
    nothing = PredictionLog(np.arange(3), np.arange(3), np.arange(3), np.ones(3, np.float32))
    assert nothing.confused().tolist() == [] and len(nothing.surest(24)) == 0
    odd = PredictionLog(
        np.arange(2), np.arange(2), np.zeros(2, int), np.full(2, np.nan, np.float32)
    )
    assert odd.surest(24).tolist() == [1]
