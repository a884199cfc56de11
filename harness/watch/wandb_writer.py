"""Sends figures to Weights & Biases, by a thread of its own: training never waits for them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from harness.config import Config, Wandb, to_plain
from harness.runtime.errors import printable, words
from harness.runtime.files import read_regular, write_whole
from harness.runtime.folder import log
from harness.watch.board import Writer
from harness.watch.console import say

# the longest waits for the service at the start and at the end
_BEGIN_S = 30.0
_END_S = 15.0
# in the run's folder: the name of its run in Weights & Biases
_ID = "wandb_id"


class WandbWriter(Writer):
    """A run in Weights & Biases, whose files are in ``folder/wandb``.

    What fails there is one warning. A run that goes on from a checkpoint (``goes_on``) goes on with
    the run that ``folder`` names, if it names one; steps that are there already stay as they are.
    """

    def __init__(self, folder: Path, config: Config, goes_on: bool) -> None:
        self._tasks: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = Thread(
            target=self._work, args=(folder, config, goes_on), name="wandb", daemon=True
        )
        self._thread.start()

    def scalars(self, step: int, figures: Mapping[str, float]) -> None:
        """As in ``Writer``."""
        self._tasks.put(lambda run: step < run.step or run.log(dict(figures), step=step))

    def text(self, tag: str, lines: Sequence[str]) -> None:
        """As in ``Writer``."""
        self._tasks.put(lambda run: run.summary.update({f"text/{tag}": "\n".join(lines)}))

    def images(self, step: int, tag: str, tiles: np.ndarray, texts: Sequence[str]) -> None:
        """As in ``Writer``."""

        def send(run: Any) -> None:
            import wandb

            captioned = zip(tiles.transpose(0, 2, 3, 1), texts, strict=True)
            found = [wandb.Image(tile, caption=text) for tile, text in captioned]
            if step >= run.step:
                run.log({tag: found}, step=step)

        self._tasks.put(send)

    def report(self, report: Mapping[str, Any]) -> None:
        """As in ``Writer``."""
        self._tasks.put(lambda run: run.summary.update(report))

    def close(self, failed: bool) -> None:
        """As in ``Writer``."""
        self._tasks.put(lambda run: run.finish(exit_code=int(failed)))
        self._tasks.put(None)
        self._thread.join(_BEGIN_S + _END_S)
        if self._thread.is_alive():
            log.warning("watch.wandb: no answer for %.0f s, given up", _BEGIN_S + _END_S)

    def _work(self, folder: Path, config: Config, goes_on: bool) -> None:
        try:
            run = _begun(folder, config, goes_on)
            while (task := self._tasks.get()) is not None:
                task(run)
        # of the package, the service or the disk: training goes on whatever it is
        except Exception as error:
            log.warning(
                "watch.wandb=%s: %s; nothing more is sent there, and training goes on",
                config.watch.wandb.name,
                printable(words(error) or type(error).__name__),
            )
            while self._tasks.get() is not None:
                pass


def _begun(folder: Path, config: Config, goes_on: bool) -> Any:
    """Returns the run in Weights & Biases that the run in ``folder`` writes to."""
    import wandb

    settings = wandb.Settings(
        # what is printed is in train.log
        console="off",
        silent=True,
        init_timeout=_BEGIN_S,
        finish_timeout=_END_S,
    )
    wandb.setup(settings)
    if config.watch.wandb is Wandb.online and not wandb.login(prompt=False, verify=False):
        raise PermissionError(
            "not logged in; run `wandb login`, set WANDB_API_KEY, or use watch.wandb=offline"
        )
    path = folder / _ID
    known = goes_on and path.exists()
    name = read_regular(path, 1 << 20).decode() if known else uuid.uuid4().hex[:8]
    write_whole(path, name.encode())
    run = wandb.init(
        project=config.watch.wandb_project,
        name=folder.name,
        id=name,
        resume="allow" if known else None,
        mode=config.watch.wandb.name,
        dir=folder,
        config=to_plain(config),
        allow_val_change=True,
        settings=settings,
    )
    if run.url:
        say(f"watch it: {run.url}")
    return run
