"""Creates the user's callbacks, ``callbacks=[my_module:MyClass]``, and the run they receive."""

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
    """The run, as seen by callbacks.

    Attributes:
        network: the network being trained, without its DDP wrapper.
        optimizer: the PyTorch optimizer; its hooks can read and change gradients.
        device: the network's device.
        rank: the rank of this process, from 0.
        world_size: the number of ranks.
        folder: the run folder.
        classes: the class names, in order.
        config: the settings, read-only.
        logged: the values to write with the next window, by tag.
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
        """The number of completed optimizer steps."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The current or last completed epoch, from 1; 0 before the first step."""
        return self._state.epoch + (self._state.samples > 0)

    def log(self, name: str, value: Any) -> None:
        """Logs the number ``value`` as ``user/NAME`` with the next window, on the first rank.

        If a name is logged more than once before a window, the last value is kept. A device tensor
        makes the host wait.
        """
        self.logged[f"user/{name}"] = float(value.detach() if isinstance(value, Tensor) else value)


def made(names: Sequence[str]) -> dict[str, Any]:
    """Returns the user's callbacks by name, each created without arguments.

    Raises:
        ConfigError: a class is missing, fails, or has an ``on_`` method that is never called.
    """
    found = {}
    for name in names:
        found[name] = user_code.call("callbacks", name)
        own = [each for each in dir(found[name]) if each.startswith("on_")]
        for method in own or ["no method"]:
            if method not in METHODS:
                raise ConfigError(
                    f"callbacks={name}: {method}: not a callback method; the methods are "
                    f"{', '.join(METHODS)}{suggestions.nearest(method, METHODS)}"
                )
    return found
