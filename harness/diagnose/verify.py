"""mode=verify: reads every image once, and lists those that cannot be read."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from harness.data.datasets import AnyDataset
from harness.data.images import ImageDataset
from harness.data.own import OwnDataset
from harness.feed.forms import Feeds
from harness.feed.interface import ARRAYS, THREADS, Failure, FeedSettings, in_form
from harness.runtime import signals
from harness.runtime.errors import DataError
from harness.watch.board import BAD_SAMPLES as FILE
from harness.watch.board import Board
from harness.watch.console import progress, say


def verify(feeds: Feeds, settings: FeedSettings, folder: Path) -> None:
    """Reads both sets by ``settings`` and writes ``bad_samples.jsonl`` anew in ``folder``.

    Every rank calls this, and reads its share. A cache is passed by: files are read. The list is
    written as it grows; other ranks' part comes at the end of a set.

    Raises:
        DataError: an image cannot be read.
        Interrupted: a signal was heard.
    """
    world = feeds.world
    if settings.backend == ARRAYS:
        settings = in_form(settings, THREADS)
    bad: list[Failure] = []
    total = 0
    with ExitStack() as stack:
        board = None
        if world.is_main:
            # of an earlier look
            (folder / FILE).unlink(missing_ok=True)
            board = stack.enter_context(Board(folder, tensorboard=False))
        for name, dataset in (("training", feeds.splits.train), ("validation", feeds.splits.val)):
            began_s = time.perf_counter()
            found = _unreadable(feeds, dataset, settings, name, board)
            bad += found
            total += len(dataset)
            say(
                f"verify: {len(found)} of {len(dataset)} {name} images cannot be read "
                f"({time.perf_counter() - began_s:.1f} s)"
            )
    if bad:
        raise DataError(
            f"{len(bad)} of {total} images cannot be read, the first is {bad[0].where}: "
            f"{bad[0].reason}; all are listed in {os.path.relpath(folder)}/{FILE}"
        )


def _unreadable(
    feeds: Feeds, dataset: AnyDataset, settings: FeedSettings, name: str, board: Board | None
) -> list[Failure]:
    """Returns the samples of ``dataset`` that cannot be read, and has ``board`` list them."""
    if isinstance(dataset, ImageDataset):
        dataset = replace(dataset, cache=None, skips=False)
    elif isinstance(dataset, OwnDataset):
        dataset = replace(dataset, skips=False)
    own: list[Failure] = []

    def note(failures: Iterable[Failure]) -> None:
        if board is not None:
            for failure in failures:
                board.bad_sample(name, failure.sample, failure.where, failure.reason)

    with (
        closing(feeds.whole(dataset, settings)) as feed,
        progress(f"verify: {name} images", len(feed), "batches") as bar,
    ):
        # not by iterating the feed, which ends at the first image that cannot be read
        feed.begin(0)
        for batch in feed.batches_of(0, math.inf):
            signals.check()
            if batch is None:
                continue
            own += batch.failures
            note(batch.failures)
            bar.advance(1)
    # the first rank has listed its own
    first, *others = feeds.world.gathered(own)
    for failures in others:
        note(failures)
    return sorted(itertools.chain(first, *others))
