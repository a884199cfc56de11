"""mode=verify: reads every image once, and lists those that cannot be read."""

from __future__ import annotations

import math
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from harness.data.images import ImageDataset
from harness.feed.forms import Feeds
from harness.feed.interface import ARRAYS, THREADS, Failure, FeedSettings, in_form
from harness.runtime import signals
from harness.runtime.errors import DataError
from harness.watch.board import Board
from harness.watch.console import progress, say


def verify(feeds: Feeds, settings: FeedSettings, folder: Path) -> None:
    """Reads both sets by ``settings`` and writes ``bad_samples.jsonl`` in ``folder``.

    Every rank calls this, and reads its share. A cache is passed by: files are read.

    Raises:
        DataError: an image cannot be read.
        Interrupted: a signal was heard.
    """
    world = feeds.world
    if settings.backend == ARRAYS:
        settings = in_form(settings, THREADS)
    bad: dict[str, list[Failure]] = {}
    total = 0
    for name, dataset in (("training", feeds.splits.train), ("validation", feeds.splits.val)):
        if isinstance(dataset, ImageDataset):
            dataset = replace(dataset, cache=None)
        own: list[Failure] = []
        began_s = time.perf_counter()
        with (
            closing(feeds.whole(dataset, settings)) as feed,
            progress(f"verify: {name} images", len(feed), "batches") as bar,
        ):
            # not by iterating the feed, which ends at the first image that cannot be read
            for batch in feed.batches_of(0, False, math.inf):
                signals.check()
                if batch is not None:
                    own += batch.failures
                    bar.advance(1)
        bad[name] = [failure for of_rank in world.gathered(own) for failure in of_rank]
        total += len(dataset)
        say(
            f"verify: {len(bad[name])} of {len(dataset)} {name} images cannot be read "
            f"({time.perf_counter() - began_s:.1f} s)"
        )
    count = sum(map(len, bad.values()))
    if not count:
        return
    if world.is_main:
        with Board(folder, tensorboard=False) as board:
            for name, failures in bad.items():
                for failure in sorted(failures):
                    board.bad_sample(name, failure.sample, failure.where, failure.reason)
    first = next(failure for failures in bad.values() for failure in sorted(failures))
    raise DataError(
        f"{count} of {total} images cannot be read, the first is {first.where}: {first.reason}; "
        f"all are listed in {os.path.relpath(folder)}/bad_samples.jsonl"
    )
