"""Trains image classifiers so that the device never waits for data, and shows where it does.

A run, in the order of its data flow::

    storage - decode - augment | order - load - pin - copy - normalize | step - evaluate - save
    '--------- data/ ---------'  '------------- feed/ -------------'    '----- training/ -----'

``docs/contributing/architecture.md`` lists the packages, their files and the packages that each may
import. import-linter checks the imports.

For your own loop, there are ``watched``, ``watching``, ``faster``, ``DataPrefetcher``,
``StepClock`` and ``tune``; for a trained network, there is ``load``. Each is imported on first
access.

The package's name is ``wellfed``. ``harness``, its folder in a checkout and its name in earlier
versions, is the same package, so that no class exists twice and earlier pickles can be opened.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock.clock import StepClock
    from .feed.prefetcher import DataPrefetcher
    from .hooks.faster import faster, load_image
    from .hooks.own import watched, watching
    from .inference.loaded import load
    from .tuning.library import tune

__all__ = [
    "DataPrefetcher",
    "StepClock",
    "faster",
    "load",
    "load_image",
    "tune",
    "watched",
    "watching",
]
__version__ = "0.1.0"
# when a command began, on ``time.perf_counter``, before anything heavy is imported
BEGAN_S = time.perf_counter()

_ROOMS = {
    "DataPrefetcher": "feed.prefetcher",
    "StepClock": "clock.clock",
    "faster": "hooks.faster",
    "load_image": "hooks.faster",
    "load": "inference.loaded",
    "tune": "tuning.library",
    "watched": "hooks.own",
    "watching": "hooks.own",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'wellfed' has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})


class _HarnessAlias(MetaPathFinder, Loader):
    """Imports ``harness.x`` as ``wellfed.x``, unless another package is named ``harness``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # python -m runs a __main__ module but does not import it
        if name.partition(".")[0] != "harness" or name.endswith(".__main__"):
            return None
        if path is None:
            others = [
                place
                for place in sys.path
                if os.path.realpath(os.path.join(place, "harness")) != __path__[0]
            ]
            return PathFinder.find_spec(name, others) or ModuleSpec(name, self)
        return ModuleSpec(name, self) if sys.modules["harness"] is sys.modules[__name__] else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # StepClock's package had another name
        name = spec.name.replace("harness.watch", "harness.clock", 1)
        module = import_module(__name__ + name.removeprefix("harness"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has put the spec for the other name there
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if __name__ == "harness":
    # contains the link to this folder with the package's name; also for new processes
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__path__[0])), ".editable"))
    sys.modules["harness"] = import_module("wellfed")
else:
    # real paths, not through the link
    __path__ = [os.path.realpath(folder) for folder in __path__]
    __file__ = os.path.realpath(__file__)
    sys.meta_path.insert(0, _HarnessAlias())
