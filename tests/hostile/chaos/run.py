"""Checks that a run that was stopped and went on is the run that never stopped.

After kills and signals, with other loaders and other ranks.

Every part starts train.py in processes of its own and looks at what is left. "The same state" is
bitwise: weights, optimizer, schedule, scaler and random states. The exit code is 1 where a
requirement is not met. --write adds the table to the page, below the earlier ones.

    uv run python -m tests.hostile.chaos.run --parts user,ranks
    uv run python -m tests.hostile.chaos.run --write
"""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1, Signals
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from harness.training import checkpoint_read
from scripts.bench.tables import PAGES, listed, machine, machine_line, markdown, parser, write
from tests.hostile.chaos.samples import batches, updates, wrong_samples
from tests.hostile.chaos.start import NOTED, POLL_S, TRAIN, Plan, Run, ended, free_port
from tests.support.run_state import digest, lines, logged, wrong_lines

PAGE = PAGES / "chaos.md"
_TITLE = "# Runs that were stopped\n"
_COMMON = (
    "device=cpu",
    "trainer.num_threads=1",
    "augment.hflip=0.5",
    "augment.crop=pad",
    "run.name=x",
)
_DIGITS = ("data=digits", *_COMMON)
_DIGITS_IMAGES = 1438
_SHAPES = (
    "data=shapes", *_COMMON, "data.image_size=32", "data.generate.train_images=400",
    "data.generate.val_images=100",
    "trainer.epochs=2", "tuner.budget_s=2", "tuner.max_workers=2", "tuner.fresh=true",
)  # fmt: skip
_SHAPES_STEPS = 50
_BAD_OF = 608
_TIMEOUT_S = 1.5
# from a worker's signal to the line that tells of it
_TOLD_S = _TIMEOUT_S + 5
_RANKS = {1: (), **{ranks: ("dist=spawn", f"dist.nprocs={ranks}") for ranks in (2, 3)}}

_LOADERS = {
    False: ("loader.backend=processes", "loader.num_workers=1"),
    True: ("loader.autotune=true", "tuner.budget_s=3", "tuner.max_workers=2", "tuner.fresh=true"),
}

Row = dict[str, Any]


def row(part: str, n: int, required: str, wrong: Sequence[str], *told: str) -> Row:
    """Returns a row of the table; ``wrong`` is what was not as ``required``, ``told`` figures."""
    found = [*told, *wrong[:3]]
    if len(wrong) > 3:
        found.append(f"{len(wrong) - 3} more")
    passed = "no"
    if not wrong:
        found.append("as required")
        passed = "yes"
    found_text = "; ".join(found)
    return {"part": part, "n": n, "required": required, "found": found_text, "passed": passed}


def kills(plan: Plan) -> list[Row]:
    """SIGKILL of the process group at random moments, again and again until the run ends."""
    rows = []
    for name, workers, backend, count in (
        ("no workers", 0, "processes", 1),
        ("2 processes", 2, "processes", 1),
        ("2 threads", 2, "threads", 1),
        ("2 ranks", 1, "threads", 2),
    ):
        overrides = (
            *_DIGITS,
            *_RANKS[count],
            f"loader.batch_size={64 // count}",
            f"loader.num_workers={workers}",
            f"loader.backend={backend}",
            f"loader.drop_last={'true' if count > 1 else 'false'}",
            "trainer.epochs=4",
            "checkpoint.every_steps=5",
        )
        # an epoch leaves out less than this
        rows.append(_killed(plan, name, overrides, 64 if count > 1 else 1))
    return rows


def _killed(plan: Plan, name: str, overrides: tuple[str, ...], batch: int) -> Row:
    draw = random.Random(f"{plan.seed} {name}")
    wrong = []
    killed = 0
    runs = 0
    whole = ended(plan, f"{name}/whole", *overrides).folder
    most_s = lines(whole)[-1]["time_s"] / 2
    # each run is killed again and again until it ends by itself
    while killed < plan.n and runs < plan.n:
        runs += 1
        place = plan.place(f"{name}/{runs}")
        goes_on = True
        checkpoints = place / "outputs/x/checkpoints"
        while goes_on:
            saved = checkpoint_read.records(checkpoints)
            with Run(plan, place, [*NOTED, *overrides, "resume=auto"]) as life:
                goes_on = life.trains()
                if saved and _step_of(checkpoints / "last.pt") < saved[-1].step:
                    wrong.append(f"run {runs}: last.pt is behind step {saved[-1].step}")
                goes_on = goes_on and killed < plan.n and life.goes_on(draw.uniform(0, most_s))
                if goes_on:
                    life.signal(SIGKILL)
                    # or it has ended by itself meanwhile
                    goes_on = life.code() != 0
                    killed += goes_on
                if (code := life.code()) != (128 + SIGKILL if goes_on else 0):
                    wrong.append(f"run {runs}: exit code {code}")
            begun = "no checkpoint yet, starting at epoch 1"
            if saved:
                begun = f" after step {saved[-1].step}"
            if begun not in life.said:
                wrong.append(f"run {runs}: did not say {begun!r}")
        wrong += [f"run {runs}: {text}" for text in _differences(life, whole, batch)]
    required = (
        "each life resumes from the newest checkpoint, to which last.pt points; the same state, "
        "lines and losses as without kills; every sample once an epoch; TensorBoard equal to "
        "metrics.jsonl"
    )
    return row(f"kills, {name}", killed, required, wrong, f"{runs} runs")


def _step_of(pointer: Path) -> int:
    return int(pointer.readlink().stem.removeprefix("step-"))


def _differences(last: Run, whole: Path, batch: int = 1) -> list[str]:
    """What tells a run that was killed from the ``whole`` one."""
    folder = last.folder
    wrong = wrong_lines(folder)
    if digest(folder) != digest(whole):
        wrong.append("another state")
    if logged(folder) != logged(whole):
        wrong.append("other lines")
    if "falling back" in (folder / "train.log").read_text():
        wrong.append("a checkpoint was damaged")
    return wrong + wrong_samples(updates(last.notes), _DIGITS_IMAGES, batch)


def terms(plan: Plan) -> list[Row]:
    """Signals the whole group at random moments, in runs of one rank and of two.

    Half of the signals come after the first step.
    """
    draw = random.Random(plan.seed)
    rows = []
    wholes: dict[tuple[int, bool], Run] = {}
    kinds: dict[tuple[Signals, int], list[_End]] = {}
    for i in range(plan.n):
        # every way meets every other one: ranks, tuning, signal, moment
        ranks = 1 + i % 2
        tuned = i % 3 == 2
        sign = SIGUSR1 if i % 12 in (4, 9) else SIGTERM
        overrides = (*_DIGITS, "trainer.epochs=3", "checkpoint.every_steps=10", *_RANKS[ranks])
        overrides += (f"loader.batch_size={64 // ranks}", *_LOADERS[tuned])
        if (ranks, tuned) not in wholes:
            wholes[ranks, tuned] = ended(plan, f"whole-{ranks}-{tuned}", *overrides)
        whole = wholes[ranks, tuned]
        trained = i % 4 > 1
        after_s = draw.uniform(0, lines(whole.folder)[-1]["time_s"] if trained else whole.lasted_s)
        kinds.setdefault((sign, ranks), []).append(
            _signaled(plan, str(i), overrides, sign, after_s, trained)
        )
    # a row for each signal and number of ranks; the last run that saved resumes
    for (sign, ranks), ends in sorted(kinds.items()):
        wrong = [text for end in ends for text in end.wrong]
        exits_s = sorted(end.exit_s for end in ends)
        stopped = [end.run for end in ends if "\nresume with " in end.run.said]
        if stopped:
            wrong += _continued(
                plan, stopped[-1], next(run for key, run in wholes.items() if key[0] == ranks)
            )
        p95_s = exits_s[math.ceil(0.95 * len(ends)) - 1]
        told = (
            f"gone after {statistics.median(exits_s):.1f} s (p95 {p95_s:.1f}, max "
            f"{exits_s[-1]:.1f}), {len(stopped)} saved"
        )
        required = (
            f"exit code 128 + n; gone within {plan.exit_s:g} s; the last step logged, saved and "
            "told; no traceback, process or "
            "temporary file left; event files whole; the last run resumes to the same state"
        )
        rows.append(row(f"{sign.name}, {ranks} ranks", len(ends), required, wrong, told))
    return rows


class _End(NamedTuple):
    """A run that was signaled, when its last process was gone, and what was wrong with it."""

    run: Run
    exit_s: float
    wrong: list[str]


def _signaled(
    plan: Plan, name: str, overrides: tuple[str, ...], sign: Signals, after_s: float, trained: bool
) -> _End:
    with Run(plan, plan.place(name), [*(NOTED if trained else TRAIN), *overrides]) as life:
        if (trained and not life.trains()) or not life.goes_on(after_s):
            # quicker than the one that was timed
            return _signaled(plan, f"{name}-", overrides, sign, after_s / 2, trained)
        sent_s = time.monotonic()
        life.signal(sign)
        code = life.code()
        until_s = max(sent_s + plan.exit_s, time.monotonic() + 1)
        while (left := life.alive()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        exit_s = time.monotonic() - sent_s
    said = life.said
    complete = "\ntop-1 " in life.said
    wrong = []
    # after the last step there is nothing left to end
    if code != 128 + sign and not (complete and code == 0):
        wrong.append(f"exit code {code}")
    if left or exit_s > plan.exit_s:
        wrong.append(f"{len(left)} processes after {exit_s:.1f} s")
    if "Traceback" in said:
        wrong.append("a traceback")
    wrong += [
        f"{path.name} left" for path in (*_temporary(life), *life.place.rglob("checkpoints/.*"))
    ]
    for folder in life.place.glob("outputs/x"):
        wrong += wrong_lines(folder)
        if not complete:
            wrong += _untold(folder, said)
    return _End(life, exit_s, [f"run {name} at {after_s:.1f} s: {text}" for text in wrong])


def _temporary(life: Run) -> list[Path]:
    # what torch's compiler keeps is a cache
    left = (life.place / "tmp").iterdir()
    return [path for path in left if not path.name.startswith("torchinductor")]


def _untold(folder: Path, said: str) -> list[str]:
    """What is wrong with how a run that made a step says where it ended."""
    made = [line["step"] for line in lines(folder) if "train/lr" in line]
    saved = [record.step for record in checkpoint_read.records(folder / "checkpoints")]
    ends = [*made[-1:], *saved[-1:], *map(int, re.findall(r"\nstopped after step (\d+)", said))]
    agree = len(ends) == 3 and len(set(ends)) == 1
    if not (made or saved) or (agree and "\nsaved  " in said and "\nresume with " in said):
        return []
    return [f"the last steps logged, saved and told are {ends}"]


def _continued(plan: Plan, stopped: Run, whole: Run) -> list[str]:
    """What is wrong once a run was gone on with by the command that it printed."""
    (command,) = re.findall(r"^resume with\s+(.*)$", stopped.said, re.MULTILINE)
    with Run(plan, stopped.place, ["bash", "-c", command]) as life:
        code = life.code()
    wrong = wrong_lines(life.folder)
    if code:
        wrong = [f"exit code {code} of {command}"]
    if digest(life.folder) != digest(whole.folder):
        wrong.append("another state")
    return wrong


def forms(plan: Plan) -> list[Row]:
    """Other loaders before and after a stop at a random step."""
    rows = []
    required = (
        "other backend, workers, cache and tuning after the stop: the same samples in the same "
        "order, the same state"
    )
    for ranks in (1, 2):
        draw = random.Random(plan.seed)
        wrong = []
        overrides = (*_SHAPES, *_RANKS[ranks], f"loader.batch_size={16 // ranks}")
        whole = ended(plan, f"{ranks}/whole", *overrides, "loader.num_workers=0")
        for i in range(plan.n):
            before = _form(draw)
            after = _form(draw)
            stop = draw.randrange(1, _SHAPES_STEPS)
            ended(plan, f"{ranks}/{i}", *overrides, *before, stop=stop)
            last = ended(plan, f"{ranks}/{i}", *overrides, *after, "resume=auto")
            if (digest(last.folder), updates(last.notes)) != (
                digest(whole.folder),
                updates(whole.notes),
            ):
                wrong.append(
                    f"{shlex.join(before)}, then {shlex.join(after)} at step {stop}: another run"
                )
        rows.append(row(f"forms, {ranks} ranks", plan.n, required, wrong))
    return rows


def _form(draw: random.Random) -> tuple[str, ...]:
    backend = draw.choice(("processes", "threads", "arrays"))
    workers = "null" if backend == "arrays" else draw.choice("012")
    return (
        f"loader.backend={backend}",
        f"loader.num_workers={workers}",
        f"data.cache={draw.choice(('none', 'ram', 'disk'))}",
        f"loader.autotune={draw.choice(('true', 'false'))}",
    )


def ranks(plan: Plan) -> list[Row]:
    """Another number of ranks within an epoch."""
    rows = []
    # an epoch of 2 x 64 leaves too few samples for another batch of one rank
    for before, after, batch in ((2, 1, 48), (1, 2, 96), (2, 3, 48), (2, 3, 32)):
        name = f"{before} ranks of {batch} to {after}"
        draw = random.Random(plan.seed)
        wrong = []
        overrides = (
            *_DIGITS,
            "trainer.epochs=2",
            "loader.num_workers=0",
            f"loader.batch_size={batch}",
        )
        # only then can the same global batches be cut for the new ranks
        shared = batch * before % after == 0
        whole = updates(ended(plan, f"{name}/whole", *overrides, *_RANKS[before]).notes)
        for i in range(plan.n):
            stop = draw.randrange(2, _DIGITS_IMAGES // (batch * before) - 1)
            ended(plan, f"{name}/{i}", *overrides, *_RANKS[before], stop=stop)
            found = updates(
                ended(plan, f"{name}/{i}", *overrides, *_RANKS[after], "resume=auto").notes
            )
            texts = wrong_samples(found, _DIGITS_IMAGES, batch * (before if shared else after))
            if shared and batches(found) != batches(whole):
                texts.append("other global batches")
            if {len(by_rank) for step, (_, by_rank) in found.items() if step > stop} != {after}:
                texts.append("a rank trained nothing")
            wrong += [f"stopped at step {stop}: {text}" for text in texts]
        rows.append(
            row(
                name,
                plan.n,
                "every sample once an epoch" + "; the same global batches" * shared,
                wrong,
            )
        )
    return rows


def user(plan: Plan) -> list[Row]:
    """Ctrl-C in the first epoch, and on with the command that was printed."""
    rows = []
    for how, more in ("run.name=mine", ("run.name=mine",)), ("no run.name", ()):
        wrong = []
        overrides = ("data=digits", "trainer.epochs=5", *more)
        whole = ended(plan, f"{how}/whole", *overrides)
        for i in range(plan.n):
            with Run(plan, plan.place(f"{how}/{i}"), [*NOTED, *overrides]) as life:
                life.trains()
                life.signal(SIGINT)
                code = life.code()
            if (
                code != 128 + SIGINT
                or "\nresume with " not in life.said
                or "Traceback" in life.said
            ):
                wrong.append(f"exit code {code}: {life.said[-300:]!r}")
            else:
                wrong += _continued(plan, life, whole)
        required = (
            "Ctrl-C in epoch 1 of 5: exit code 130; the printed command resumes to the same state"
        )
        rows.append(row(f"new user, {how}", plan.n, required, wrong))
    return rows


def workers(plan: Plan) -> list[Row]:
    """SIGKILL and SIGSTOP of a random worker again and again, with loader.restart_workers."""
    rows = []
    overrides = (
        *_DIGITS, "loader.backend=processes", "loader.num_workers=2", "loader.batch_size=16",
        "loader.drop_last=false", f"loader.timeout_s={_TIMEOUT_S}", "loader.restart_workers=true",
        "trainer.epochs=4",
    )  # fmt: skip
    whole = ended(plan, "whole", *overrides).folder
    for sign in (SIGKILL, SIGSTOP):
        draw = random.Random(f"{plan.seed} {sign}")
        wrong = []
        told_s: list[float] = []
        hit = runs = 0
        while hit < plan.n:
            runs += 1
            seen = set[int]()
            with Run(plan, plan.place(f"{sign.name}/{runs}"), [*NOTED, *overrides]) as life:
                hits = _hits(life, sign, draw, plan.n - hit, seen)
                if (code := life.code()) != 0:
                    wrong.append(f"run {runs}: exit code {code}: {life.said[-300:]!r}")
            hit += len(hits)
            told_s += [after_s for after_s in hits if after_s is not None]
            names = [f"torch_{pid}_*" for pid in seen]
            left = _temporary(life)
            left += [path for name in names for path in Path("/dev/shm").glob(name)]
            wrong += [f"run {runs}: {path.name} left" for path in left]
            wrong += [f"run {runs}: {text}" for text in _differences(life, whole)]
        required = (
            "loader.restart_workers=true: the epoch resumes; every sample once; the same state and "
            "losses as without; nothing left in shared memory or the temporary folder; each "
            f"replacement told within {_TOLD_S:g} s"
        )
        late = sum(after_s > _TOLD_S for after_s in told_s)
        wrong += [f"{late} told later, or not at all"] * (late > 0)
        most_s = max(told_s, default=0.0)
        told = f"{runs} runs, {len(told_s)} replacements, each told within {most_s:.1f} s"
        rows.append(row(f"workers, {sign.name}", hit, required, wrong, told))
    return rows


def _hits(
    life: Run, sign: Signals, draw: random.Random, most: int, seen: set[int]
) -> list[float | None]:
    """Hits random workers at random moments until the run ends; returns ``_told_after`` of each.

    Adds the process ids of all workers to ``seen``.
    """
    found: list[float | None] = []
    life.trains()
    losses = noted = 0
    while len(found) < most and life.goes_on(draw.uniform(0.1, 1.0)):
        there = life.workers()
        seen |= {worker.pid for worker in there}
        # the third loss at one batch would end the run, as it should: on until the next step
        if not there or (losses == 2 and life.notes.stat().st_size == noted):
            continue
        before = life.said.count("New workers continue")
        with suppress(psutil.NoSuchProcess):
            draw.choice(there).send_signal(sign)
        found.append(_told_after(life, before))
        former, noted = noted, life.notes.stat().st_size
        losses = losses + 1 if noted == former else 1
    return found


def _told_after(life: Run, before: int) -> float | None:
    """Returns after how many seconds the run told of new workers.

    None where it ended without: a worker that had nothing left to do is not missed. Infinity where
    it resumes and tells nothing.
    """
    begin_s = time.monotonic()
    while life.said.count("New workers continue") == before:
        if not life.goes_on(POLL_S):
            return None
        if time.monotonic() > begin_s + 2 * _TOLD_S:
            return math.inf
    return time.monotonic() - begin_s


def lost(plan: Plan) -> list[Row]:
    """SIGKILL and SIGSTOP of one of two gloo ranks, of one command and of two."""
    rows = []
    draw = random.Random(plan.seed)
    for sign in (SIGKILL, SIGSTOP):
        for of_one in (True, False):
            ends = [
                _lost(plan, f"{sign.name}/{of_one}/{i}", draw, sign, of_one) for i in range(plan.n)
            ]
            wrong = [text for end in ends for text in end.wrong]
            most_s = max(end.exit_s for end in ends)
            how = "dist=spawn" if of_one else "dist=torchrun, started one by one"
            required = (
                "gone within 30 s; exit code 10, or 137 where the killed rank is named; one line "
                "and no traceback; no process or temporary file left"
            )
            told = f"gone after at most {most_s:.1f} s"
            rows.append(row(f"a rank's {sign.name}, {how}", plan.n, required, wrong, told))
    return rows


def _lost(plan: Plan, name: str, draw: random.Random, sign: Signals, of_one: bool) -> _End:
    place = plan.place(name)
    rank = draw.randrange(2)
    overrides = (*_DIGITS, "trainer.epochs=500", "dist.timeout_s=8", *_LOADERS[False])
    commands = [[*NOTED, *overrides, *_RANKS[2]]]
    if not of_one:
        port = f"MASTER_PORT={free_port()}"
        met = ("env", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port)
        each = [*NOTED, *overrides, "dist=torchrun"]
        commands = [[*met, f"RANK={i}", f"LOCAL_RANK={i}", *each] for i in range(2)]
    with ExitStack() as opened:
        runs = [opened.enter_context(Run(plan, place, command)) for command in commands]
        runs[0].trains()
        runs[0].goes_on(draw.uniform(0, 3))
        hit = runs[0].ranks()[rank] if of_one else runs[rank].process
        hit.send_signal(sign)
        sent_s = time.monotonic()
        other = runs[0] if of_one else runs[1 - rank]
        code = other.code()
        until_s = max(sent_s + 30, time.monotonic() + 1)
        while (left := other.alive()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        exit_s = time.monotonic() - sent_s
    said = other.said
    wrong = []
    if code not in ((10, 137) if of_one and sign == SIGKILL else (10,)):
        wrong.append(f"exit code {code}")
    if left or exit_s > 30:
        wrong.append(f"{len(left)} processes after {exit_s:.1f} s")
    if said.count("error: ") != 1 or "Traceback" in said:
        wrong.append(f"said {said[-300:]!r}")
    if of_one:
        wrong += [f"{path.name} left" for path in _temporary(other)]
    return _End(other, exit_s, [f"{name}: {text}" for text in wrong])


def bad(plan: Plan) -> list[Row]:
    """Random loaders, stops and ranks over images of which one in a hundred is damaged."""
    draw = random.Random(plan.seed)
    root = plan.base / "images"
    names = _damaged(root, draw)
    overrides = (
        "data=imagefolder", f"data.root={root}", "data.on_error=skip", "data.max_bad_fraction=0.02",
        "data.image_size=16", *_COMMON, "trainer.epochs=2",
    )  # fmt: skip
    rows = []
    wholes = {}
    for count in (1, 2):
        own = (*overrides, *_RANKS[count], f"loader.batch_size={32 // count}")
        whole = wholes[count] = ended(plan, f"{count}/whole", *own, "loader.num_workers=0")
        wrong = _wrong_list(whole.folder, names)
        for i in range(plan.n):
            before = _form(draw)
            after = _form(draw)
            stop = draw.randrange(1, 2 * _BAD_OF // 32)
            ended(plan, f"{count}/{i}", *own, *before, stop=stop)
            last = ended(plan, f"{count}/{i}", *own, *after, "resume=auto")
            same = digest(last.folder), updates(last.notes)
            found = _wrong_list(last.folder, names)
            if same != (digest(whole.folder), updates(whole.notes)):
                found.append("another run")
            way = f"{shlex.join(before)}, then {shlex.join(after)} at step {stop}"
            wrong += [f"{way}: {text}" for text in found]
        if batches(updates(whole.notes)) != batches(updates(wholes[1].notes)):
            wrong.append("other samples than one rank")
        required = (
            "data.on_error=skip, 1 % damaged: other loaders, caches, tuning and a resume give the "
            "same state; ranks the same samples; bad_samples.jsonl names each file once"
        )
        rows.append(row(f"bad images, {count} ranks", plan.n, required, wrong))
    return rows


def _damaged(root: Path, draw: random.Random) -> list[str]:
    """Makes JPEG files to train and to validate, and damages one in a hundred of each."""
    names = []
    for part, count in (("train", _BAD_OF), ("val", 100)):
        hit = set(draw.sample(range(count), count // 100))
        for i in range(count):
            path = root / part / "ab"[i % 2] / f"{i}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 256, (4, 4, 3), np.uint8)
            Image.fromarray(noise).resize((24, 24)).save(path)
            if i in hit:
                whole = path.read_bytes()
                path.write_bytes(draw.choice((whole[: len(whole) // 2], b"", bytes(999), b"text")))
                names.append(str(path))
    return sorted(names)


def _wrong_list(folder: Path, names: list[str]) -> list[str]:
    text = (folder / "bad_samples.jsonl").read_text()
    listed = sorted(json.loads(line)["where"] for line in text.splitlines())
    return [] if listed == names else [f"bad_samples.jsonl has {len(listed)} of {len(names)} files"]


PARTS: dict[str, tuple[Callable[[Plan], list[Row]], int]] = {
    "kills": (kills, 20), "terms": (terms, 120), "forms": (forms, 24), "ranks": (ranks, 1),
    "user": (user, 1), "workers": (workers, 100), "bad": (bad, 12),
    "lost": (lost, 5),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    usual = ", ".join(f"{name} {n}" for name, (_, n) in PARTS.items())
    about = "Stop runs, resume them, and compare them with runs that were not stopped."
    options = parser(about, PAGE, json=False)
    add = options.add_argument
    add("--parts", help=f"some of {','.join(PARTS)}; by default all")
    add("--n", type=int, help=f"how often each part does what it does; by default {usual}")
    add("--seed", type=int, default=0, help="of the moments, steps and forms")
    add("--exit-s", type=float, default=10.0, help="most seconds from a signal to the end of all")
    add("--run-s", type=float, default=300.0, help="most seconds of one start of a run")
    add("--keep", type=Path, help="leave the runs in this folder, which must be new")
    a = options.parse_args(argv)
    names = listed(options, "--parts", a.parts, tuple(PARTS))
    if (a.n is not None and a.n < 1) or min(a.exit_s, a.run_s) <= 0:
        options.error("--n: at least 1; --exit-s and --run-s: more than 0")
    if a.keep:
        a.keep.mkdir(parents=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        base = (a.keep or Path(temporary)).resolve()
        # each part in a folder of its own
        for name in names:
            part, n = PARTS[name]
            plan = Plan(base / name, a.n or n, a.seed, a.exit_s, a.run_s)
            try:
                rows += part(plan)
            except Exception as error:
                # the other parts go on
                said = f"{type(error).__name__}: {error}"
                rows.append(row(name, plan.n, "every run starts and ends", [said]))
    if argv is None:
        argv = sys.argv[1:]
    command = shlex.join(["uv", "run", "tests/hostile/chaos/run.py", *argv])
    told = f"{machine_line(machine())}\n\n`{command}`, {datetime.now(UTC):%d %B %Y}."
    text = f"{told}\n\n{markdown(rows)}\n"
    print(text)
    if a.write:
        earlier = PAGE.read_text(encoding="utf-8") if PAGE.exists() else _TITLE
        write(PAGE, f"{earlier}\n{text}")
    return int(any(row["passed"] == "no" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
