"""Cases of limits, signals, runs beside each other, sweeps, and of the page and compare."""

# mypy: disable-error-code="func-returns-value"
from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGPIPE, SIGQUIT, SIGSTOP, SIGTERM, SIGUSR1, SIGUSR2
from typing import Any

from tests.hostile.attack.files import fifo, one
from tests.hostile.attack.places import (
    RUN,
    Case,
    Done,
    Step,
    Strike,
    ends,
    same,
    same_if_done,
)

_PROCESSES = ("loader.num_workers=2", "loader.backend=processes")
_FORMS: tuple[tuple[str, ...], ...] = (
    (), ("loader.num_workers=0",), _PROCESSES, (
        "data.cache=ram",),
    ("data.cache=disk",), (*_PROCESSES, "loader.start_method=spawn"),
    (*_PROCESSES, "loader.start_method=fork"),
)  # fmt: skip


def limits(draw: random.Random) -> Iterator[Case]:
    """Limits of files, sizes, memory and processes; small disks."""
    for limit in ("--nofile=8", "--nofile=16", "--nofile=24", "--nofile=32", "--nofile=40",
                  "--nofile=64", "--fsize=1000", "--fsize=20000", "--fsize=200000",
                  "--fsize=1000000", "--as=600000000", "--as=1200000000", "--as=2500000000",
                  "--stack=100000", "--cpu=3", "--cpu=6", "--core=0", "--memlock=0",
                  "--data=400000000",
                  "--sigpending=0", "--rss=1000", "--msgqueue=0", "--nice=0"):  # fmt: skip
        form = draw.choice(_FORMS)
        # SIGXCPU, and a lack that the system's own loader or torch tells
        codes: tuple[int, ...] = (0, 2, 6, 7, 8)
        if "cpu" in limit:
            codes = (0, 137, 152)
        elif any(name in limit for name in ("as=", "data=", "stack=", "nofile=8", "nofile=16")):
            codes = (0, 1, 2, 6, 7, 8, 127, 134, 139)
        yield one(f"{limit} {' '.join(form)}", (*RUN, *form), *codes, wrap=("prlimit", limit),
                  check=same_if_done, lines=6, leaves_tmp="cpu" in limit)  # fmt: skip
    mounts = {
        "a run folder of 100 kB": ("mount -t tmpfs -o size=100k none . && mkdir outputs", (7,)),
        "a run folder of 1 MB": ("mount -t tmpfs -o size=1m none .", (7,)),
        "a run folder of 40 names": ("mount -t tmpfs -o nr_inodes=12 none .", (2, 7)),
        "a cache of 50 kB": ("mount -t tmpfs -o size=50k none ../cache", (0, 2, 7)),
        "shared memory of 100 kB": ("mount -t tmpfs -o size=100k none /dev/shm", (0, 6, 7)),
        "shared memory of nothing": ("mount -t tmpfs -o size=4k none /dev/shm", (0, 6, 7)),
        "shared memory that is read-only": ("mount -t tmpfs -o ro none /dev/shm", (0, 2, 6, 7)),
        "a temporary folder of 4 kB": ("mount -t tmpfs -o size=4k none $TMPDIR", (0, 2, 6, 7)),
        "a read-only current folder": ("mount -t tmpfs -o ro none .", (2,)),
        "a read-only cache": ("mount -t tmpfs -o ro none ../cache", (0, 2)),
        "a read-only temporary folder": ("mount -t tmpfs -o ro none $TMPDIR", (0, 2, 6)),
        "no /proc": ("mount -t tmpfs none /proc", (0, 1, 2, 6)),
        "no /sys": ("mount -t tmpfs none /sys", (0,)),
        "no /dev/shm": ("mount -t tmpfs -o ro,mode=000 none /dev/shm", (0, 2, 6, 7)),
        "4 processes": (_group(4), (0, 2, 6, 8)), "9 processes": (_group(9), (0, 2, 6, 8)),
        "20 processes": (_group(20), (0, 2, 6, 8)),
        "300 MB": (_group(0, 300), (0, 8, 137)), "700 MB": (_group(0, 700), (0, 8, 137)),
    }  # fmt: skip
    for name, (script, allowed) in mounts.items():
        # the folder that was current lies under the mount
        wrap = ("unshare", "-m", "sh", "-c", f'{script} && cd "$PWD" && exec "$0" "$@"')
        form = draw.choice((_PROCESSES, *_FORMS))
        words = () if any("cache" in word for word in form) else ("data.cache=disk",)
        yield one(f"{name} {' '.join(form)}", (*RUN, *form, *words), *allowed,
                  wrap=wrap, lines=6)  # fmt: skip


def _group(pids: int, megabytes: int = 0) -> str:
    """Returns a script that puts its shell into a group with such limits."""
    kind, file, value = "pids", "pids.max", str(pids)
    if megabytes:
        kind, file, value = "memory", "memory.limit_in_bytes", f"{megabytes}M"
    return (
        f"g=/sys/fs/cgroup/{kind}/attack-$$ && mkdir $g && echo {value} > $g/{file} && "
        "echo $$ > $g/cgroup.procs"
    )


_MODES: dict[str, tuple[tuple[str, ...], bytes]] = {
    "train": ((), b"training:"),
    "processes": (_PROCESSES, b"training:"),
    "ram": (("data.cache=ram",), b"training:"),
    "cache": (("data.cache=disk",), b"decoded cache"),
    "tune": (("loader.autotune=true", "tuner.budget_s=20", "tuner.fresh=true"), b"loading torch"),
    "grid": (("loader.autotune=true", "tuner=grid", "tuner.budget_s=5"), b"loading torch"),
    "two ranks": (("dist=spawn", "dist.nprocs=2", "loader.batch_size=4"), b"loading torch"),
    "verify": (("mode=verify",), b"loading torch"),
    "diagnose": (("mode=diagnose",), b"loading torch"),
    "evaluate": (("mode=evaluate", "resume=outputs/x"), b"loading torch"),
    "sweep": (("-m", "seed=0,1"), b"run folder"),
}


def signals(draw: random.Random) -> Iterator[Case]:
    """Signals at random moments in every mode, with a start afterwards."""
    for name, (words, text) in _MODES.items():
        for number in draw.sample((SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGQUIT), 3):
            after_s = draw.uniform(0, 3)
            whom = draw.choice(("main", "group"))
            strike = Strike(number, after_s, whom, draw.choice((b"", text)))
            first = Step((*RUN, *words), ends(0, 128 + number), strike=strike, lines=6, errors=2)
            if name in ("verify", "diagnose", "evaluate", "sweep"):
                needs = ("images", "done") if name == "evaluate" else ("images",)
                run = tuple(word for word in RUN if word != "run.name=x")
                first = first._replace(words=(*run, *words))
                yield Case("", f"{name}, {number.name} to {whom} at {after_s:.1f} s", (first,),
                           needs=needs)  # fmt: skip
                continue
            last = Step((*RUN, "resume=auto"), ends(0), lines=5)
            check = None if name == "two ranks" else same
            yield Case("", f"{name}, {number.name} to {whom} at {after_s:.1f} s", (first, last),
                       needs=("images",), check=check)  # fmt: skip
    for name in ("processes", "two ranks", "sweep", "grid", "tune"):
        words, text = _MODES[name]
        for number in (SIGKILL, SIGTERM):
            strike = Strike(number, draw.uniform(0, 4), "child", b"loading torch")
            first = Step((*RUN, "trainer.epochs=6", *words), ends(0, 6, 10, 128 + number),
                         strike=strike, lines=8, errors=2)  # fmt: skip
            yield Case("", f"{name}, {number.name} to a child", (first,), needs=("images",))
    for after_s in (draw.uniform(0, 6) for _ in range(5)):
        # files in TMPDIR stay after that
        strike = Strike(SIGKILL, after_s)
        first = Step((*RUN, *draw.choice(_FORMS)), ends(0, 137), strike=strike)
        last = Step((*RUN, "resume=auto"), ends(0), lines=5)
        yield Case("", f"SIGKILL at {after_s:.1f} s", (first, last), needs=("images",), check=same,
                   leaves_tmp=True)  # fmt: skip
    for text in (b"", b"loading torch"):
        strike = Strike(SIGPIPE, draw.uniform(0, 2), "main", text)
        yield Case("", "SIGPIPE", (Step(RUN, ends(0, 141), strike=strike),), needs=("images",),
                   check=same_if_done)  # fmt: skip
    yield from _odd_streams(draw)
    strike = Strike(SIGSTOP, draw.uniform(0, 1), "child", b"training:")
    words = (*RUN, *_PROCESSES, "trainer.epochs=60", "loader.timeout_s=4")
    yield Case("", "a worker that is stopped", (Step(words, ends(0, 6), strike=strike, lines=6),),
               needs=("images",))  # fmt: skip


def _odd_streams(draw: random.Random) -> Iterator[Case]:
    shells = {
        "stdout is closed": 'exec "$0" "$@" >&-',
        "stderr is closed": 'exec "$0" "$@" 2>&-',
        "all streams are closed": 'exec "$0" "$@" <&- >&- 2>&-',
        "stdout is /dev/full": 'exec "$0" "$@" > /dev/full',
        "stderr is /dev/full": 'exec "$0" "$@" 2> /dev/full',
        "nobody reads stdout": '"$0" "$@" | true',
        "one line of stdout is read": '"$0" "$@" | head -1',
        "SIGINT is ignored": 'trap "" INT; exec "$0" "$@"',
        "SIGCHLD is ignored": 'trap "" CHLD; exec "$0" "$@"',
        "SIGTERM is blocked": 'trap "" TERM; exec "$0" "$@"',
        "umask 777": 'umask 777; exec "$0" "$@"',
        "umask 022": 'umask 022; exec "$0" "$@"',
        "files are open": 'exec 3</dev/null 4</dev/null 7</dev/null; exec "$0" "$@"',
        "nice 19": 'exec nice -n 19 "$0" "$@"',
    }  # fmt: skip
    for name, script in shells.items():
        form = draw.choice((_PROCESSES, ()))
        step = Step((*RUN, *form), ends(0, 2, 7), wrap=("sh", "-c", script), lines=4)
        yield Case("", f"{name} {' '.join(form)}", (step,), needs=("images",), check=same_if_done)


def _one_of_two(place: Path, done: list[Done]) -> list[str]:
    codes = sorted(each.code for each in done)
    if codes not in ([0, 9], [0, 2], [0, 0]):
        return [f"exit codes {codes}"]
    return same(place, done)


def _both(place: Path, _: list[Done]) -> list[str]:
    from tests.support.run_state import digest

    whole = digest(place / "shared/done/outputs/x")
    found = [digest(path) for path in sorted((place / "work/outputs").iterdir())]
    return (
        [] if set(found) == {whole} and len(found) > 1 else ["another state than the plain run's"]
    )


def pairs(draw: random.Random) -> Iterator[Case]:
    """Runs at the same time in one folder, or with one cache."""
    either = ends(0, 2, 9)
    for words in (
        (),
        ("resume=auto",),
        ("data.cache=disk",),
        ("loader.autotune=true", "tuner.budget_s=1"),
    ):
        step = Step((*RUN, *words), either, lines=5)
        yield Case("", f"one folder {' '.join(words)}", (step, step), needs=("images",),
                   together=True, check=_one_of_two)  # fmt: skip
    for words in ((), ("data.cache=disk",), ("data.cache=ram",), ("loader.autotune=true",
    "tuner.budget_s=1"),
                  ("mode=verify",)):  # fmt: skip
        steps = tuple(
            Step((*RUN[:-1], f"run.name=r{i}", *words), ends(0), lines=5) for i in range(3)
        )
        yield Case("", f"one cache {' '.join(words)}", steps, needs=("images",), together=True,
                   check=None if "mode=verify" in words else _both)  # fmt: skip
    steps = (Step((*RUN[:-1],), ends(0)), Step((*RUN[:-1],), ends(0)))
    yield Case("", "two runs without a name", steps, needs=("images",), together=True)
    shapes = ("data=shapes", "data.generate.train_images=64", "data.generate.val_images=20",
    "device=cpu",
              "loader.batch_size=16", "trainer.epochs=1", "data.image_size=32")  # fmt: skip
    steps = tuple(Step((*shapes, f"run.name=s{i}"), ends(0), lines=4) for i in range(2))
    yield Case("", "the generated data set", steps, together=True)
    kill = Step(
        (*shapes, "run.name=s0"), ends(0, 137), strike=Strike(SIGKILL, 2.0, "main", b"loading")
    )
    yield Case("", "the generated data set, killed", (kill, steps[1]), leaves_tmp=True)


def sweeps(draw: random.Random) -> Iterator[Case]:
    """Sweeps of which jobs fail."""
    run = tuple(word for word in RUN if word != "run.name=x")
    for words, codes, errors in (
        (("seed=0,1",), (0,), 0), (("loader.batch_size=8,100000",), (2, 3), 1),
        (("data.root=../in/images,/nope",), (3,), 1), (("optim.lr=0.1,x",), (2,), 1),
        (("model.name=small,nope",), (2,), 1), (("run.name=a,b",), (0,), 0),
        (("run.name=x", "seed=0,1"), (0, 2, 9), 2), (("trainer.epochs=0,1",), (2,), 1),
        (("seed=0,0",), (0,), 0), (("seed=0,1", "hydra.sweep.dir=sweep"), (0,), 0),
        (("seed=0,1", "hydra.sweep.subdir=same"), (0, 2, 9), 2),
        (("seed=0,1", "hydra.sweep.subdir=../../../neighbor/${seed}"), (0, 2), 2),
        (("seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), (0, 2), 1),
        (("seed=0,x", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), (2,), 2),
        (("seed=0,1", "hydra/launcher=submitit_local"), (0, 2), 1),
        (("optim.lr=interval(0.01,0.1)", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2",
          "hydra.sweeper.n_jobs=1"), (0, 2), 1),
        (("optim.lr=interval(0.1,0.01)", "hydra/sweeper=optuna"), (2,), 1),
        (("optim.lr=interval(a,b)", "hydra/sweeper=optuna"), (2,), 1),
        (("seed=0,1", "optim.lr=interval(0.1,0.2)"), (2,), 1),
        (("resume=outputs/nope,auto",), (2, 4), 2), (("device=cpu,cuda:9",), (2,), 1),
        (("mode=verify,train",), (0,), 0), (("data.cache=disk,ram",), (0,), 0),
    ):  # fmt: skip
        yield one(f"-m {' '.join(words)}", ("-m", *run, *words), *codes, errors=errors, lines=6,
                  limit_s=240.0, leaves=("sweep", ".submitit", "neighbor"))  # fmt: skip


_ODD_RUNS: dict[str, Callable[[Path], Any]] = {
    "whole": lambda run: None,
    "report.json is a FIFO": lambda run: ((run / "report.json").unlink(), fifo(
        run / "report.json")),
    "metrics.jsonl is a FIFO": lambda run: (
        (run / "metrics.jsonl").unlink(), fifo(run / "metrics.jsonl")),
    "report.html is a FIFO": lambda run: ((run / "report.html").unlink(), fifo(
        run / "report.html")),
    "report.html is a folder": lambda run: (
        (run / "report.html").unlink(), (run / "report.html").mkdir()),
    "report.html leads away": lambda run: (
        (run / "report.html").unlink(),
        (run / "report.html").symlink_to("../../../neighbor/keep.txt")),
    "report.json is a list": lambda run: (run / "report.json").write_text("[1]"),
    "report.json of big numbers": lambda run: (run / "report.json").write_text(
        json.dumps({**json.loads((run / "report.json").read_text()), "steps": 10**400})),
    "report.json of escapes": lambda run: (run / "report.json").write_text(
        json.dumps({**json.loads((run / "report.json").read_text()), "status": "\x1b[31m\n\x07"})),
    "report.json of NaN": lambda run: (run / "report.json").write_text('{"steps": NaN}'),
    "report.json is deep": lambda run: (run / "report.json").write_text("[" * 10**5),
    "report.json is not UTF-8": lambda run: (run / "report.json").write_bytes(b"\xff\xfe"),
    "report.json is 30 MB": lambda run: (run / "report.json").write_text(" " * (30 << 20) + "{}"),
    "metrics.jsonl of junk": lambda run: (run / "metrics.jsonl").write_bytes(os.urandom(99_999)),
    "metrics.jsonl of one long line": lambda run: (run / "metrics.jsonl").write_text("1" * 10**6),
    "metrics.jsonl of lists": lambda run: (run / "metrics.jsonl").write_text("[]\n" * 999),
    "metrics.jsonl of odd steps": lambda run: (run / "metrics.jsonl").write_text(
        '{"step": -1, "epoch": null}\n{"step": 1e400}\n{"step": "x"}\n{"step": true}\n'),
    "tuning.json of junk": lambda run: (run / "tuning.json").write_text('{"a": [[[]]]}'),
    "config.yaml is a bomb": lambda run: (run / ".hydra/config.yaml").write_text(
        "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{n}: &{n} [{','.join([f'*{b}'] * 9)}]\n"
            for b, n in zip("abcdef", "bcdefg", strict=True))),
    "config.yaml leads away": lambda run: (
        (run / ".hydra/config.yaml").unlink(), (run / ".hydra/config.yaml").symlink_to(
            "/etc/passwd")),
    ".hydra is a file": lambda run: (shutil.rmtree(run / ".hydra"), (run / ".hydra").write_text(
        "")),
    "train.log is a FIFO": lambda run: ((run / "train.log").unlink(), fifo(run / "train.log")),
    "a name of escapes": lambda run: run.rename(run.with_name("x\x1b[31m\n")),
    "a name that is not UTF-8": lambda run: run.rename(run.with_name("x\udcff")),
    "a name of HTML": lambda run: run.rename(run.with_name("<script>alert(1)<")),
    "a link to the folder above": lambda run: (run / "up").symlink_to(".."),
    "empty": lambda run: (shutil.rmtree(run), run.mkdir()),
    "a file": lambda run: (shutil.rmtree(run), run.write_text("x")),
    "a FIFO": lambda run: (shutil.rmtree(run), fifo(run)),
}  # fmt: skip


def _no_leak(place: Path, _: list[Done]) -> list[str]:
    pages = (place / "work/outputs").rglob("report.html")
    texts = [path.read_text(errors="replace") for path in pages if path.is_file()]
    return (
        ["the page has another file's content"] if any("root:x:0" in each for each in texts) else []
    )


def pages(draw: random.Random) -> Iterator[Case]:
    """The page and the table of run folders from elsewhere."""
    for name, make in _ODD_RUNS.items():
        ways = {
            "page": ("page", "outputs"), "page of a sweep": ("page", "."),
            "compare": ("compare", "outputs", "outputs"), "json": ("compare", "outputs", "--json"),
            "limits": ("compare", "outputs", "outputs", "--fail-beyond", "speed=0.5"),
        }  # fmt: skip
        for way in draw.sample(sorted(ways), 2):

            def prepare(place: Path, make: Any = make) -> None:
                make(place / "work/outputs/x")

            step = Step(ways[way], ends(0, 1, 2), lines=30, errors=5, limit_s=60.0)
            yield Case("", f"{name}, {way}", (step,), needs=("done",), prepare=prepare,
                       check=_no_leak, leaves=("report.html",))  # fmt: skip
    for words in (
        ("page", "/dev/null"), ("page", "/proc/self/fd"), ("page", ""), ("page", "x\x1b[31m"),
        ("page", "x" * 5000), ("page", "a", "b"), ("page", "\udcff"), ("page", "/dev/zero"),
        ("compare", "x\x1b[31m"), ("compare", "x" * 5000), ("compare", "\udcff"),
        ("compare", "outputs", "--fail-beyond", "x=1"), ("compare", "outputs", "--fail-beyond",
        "speed=nan"),
        ("compare", "outputs/x", "outputs/x", "--fail-beyond", "speed=1e999"),
        ("compare", "outputs/x", "outputs/x", "--fail-beyond", "top1=\x1b[31m"),
        ("compare", "/dev/null"), ("compare", "outputs", "--bogus"),
    ):  # fmt: skip
        step = Step(words, ends(0, 1, 2), lines=6, errors=2, limit_s=60.0)
        yield Case(
            "", repr(" ".join(words))[:50], (step,), needs=("done",), leaves=("report.html",)
        )
