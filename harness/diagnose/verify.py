"""Runs ``mode=verify``: reads every image once and lists the unreadable ones."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from ..data.datasets import AnyDataset, ImageDataset
from ..data.own import OwnDataset
from ..feed.base import ARRAYS, THREADS, Failure, FeedSettings
from ..feed.feeds import Feeds
from ..monitor.console import progress, say
from ..monitor.writer import BAD_SAMPLES as FILE
from ..monitor.writer import RunWriter
from ..runtime import signals
from ..runtime.errors import DataError


def verify(
    feeds: Feeds, sets: Mapping[str, AnyDataset], settings: FeedSettings, folder: Path
) -> None:
    """Reads all ``sets`` with ``settings`` and rewrites ``bad_samples.jsonl`` in ``folder``.

    Every rank calls this and reads its share. Caches are bypassed. A set's list is written
    once the set is complete.

    Raises:
        DataError: an image cannot be read.
        Interrupted: a signal was received.
    """
    if settings.backend == ARRAYS:
        settings = replace(settings, backend=THREADS)
    bad: list[Failure] = []
    total = 0
    is_main = feeds.world.is_main
    if is_main:
        # from an earlier run
        (folder / FILE).unlink(missing_ok=True)
    with RunWriter(folder, tensorboard=False) if is_main else nullcontext() as writer:
        for name, dataset in sets.items():
            began_s = time.perf_counter()
            images = f"{name} images".lstrip()
            found = _unreadable(feeds, dataset, settings, images)
            if writer is not None:
                for failure in found:
                    writer.bad_sample(name, failure.sample, failure.where, failure.reason)
            bad += found
            total += len(dataset)
            say(
                f"verify: {len(found)} of {len(dataset)} {images} cannot be read "
                f"({time.perf_counter() - began_s:.1f} s)"
            )
    if bad:
        raise DataError(
            f"{len(bad)} of {total} images cannot be read; the first is {bad[0].where}: "
            f"{bad[0].reason}; all are listed in {os.path.relpath(folder)}/{FILE}"
        )


def _unreadable(
    feeds: Feeds, dataset: AnyDataset, settings: FeedSettings, images: str
) -> list[Failure]:
    """Returns the unreadable samples in ``dataset``, from all ranks."""
    if isinstance(dataset, ImageDataset):
        dataset = replace(dataset, cache=None, skips=False, whole=None, own=None)
    elif isinstance(dataset, OwnDataset):
        dataset = replace(dataset, skips=False)
    own: list[Failure] = []
    with (
        closing(feeds.val(settings, dataset)) as feed,
        progress(f"verify: {images}", len(feed), "batches") as bar,
    ):
        for batch in feed.polled(math.inf, check=False):
            signals.check()
            if batch is not None:
                own += batch.failures
                bar.advance(1)
    return sorted(itertools.chain(*feeds.world.gathered(own)))
