"""Trains image classifiers so that the device never waits for data, and shows where it does.

The rooms, in the order in which the data walks through them::

    storage - decode - augment | order - load - pin - copy - normalise | step - evaluate - save
    '--------- data/ ---------'  '------------- feed/ -------------'    '----- training/ -----'
                             ^ settings              | is told about waits
                          tuning/                  watch/ -> TensorBoard, report.json, console

Who may import whom, kept by import-linter (a lower line never imports a higher one, neighbours
never each other)::

    train.py, wellfed   the names of app: a script in a checkout, a command where it is installed
    app                 composes the settings, starts the jobs, tells every error
    job | hooks         wires the rooms: main_worker is one rank of a run | watches loops that are
                        not ours
    diagnose            runs that tell what bounds training, or which images cannot be read
    inference           beside it: predictions, exported networks, a network for code of yours
    page | compare      the page of a run, as a file and in TensorBoard | runs side by side
    tuning | training   measure and choose loader settings | step, epoch, evaluation, checkpoint
    feed                which sample comes next, samples to batches, batches to the device
    data                where samples lie, bytes to pixels, pixels to a training image
    watch               where the time went, the GPU and the host, what is written about it
    runtime             ranks, randomness, signals, limits, files, the run's folder, users' own
                        functions, the ways to end
    config              every setting; with answers and app the only module that knows Hydra
    answers             what the command line answers to what was mistyped

Tuning knows the step by what times it (``harness.tuning.steps.TimedSteps``), which training extends
and job passes on.

For a loop of your own: ``watched``, ``watching``, ``faster``, ``DataPrefetcher``, ``StepClock`` and
``tune``, and ``load`` for what a run has trained. Each is imported when it is asked for.

The package's name is ``wellfed``. ``harness``, its folder in a checkout and its name in earlier
versions, is the same package, so that no class exists twice and earlier pickles open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock.clock import StepClock
    from .feed.prefetcher import DataPrefetcher
    from .hooks.faster import faster
    from .hooks.own import watched, watching
    from .inference.loaded import load
    from .tuning.library import tune

__all__ = ["DataPrefetcher", "StepClock", "faster", "load", "tune", "watched", "watching"]
__version__ = "0.1.0"
# on ``time.perf_counter``, before anything heavy is imported: when a command began
BEGAN_S = time.perf_counter()

_ROOMS = {
    "DataPrefetcher": "feed.prefetcher",
    "StepClock": "watch.clock",
    "faster": "hooks.faster",
    "load": "inference.loaded",
    "tune": "tuning.library",
    "watched": "hooks.own",
    "watching": "hooks.own",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'wellfed' has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)


class _Folder(MetaPathFinder, Loader):
    """Imports ``harness.x`` as ``wellfed.x``, unless another package has the name ``harness``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # python -m runs a __main__, and imports none
        if name.partition(".")[0] != "harness" or name.endswith(".__main__"):
            return None
        if path is None:
            other = PathFinder.find_spec(name)
            is_ours = other is None or (other.origin and os.path.samefile(other.origin, __file__))
        else:
            is_ours = sys.modules["harness"] is sys.modules[__name__]
        return ModuleSpec(name, self) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(__name__ + spec.name.removeprefix("harness"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has put that of the other name there
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if __name__ == "harness":
    _spec = spec_from_file_location("wellfed", __file__, submodule_search_locations=__path__)
    assert _spec is not None and _spec.loader is not None
    sys.modules["harness"] = sys.modules["wellfed"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["wellfed"])
else:
    # the editable installation has a link in its place
    __path__ = [os.path.realpath(folder) for folder in __path__]
    sys.meta_path.insert(0, _Folder())
