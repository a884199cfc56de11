"""Counts the functions and files of harness/ on five ways through a CPU run.

    uv run python scripts/walks.py [CHECKOUT] [--names]

The ways: a sample's bytes from disk to the step (backend threads), ``loader.num_workers=3`` from
the command line to the threads, a step's time to TensorBoard, and a checkpoint out and back. A
profiler records each function of harness/ that runs; a way's functions are selected by file, and
for the setting by arguments that carry its value. ``--names`` also prints the functions.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
WORKERS = 3
# the files of each way, rooms or modules, in earlier checkouts too
SAMPLE = ("data/", "feed/")
TIME = ("watch/", "clock/", "monitor/", "report/", "training/reporter.py")
# they read sensors or print, without a step's time; garbage collection runs at any time
SENSORS = (
    "host.py", "device.py", "tree.py", "console.py", "stages.py", "station.py",
    "monitor.py",
)  # fmt: skip
READ = (
    "training/state.py", "training/checkpoint.py", "training/checkpoint_read.py",
    "training/resume.py", "training/average.py",
    "runtime/snapshot.py", "tuning/snapshot.py", "runtime/files.py",
)  # fmt: skip
WRITTEN = (*READ, "training/saving.py", "training/checkpoint_write.py")
COMMON = (
    "data=imagefolder", "data.image_size=32", "device=cpu", "model=small", "loader.batch_size=8",
    "loader.backend=threads", f"loader.num_workers={WORKERS}", "watch.window_steps=4",
    "trainer.num_threads=1", "checkpoint.every_steps=6",
)  # fmt: skip


class Trace:
    """The functions of harness/ that ran: up to step 3, in steps 4 to 14 of 20, and later.

    Functions in several steps are recorded separately: others begin an epoch or an evaluation.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self._main = threading.get_ident()
        self._seen: dict[CodeType, set[int]] = defaultdict(set)
        self._steps: Counter[tuple[str, str]] = Counter()
        self.steps = 0
        self.found: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Records a call; this is the profiler."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._package):
            return
        # comprehensions belong to their function; class and module bodies are not functions
        if code.co_name.startswith("<") or not code.co_flags & CO_OPTIMIZED:
            return
        name = f"{code.co_filename.removeprefix(self._package)}:{code.co_qualname}"
        if self.steps == 0 and name not in self.found["setting"] and handles(frame):
            self.found["setting"].add(name)
        if self.steps in self._seen[code]:
            return
        self._seen[code].add(self.steps)
        phase = "start" if self.steps < 3 else "steps" if self.steps < 14 else "end"
        thread = "main" if threading.get_ident() == self._main else "thread"
        if phase == "steps":
            self._steps[name, thread] += 1
            # threads load the first images for an evaluation during one or two steps
            if self._steps[name, thread] >= (5 if thread == "thread" else 2):
                self.found["repeated"].add(name)
        self.found[f"{phase} {thread}"].add(name)

    def step(self, *_: object) -> None:
        """Counts an optimizer's step."""
        self.steps += 1


def handles(frame: FrameType) -> bool:
    """Returns whether a function has a parameter for the number of workers and receives it."""
    code = frame.f_code
    words = {*code.co_names, *code.co_varnames}
    if not any("workers" in word or word in ("loader", "settings", "kept") for word in words):
        return False
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(carries(name, frame.f_locals.get(name)) for name in given)


def carries(name: str, value: Any, depth: int = 2) -> bool:
    """Returns whether ``value`` is the number of workers, or has it as an attribute or item."""
    if type(value) is int:
        return value == WORKERS and "workers" in name
    if isinstance(value, str):
        return value == f"loader.num_workers={WORKERS}"
    if not depth:
        return False
    return any(carries(key, inner, depth - 1) for key, inner in parts(value))


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the named components of a project object, mapping or sequence."""
    if isinstance(value, dict):
        yield from ((str(key), value[key]) for key in list(value)[:100])
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None) or [""] * len(value)
        yield from list(zip(fields, value, strict=True))[:100]
    elif type(value).__module__.startswith(("harness", "wellfed")):
        for name in (*getattr(value, "__dataclass_fields__", ()), *getattr(value, "__dict__", ())):
            yield name, getattr(value, name, None)


def child(checkout: Path, result: Path, words: list[str]) -> None:
    """Runs train.py under the profiler, in this process."""
    sys.path.insert(0, str(checkout))
    trace = Trace(checkout / "harness")
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(trace.step)
    sys.argv = ["train.py", *words]

    def leave() -> None:
        sys.setprofile(None)
        result.write_text(json.dumps({key: sorted(value) for key, value in trace.found.items()}))

    # a run ends with os._exit, after the functions registered here
    atexit.register(leave)
    threading.setprofile(trace)
    sys.setprofile(trace)
    runpy.run_path(str(checkout / "train.py"), run_name="__main__")


def images(folder: Path) -> None:
    """Writes 2 x 80 JPEG images for training and 2 x 4 for validation."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, count in (("train", 80), ("val", 4)):
        for label in "ab":
            (folder / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 255, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{i}.jpg")


def walks(checkout: Path) -> dict[str, set[str]]:
    """Returns the functions on each way."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        images(place / "images")
        found = []
        for run in (
            (f"hydra.run.dir={place}/a", "trainer.epochs=2"),
            (f"resume={place}/a", "trainer.epochs=3"),
        ):
            result = place / "result.json"
            words = [*COMMON, f"data.root={place}/images", *run]
            subprocess.run(
                [
                    str(checkout / ".venv/bin/python"), __file__, str(checkout),
                    "--child", str(result), *words,
                ],
                check=True, timeout=600, stdout=subprocess.DEVNULL,
                env=os.environ | {"WELLFED_CACHE": f"{place}/cache"},
            )  # fmt: skip
            found.append(json.loads(result.read_text()))
    first, second = ({key: set(value) for key, value in each.items()} for each in found)
    steps = first["steps main"] | first["steps thread"]
    return {
        "sample to step": chosen(first["repeated"], SAMPLE),
        "num_workers to threads": first["setting"],
        "step time to TensorBoard": {
            name
            for name in chosen(first["repeated"], TIME)
            if Path(name.split(":")[0]).name not in SENSORS and ":_Collections." not in name
        },
        "checkpoint out": chosen(steps, WRITTEN),
        "checkpoint back": chosen(second["start main"], READ),
    }


def chosen(names: set[str], places: tuple[str, ...]) -> set[str]:
    """Returns the functions in ``places``."""
    return {name for name in names if name.startswith(places)}


def main() -> None:
    """Prints a row per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given, words = parser.parse_known_args()
    if given.child:
        child(given.checkout, given.child, words)
        return
    for way, names in walks(given.checkout.absolute()).items():
        files = {name.split(":")[0] for name in names}
        print(f"{way:26}{len(names):4} functions{len(files):4} files")
        if given.names:
            print("\n".join(f"    {name}" for name in sorted(names)))


if __name__ == "__main__":
    main()
