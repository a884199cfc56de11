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

Tuning knows the step by what times it (``harness.feed.timed.TimedSteps``), which training extends
and job passes on.

For a loop of your own: ``watched``, ``watching``, ``faster``, ``DataPrefetcher``, ``StepClock`` and
``tune``, and ``load`` for what a run has trained, from here or from the module ``wellfed``. Each is
imported when it is asked for.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.feed.prefetcher import DataPrefetcher
    from harness.hooks.faster import faster
    from harness.hooks.own import watched, watching
    from harness.inference.loaded import load
    from harness.tuning.library import tune
    from harness.watch.clock import StepClock

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
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(import_module(f"harness.{_ROOMS[name]}"), name)
