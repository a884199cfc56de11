"""Makes the user's callbacks, ``callbacks=[my_module:MyClass]``, and what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import suggestions
from ..config import ConfigError
from ..runtime import user_code
from .state import TrainState

METHODS = ("on_start", "on_step", "on_window", "on_epoch", "on_end")


class Run:
    """What a callback is told of the run.

    Attributes:
        network: the bare one that is trained, not its DDP wrapper.
        optimizer: torch's; hooks of its own see and change gradients.
        device: where the network lies.
        rank: of this process, from 0.
        world_size: the number of ranks.
        folder: the run's.
        classes: their names, in order.
        config: the settings, to be read.
        logged: figures by tag that are written with the next ones.
    """

    # setting an attribute that does not exist, such as stop, is an error
    __slots__ = (
        "_state", "classes", "config", "device", "folder", "logged", "network", "optimizer",
        "rank", "world_size",
    )  # fmt: skip

    def __init__(self, state: TrainState, folder: Path, classes: tuple[str, ...]) -> None:
        self._state = state
        self.network = state.network
        self.optimizer = state.optimizer
        world = state.world
        self.device = world.device
        self.rank = world.rank
        self.world_size = world.size
        self.folder = folder
        self.classes = classes
        self.config = state.config
        self.logged: dict[str, float] = {}

    @property
    def step(self) -> int:
        """The updates that are done."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The epoch, from 1, that runs or has just ended; 0 before the first step."""
        return self._state.epoch + (self._state.samples > 0)

    def log(self, name: str, value: Any) -> None:
        """Logs the number ``value`` as ``user/NAME`` with the next window; the first rank's counts.

        The last value before a window is kept. A tensor on a device makes the host wait.
        """
        self.logged[f"user/{name}"] = float(value.detach() if isinstance(value, Tensor) else value)


def made(names: Sequence[str]) -> dict[str, Any]:
    """Returns the user's callbacks by ``names``, each called without arguments.

    Raises:
        ConfigError: there is no such class, it failed, or one of its methods is never called.
    """
    found = {}
    for name in names:
        found[name] = user_code.call("callbacks", name)
        own = [each for each in dir(found[name]) if each.startswith("on_")]
        for method in own or ["no method"]:
            if method not in METHODS:
                raise ConfigError(
                    f"callbacks={name}: {method}: a callback has any of {', '.join(METHODS)}"
                    f"{suggestions.nearest(method, METHODS)}"
                )
    return found
