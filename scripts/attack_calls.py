"""Calls the harness with what no user means, thousands of times, and counts how each call ended.

Settings, their combinations, the library's objects, networks and data sets of a user's, run
folders, checkpoints and caches. A call may be refused in one line by one of the harness's own
errors, or be accepted and mean what was asked, in five seconds of processor time; everything else
is told. A process of its own makes the calls, so that a crash or a hang is a result too.

    uv run scripts/attack_calls.py
    uv run scripts/attack_calls.py --only "odd values" --cases 100 --seed 2
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scripts import attack_folders, attack_objects, attack_parts, attack_values
from scripts.attack_case import Case, End
from scripts.measured import markdown, parser

Make = Callable[[int, Path], Iterator[Case]]

CLASSES: dict[str, tuple[int, Make]] = {
    "odd values": (900, attack_values.odd_values),
    "settings together": (350, attack_values.together),
    "networks": (160, attack_parts.models),
    "data sets": (420, attack_parts.sets),
    "DataPrefetcher": (450, attack_objects.prefetchers),
    "StepClock": (180, attack_objects.clocks),
    "tune": (110, attack_objects.tunings),
    "run folders": (300, attack_folders.folders),
    "checkpoints": (300, attack_folders.checkpoints),
    "remembered": (250, attack_folders.remembered),
}
# of one call: what it is held to, and what ends the process
_MOST_S = 5.0
_KILLED_S = 10.0
_WAIT_S = 40
_ROOM_BYTES = 6 << 30


def ended(case: Case) -> dict[str, Any]:
    """Returns how one call ended."""
    signal.setitimer(signal.ITIMER_PROF, _KILLED_S)
    # waits without end
    signal.alarm(_WAIT_S)
    began_s = time.process_time()
    outcome: dict[str, Any] = {"said": case.said}
    try:
        end = case.run()
    # a KeyboardInterrupt or SystemExit is a result too
    except BaseException as error:
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:
            text = f"{type(error).__name__}, which cannot be printed"
        end = End(wrong=f"uncaught: {text[:300]}")
        outcome["where"] = traceback.format_exc()[-900:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    outcome |= {"refused": end.refused, "wrong": end.wrong, "note": end.note}
    outcome["cpu_s"] = time.process_time() - began_s
    return outcome


def call_all(name: str, cases: range, seed: int, results: Path) -> None:
    """Makes the calls ``cases`` and writes a line for each; a call's signal ends the process."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _ROOM_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    with tempfile.TemporaryDirectory() as folder, results.open("a", buffering=1) as file:
        os.environ["WELLFED_CACHE"] = f"{folder}/cache"
        made = CLASSES[name][1](seed, Path(folder))
        for case in islice(made, cases.start, cases.stop):
            file.write(f"{json.dumps({'said': case.said})}\n")
            file.write(f"{json.dumps(ended(case))}\n")


def outcomes(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns how each of ``count`` calls ended; fewer if there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        while True:
            found, begun = _read(results)
            child = os.fork()
            if not child:
                try:
                    call_all(name, range(len(found), count), seed, results)
                    os._exit(0)
                except BaseException:
                    results.with_suffix(".error").write_text(traceback.format_exc())
                finally:
                    os._exit(1)
            status = os.waitpid(child, 0)[1]
            found, begun = _read(results)
            if os.WIFSIGNALED(status) and begun:
                how = signal.Signals(os.WTERMSIG(status)).name
                wrong = {
                    "SIGPROF": "hang: over 10 s of processor time",
                    "SIGALRM": f"hang: no end after {_WAIT_S} s",
                }.get(how, f"crash: {how}")
                killed = {"said": begun, "refused": "", "note": "", "wrong": wrong, "cpu_s": 0.0}
                with results.open("a") as file:
                    print(json.dumps(killed), file=file)
            elif status:
                error = results.with_suffix(".error")
                raise RuntimeError(error.read_text() if error.exists() else f"status {status}")
            else:
                return found


def _read(results: Path) -> tuple[list[dict[str, Any]], str]:
    """Returns the ends so far, and the call that has begun and not ended."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    begun = lines[-1]["said"] if lines and "wrong" not in lines[-1] else ""
    return [line for line in lines if "wrong" in line], begun


def row(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a row of the table."""
    wrong = Counter(_kind(each) for each in found if _kind(each))
    return {
        "class": name,
        "calls": len(found),
        "refused": sum(bool(each["refused"] and not each["wrong"]) for each in found),
        "accepted": sum(not (each["refused"] or each["wrong"]) for each in found),
        "failed": sum(wrong.values()),
        "how": "; ".join(f"{count} {what}" for what, count in wrong.most_common()) or "-",
        "notes": sum(bool(each["note"]) for each in found),
        "most processor s": f"{max((each['cpu_s'] for each in found), default=0.0):.1f}",
    }


def _kind(each: dict[str, Any]) -> str:
    if each["wrong"]:
        return str(each["wrong"]).partition(":")[0]
    return "slow" if each["cpu_s"] > _MOST_S else ""


def faults(name: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """Returns what there is to tell of each call that ended otherwise than it may."""
    lines = []
    traced = set[str]()
    for case, each in enumerate(found):
        if not _kind(each):
            continue
        lines.append(f"{name}, case {case}: {each['wrong'] or 'slow'}\n    {each['said']}")
        place = each.get("where", "")[-600:]
        if place and place not in traced:
            lines[-1] += f"\n{each['where']}"
            traced.add(place)
    return lines


def attack(
    seed: int = 0, cases: int | None = None, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Returns a row for each class of calls, with what failed under ``faults``."""
    rows = []
    for name in only or CLASSES:
        found = outcomes(name, cases or CLASSES[name][0], seed)
        notes = [f"{name}: {each['note']}\n    {each['said']}" for each in found if each["note"]]
        made = row(name, found)
        print(markdown([made]).splitlines()[-1], file=sys.stderr, flush=True)
        rows.append(made | {"faults": faults(name, found), "remarks": notes})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    made = parser("Call the harness with what no user means.", json=False)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--cases", type=int, help="calls of each class; by default as in the table")
    made.add_argument("--only", action="append", help="a class; may be given again")
    made.add_argument("--notes", action="store_true", help="list what is worth a look, too")
    a = made.parse_args(argv)
    if unknown := {*(a.only or ())} - CLASSES.keys():
        made.error(f"--only: unknown: {', '.join(unknown)}; there are {'; '.join(CLASSES)}")
    rows = attack(a.seed, a.cases, a.only or ())
    told = [line for each in rows for line in each.pop("faults")]
    notes = [line for each in rows for line in each.pop("remarks")]
    print(f"\n{markdown(rows)}\n")
    print("\n".join(told + (notes if a.notes else [])))
    calls = sum(each["calls"] for each in rows)
    print(f"{calls:,} calls; {len(told)} ended otherwise than they may")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
