"""Sends metrics to Weights & Biases in a separate thread, so that training never waits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from ..config import Config, Wandb, to_plain
from ..runtime.folder import log
from .console import say

# timeouts for contacting the service at the start and at the end
_BEGIN_S = 30.0
_END_S = 15.0


class WandbWriter:
    """A run in Weights & Biases, whose files are in ``folder/wandb``.

    Failures cause only one warning. A run resumed from a checkpoint (``goes_on``) continues the
    last run in ``folder/wandb``, if any; its existing steps are not changed.
    """

    def __init__(self, folder: Path, config: Config, goes_on: bool) -> None:
        self._tasks: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, args=(folder, config, goes_on), daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send values by tag after ``step`` optimizer steps.

        A value is a number, possibly not finite, or a list of images, uint8 ``[H, W, 3]``, with
        their texts.
        """
        self._tasks.put(lambda run: step < run.step or run.log(_shown(values), step=step))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Send ``report.json``, or a text with its tag."""
        self._tasks.put(lambda run: run.summary.update(values))

    def close(self, failed: bool) -> None:
        """Finish the W&B run, which may take a while."""
        self._tasks.put(lambda run: run.finish(exit_code=int(failed)))
        self._tasks.put(None)
        self._thread.join(_BEGIN_S + _END_S)
        if self._thread.is_alive():
            log.warning("watch.wandb: no response for %.0f s; giving up", _BEGIN_S + _END_S)

    def _work(self, folder: Path, config: Config, goes_on: bool) -> None:
        try:
            run = _begun(folder, config, goes_on)
            while task := self._tasks.get():
                task(run)
        # any error of the package, the service or the disk; training continues
        except Exception as error:
            log.warning("watch.wandb: %r; no more metrics are sent, but training continues", error)
            while self._tasks.get():
                pass


def _begun(folder: Path, config: Config, goes_on: bool) -> Any:
    """Returns the Weights & Biases run of the run in ``folder``."""
    import wandb

    # console output is in train.log
    settings = wandb.Settings(
        console="off", silent=True, init_timeout=_BEGIN_S, finish_timeout=_END_S
    )
    wandb.setup(settings)
    if config.watch.wandb is Wandb.online and not wandb.login(prompt=False, verify=False):
        raise PermissionError(
            "not logged in; run `wandb login`, set WANDB_API_KEY, or use watch.wandb=offline"
        )
    last = folder / "wandb" / "latest-run"
    known = None
    if goes_on and last.is_symlink():
        # from a name such as offline-run-20261124_130000-b429029f
        known = re.sub(r".*run-\d+_\d+-", "", os.readlink(last))
    run = wandb.init(
        project=config.watch.wandb_project,
        name=folder.name,
        id=known,
        resume=known and "allow",
        mode=config.watch.wandb.name,
        dir=folder,
        config=to_plain(config),
        allow_val_change=True,
        settings=settings,
    )
    if run.url:
        say(f"Weights & Biases: {run.url}")
    return run


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``values`` with images converted for Weights & Biases."""
    from wandb import Image

    return {
        tag: [Image(pixels, caption=text) for pixels, text in value]
        if isinstance(value, list)
        else value
        for tag, value in values.items()
    }
