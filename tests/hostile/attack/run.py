"""Runs hundreds of whole commands that no user means, and judges how each ended.

Settings, files, variables, folders, images, checkpoints, caches, limits and signals. Each command
runs in a folder of its own, beside files that it may not touch. An end is right when the exit code
is one that the case expects, no traceback and no control character is printed, at most one line
says an error, nothing beside the run's folder has changed and nothing is left: no process, no
shared memory, no temporary file. Where a run succeeds although something is odd, its weights must
be those of a plain run.

    uv run python -m tests.hostile.attack.run --write
    uv run python -m tests.hostile.attack.run --seed 2 --only signals
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil

from scripts.bench.tables import PAGES, listed, machine, machine_line, markdown, parser, write
from tests.hostile.attack.commands import KINDS, REQUIRED, cases
from tests.hostile.attack.places import Case, Done, Step, listing, prepared
from tests.hostile.chaos.start import ROOT

PAGE = PAGES / "attack.md"
_POLL_S = 0.05
# what a run may leave in the folder where it is started
_OURS = {"outputs", "multirun"}
_MARK = "WELLFED_ATTACK"


def environment(case: Case, place: Path, mark: str) -> dict[str, str]:
    """Returns the variables of a case: ours, and those that it sets or removes (None)."""
    kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
    env = {key: os.environ[key] for key in kept if key in os.environ}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", _MARK: mark}
    env |= {
        "HOME": str(place / "home"),
        "TMPDIR": str(place / "tmp"),
        "WELLFED_CACHE": str(place / "cache"),
    }
    for key, value in case.env.items():
        env.pop(key, None)
        if value is not None:
            env[key] = value
    return env


def marked(mark: str) -> list[psutil.Process]:
    """Returns the live processes that a case started, however far from it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"{_MARK}={mark}".encode() in variables and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def run_step(step: Step, case: Case, place: Path, mark: str) -> Done:
    """Runs one command of a case to its end, or to its time limit."""
    number = len(list(place.glob("*.out")))
    out = place / f"{number}-{threading_id()}.out"
    err = out.with_suffix(".err")
    began_s = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [*step.wrap, *command(step)],
            cwd=place / "work",
            env=environment(case, place, mark),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    seen = {process.pid}
    struck = False
    timed_out = False
    looked_s = 0.0
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s - looked_s > 0.5:
            looked_s = now_s
            with suppress(psutil.Error):
                seen |= {each.pid for each in psutil.Process(process.pid).children(recursive=True)}
        if step.strike and not struck and step.strike.due(now_s - began_s, out, process):
            struck = True
        if now_s - began_s > step.limit_s:
            timed_out = True
            for each in marked(mark):
                with suppress(psutil.Error):
                    each.kill()
            process.wait()
        time.sleep(_POLL_S)
    code = process.returncode
    return Done(
        128 - code if code < 0 else code,
        out.read_bytes(),
        err.read_bytes(),
        time.monotonic() - began_s,
        timed_out,
        seen,
        struck,
    )


def threading_id() -> int:
    """Returns a number of this thread, for names."""
    return threading.get_ident() % 100_000


def command(step: Step) -> list[str]:
    """Returns the words of a step."""
    if step.program is not None:
        return [sys.executable, *step.program]
    return [sys.executable, str(ROOT / "train.py"), *step.words]


def wrong_text(step: Step, done: Done) -> list[str]:
    """Returns what is wrong with a command's exit code and lines."""
    wrong = []
    if done.timed_out:
        wrong.append(f"no end within {step.limit_s:g} s")
    elif done.code not in step.codes:
        wrong.append(f"exit code {done.code}, not {' or '.join(map(str, sorted(step.codes)))}")
    texts = []
    for name, data in (("stdout", done.out), ("stderr", done.err)):
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode(errors="replace")
            wrong.append(f"{name} is not UTF-8")
        if odd := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
            wrong.append(f"{name} has the control character {odd[0]!r}")
        texts.append(text)
    said = "".join(texts)
    for text in ("Traceback", "Exception ignored", "Fatal Python", "Exception in thread",
                 "leaked ", "--- Logging error", "Segmentation"):  # fmt: skip
        if text in said:
            wrong.append(f"prints {text!r}")
    errors = re.findall(r"^(?:wellfed \w+: )?error: ", texts[1], re.M)
    if len(errors) > step.errors:
        wrong.append(f"{len(errors)} error lines")
    # Hydra's own lines have no mark of ours
    told = errors or len(texts[1].splitlines()) == 1
    if 0 < done.code < 128 and not told and not done.timed_out:
        wrong.append("no error line")
    if done.code == 0 and errors and 0 in step.codes:
        wrong.append("an error line and exit code 0")
    if (count := len(texts[1].splitlines())) > step.lines:
        wrong.append(f"{count} lines on stderr")
    if any(len(line) > 2200 for line in texts[1].splitlines()):
        wrong.append("a line of more than 2,200 characters")
    wrong += [f"does not say {text!r}" for text in step.says if text not in said]
    return wrong


def attacked(case: Case, place: Path, shared: Path) -> dict[str, Any]:
    """Runs a case and returns how it ended, with what was wrong."""
    mark = place.name
    wrong: list[str] = []
    done: list[Done] = []
    try:
        prepared(case, place, shared)
        before = {name: listing(place / name) for name in ("in", "neighbor", "home")}
        ours = {path.name for path in (place / "work").iterdir()} | _OURS | {*case.leaves}
        if case.together:
            with ThreadPoolExecutor(len(case.steps)) as pool:
                done = [*pool.map(lambda step: run_step(step, case, place, mark), case.steps)]
        else:
            for step in case.steps:
                done.append(run_step(step, case, place, mark))
        for step, each in zip(case.steps, done, strict=True):
            wrong += wrong_text(step, each)
        wrong += left(case, place, mark, done)
        for name, entries in before.items():
            if name == "in" and case.changes_in:
                continue
            wrong += [f"{name}: {text}" for text in changes(entries, listing(place / name))]
        more = {path.name for path in (place / "work").iterdir()} - ours
        wrong += [f"left {name!r} in the current folder" for name in sorted(more)]
        if case.check is not None and not wrong:
            wrong += case.check(place, done)
    except Exception as error:
        wrong.append(f"the case itself: {type(error).__name__}: {error}")
    tail = done[-1].tail() if done else ""
    return {
        "kind": case.kind,
        "name": case.name,
        "commands": [shlex.join([*step.wrap, "train.py", *step.words]) for step in case.steps],
        "codes": [each.code for each in done],
        "seconds": round(sum(each.seconds for each in done), 1),
        "wrong": wrong,
        "tail": tail,
    }


def left(case: Case, place: Path, mark: str, done: Sequence[Done]) -> list[str]:
    """Returns what a case left behind: processes, shared memory, temporary files."""
    # what a process removes as it ends
    until_s = time.monotonic() + 20
    while (alive := marked(mark)) and time.monotonic() < until_s:
        time.sleep(0.2)
    wrong = []
    for process in alive:
        with suppress(psutil.Error):
            wrong.append(f"process left: {' '.join(process.cmdline())[:120]}")
            process.send_signal(SIGKILL)
    pids = {pid for each in done for pid in each.seen}
    # groups of a case's limits
    for pid in pids:
        for group in Path("/sys/fs/cgroup").glob(f"*/attack-{pid}"):
            with suppress(OSError):
                group.rmdir()
    for name in os.listdir("/dev/shm"):
        found = re.match(r"torch_(\d+)_", name)
        if found and int(found[1]) in pids:
            wrong.append(f"/dev/shm/{name} left")
    if not case.leaves_tmp:
        names = [name for name in os.listdir(place / "tmp") if not name.startswith("torchinductor")]
        wrong += [f"TMPDIR/{name} left" for name in names]
    return wrong


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Returns what differs between two listings, at most three things."""
    found = [f"{name} is new" for name in after.keys() - before.keys()]
    found += [f"{name} is gone" for name in before.keys() - after.keys()]
    found += [
        f"{name} has changed" for name in before if after.get(name, before[name]) != before[name]
    ]
    return sorted(found)[:3]


def row(kind: str, found: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Returns a class' row of the table."""
    bad = [each for each in found if each["wrong"]]
    said = "as required"
    if bad:
        said = "; ".join(f"{each['name']}: {each['wrong'][0]}" for each in bad[:3])
        said += f"; {len(bad) - 3} more" if len(bad) > 3 else ""
    return {
        "class": kind,
        "n": len(found),
        "required": REQUIRED[kind],
        "otherwise": len(bad),
        "found": said,
    }


def told(each: dict[str, Any]) -> str:
    """Returns what there is to say of a case that ended otherwise."""
    lines = [f"## {each['kind']}, {each['name']}: {'; '.join(each['wrong'])}"]
    lines += [f"    $ {text[:1000]}" for text in each["commands"]]
    lines += [f"    exit codes {each['codes']}, {each['seconds']} s"]
    lines += [f"    | {line[:300]}" for line in each["tail"].splitlines()[-8:]]
    return "\n".join(lines)


def rooted(case: Case) -> bool:
    """Whether a case needs root, and what a system of control groups gives it."""
    return any(step.wrap[:1] in (("setpriv",), ("unshare",)) for step in case.steps)


def picked(seed: int, kinds: Sequence[str], name: str | None, most: int | None) -> list[Case]:
    """Returns the cases that are asked for, of each class at most so many, drawn by ``seed``."""
    # mounts and rights are root's
    every = [case for case in cases(random.Random(seed)) if not os.getuid() or not rooted(case)]
    found = []
    for kind in kinds:
        of = [case for case in every if case.kind == kind and (name is None or name in case.name)]
        if most is not None and len(of) > most:
            chosen = random.Random(f"{seed} {kind} {most}").sample(range(len(of)), most)
            of = [of[at] for at in sorted(chosen)]
        found += of
    return found


def page_of(found: Sequence[dict[str, Any]], seed: int, most: int | None) -> str:
    """Returns the page of all cases."""
    rows = [row(kind, [each for each in found if each["kind"] == kind]) for kind in KINDS]
    rows = [each for each in rows if each["n"]]
    more = f" --most {most}" if most else ""
    commands = sum(len(each["commands"]) for each in found)
    return (
        f"# Commands that no user means\n\n{machine_line(machine())}\n\n"
        f"`uv run python -m tests.hostile.attack.run --seed {seed}{more}`, "
        f"{time.strftime('%-d %B %Y')}, n={len(found)} cases of {commands} commands. "
        "Of each: a documented exit code, no traceback, at most one error line, "
        "no control characters, an end in time, nothing "
        "changed beside the run's folder, no process, shared memory or temporary file left; "
        f"where it succeeds, the weights of a plain run.\n\n{markdown(rows)}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("Run commands that no user means, and judge their ends.", PAGE)
    add = options.add_argument
    add("--seed", type=int, default=0, help="of values, moments and damages")
    add("--only", help=f"some of {','.join(KINDS)}; by default all")
    add("--name", help="only cases whose name has this text")
    add("--most", type=int, help="most cases of a class; by default all")
    add("--add", type=Path, nargs="+", help="figures of other classes, from --json")
    add("--jobs", type=int, default=2, help="commands at a time")
    add("--keep", type=Path, help="leave the folders in this one, which must be new")
    a = options.parse_args(argv)
    kinds = listed(options, "--only", a.only, KINDS)
    found: list[dict[str, Any]] = [
        each for path in a.add or () for each in json.loads(path.read_text())["cases"]
    ]
    if a.add:
        kinds = tuple(kind for kind in kinds if all(kind != each["kind"] for each in found))
    with tempfile.TemporaryDirectory(prefix="attack-") as temporary:
        base = (a.keep or Path(temporary)).resolve()
        base.mkdir(parents=True, exist_ok=True)
        chosen = picked(a.seed, kinds, a.name, a.most)
        shared = base / "shared"
        with ThreadPoolExecutor(a.jobs) as pool:
            ends = [
                pool.submit(attacked, case, base / f"{os.getpid()}-{number}", shared)
                for number, case in enumerate(chosen)
            ]
            for end in ends:
                each = end.result()
                found.append(each)
                mark = "NO " if each["wrong"] else "yes"
                print(f"{mark} {each['seconds']:6.1f} s {each['kind']}: {each['name']}", flush=True)
                if each["wrong"]:
                    print(told(each), flush=True)
    page = page_of(found, a.seed, a.most)
    print(f"\n{page}")
    if a.json:
        write(a.json, {"machine": machine(), "seed": a.seed, "cases": found})
    if a.write:
        write(PAGE, page)
    return int(any(each["wrong"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
