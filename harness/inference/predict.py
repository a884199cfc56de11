"""Runs ``mode=predict``: predicts the classes of all images in a folder, or of one file."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import Config
from ..data.datasets import ImageDataset, Splits, as_evaluated
from ..data.shard_index import open_shards
from ..data.shards import ShardSource
from ..data.storage import FileSource, FolderSource
from ..data.table import TableSource
from ..feed.base import Failure
from ..feed.feeds import Feeds
from ..monitor.console import progress, say
from ..monitor.writer import BAD_SAMPLES, RunWriter, plain
from ..runtime import limits, signals
from ..runtime.distributed import World
from ..runtime.errors import DataError
from ..runtime.files import sheet, write_whole
from ..training.checkpoint_read import Saved
from ..training.step import autocast_of, device_batches
from .loaded import network


def predict(saved: Saved, config: Config, world: World, folder: Path) -> None:
    """Classifies the images in ``data.root``, or in ``data.table``, with the network in ``saved``.

    Every rank calls this and predicts its share. At the end, the first rank writes
    ``predictions.csv``, ``predictions.jsonl`` and the list of unreadable images to ``folder``.

    Raises:
        CheckpointError: the checkpoint does not fit.
        DataError: there are no images, or none can be read.
        Interrupted: a signal arrived.
    """
    model, classes = network(saved, config)
    data = config.data
    root = os.path.expanduser(str(data.root))
    if data.name == "shards":
        source: FileSource | ShardSource = open_shards(root, data, labeled=False)
    elif data.name == "table" or data.table is not None:
        source = TableSource(root, data, labeled=False)
    else:
        source = FolderSource(root, flat=True)
    if len({*world.gathered(source.digest())}) > 1:
        raise DataError(f"data.root={data.root}: ranks see different files")
    dataset = ImageDataset(
        source, as_evaluated(data), data, data.image_size, seed=0, skips=True, blanks=True
    )
    feeds = Feeds(Splits(dataset, dataset, classes, "", "", trains=False), config, world)
    top_k = min(config.predict.top_k, len(classes))
    places, best, failures = zip(*world.gathered(_share(feeds, model, top_k)), strict=True)
    bad = sorted(failure for each in failures for failure in each)
    name = os.path.relpath(folder)
    if world.is_main:
        # left by a failed attempt
        (folder / BAD_SAMPLES).unlink(missing_ok=True)
        with RunWriter(folder, tensorboard=False) as writer:
            for failure in bad:
                writer.bad_sample("prediction", failure.sample, failure.where, failure.reason)
    count = len(source) - len(bad)
    if not count:
        raise DataError(
            f"none of the {len(source)} images can be read; the first is {bad[0].where}: "
            f"{bad[0].reason}; all are listed in {name}/{BAD_SAMPLES}"
        )
    if world.is_main:
        rows = np.concatenate(best)[np.argsort(np.concatenate(places))]
        _write(folder, source, classes, rows, {failure.sample for failure in bad})
    say(f"predicted      {count} of {len(source)} images")
    if bad:
        say(f"bad samples    {len(bad)} cannot be read; listed in {name}/{BAD_SAMPLES}")
    say(f"predictions    {name}/predictions.csv, {name}/predictions.jsonl")


def _share(
    feeds: Feeds, model: nn.Module, top_k: int
) -> tuple[np.ndarray, np.ndarray, list[Failure]]:
    """Returns this rank's predictions.

    These are its images' indices, int64 ``[N]``; float32 ``[N, 2 * top_k]``, the highest
    probabilities followed by their classes; and the unreadable images, whose rows are meaningless.
    """
    config = feeds.config
    device = feeds.world.device
    model.to(device)
    if config.trainer.channels_last:
        model.to(memory_format=torch.channels_last)
    autocast = autocast_of(config.trainer.precision, device)
    settings = feeds.val_settings(feeds.settings(limits.measure(feeds.world.local_size)))
    # kept on the device until the end to avoid synchronization
    best = [torch.zeros(0, 2 * top_k, device=device)]
    with (
        closing(feeds.val(settings)) as feed,
        closing(device_batches(feed, config, device)) as batches,
        progress("predicting", len(feed), "batches") as bar,
        torch.no_grad(),
    ):
        for images, _ in bar.over(batches):
            with autocast():
                logits: Tensor = model(images)
            # class indices are exact in float32 up to 2**24
            best.append(torch.cat(logits.float().softmax(1).topk(top_k), dim=1))
            signals.check()
    places = [np.zeros(0, np.int64), *feed.order.batches(0)]
    return np.concatenate(places), torch.cat(best).cpu().numpy(), list(feed.replaced)


def _write(
    folder: Path,
    source: FileSource | ShardSource,
    classes: tuple[str, ...],
    rows: np.ndarray,
    bad: set[int],
) -> None:
    """Writes ``rows``, one per image of ``source``, except for the ``bad`` ones."""
    ranks = range(1, rows.shape[1] // 2 + 1)
    heads = [f"{name}_{i}" for name in ("class", "probability") for i in ranks]
    table: list[list[Any]] = [[source.key, *heads]]
    lines = []
    for place, row in enumerate(rows):
        if place in bad:
            continue
        values, labels = np.split(row, 2)
        path = source.name(place)
        names = [classes[int(label)] for label in labels]
        # the fewest digits that round-trip to the same float32
        shown = plain([float(str(value)) for value in values])
        table.append([path, *names, *shown])
        lines.append(
            json.dumps({source.key: path, "classes": names, "probabilities": shown}) + "\n"
        )
    for form, content in (("csv", sheet(table)), ("jsonl", "".join(lines))):
        # keep the bytes of non-UTF-8 names
        write_whole(folder / f"predictions.{form}", content.encode("utf-8", "surrogateescape"))
