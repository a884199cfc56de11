"""Cases of what is typed: settings, files of settings, flags, variables."""

# mypy: disable-error-code="func-returns-value"
from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from harness import config as schema
from tests.hostile.attack.places import (
    BARE,
    DIGITS,
    IMAGES,
    RUN,
    Case,
    Step,
    ends,
    same,
    same_if_done,
)

REFUSED = ends(2)
EITHER = ends(0, 2)


def refusal(
    name: str, *words: str, codes: frozenset[int] = REFUSED, says: tuple[str, ...] = (), **more: Any
) -> Case:
    """Returns a case of one command that is to be refused at once."""
    # argparse's usage stands before what it says of these
    lines = 6 if words[0] in ("page", "compare") else 3
    return Case("", name, (Step(words, codes, says=says, lines=lines, limit_s=60.0),), **more)


def trained(name: str, *words: str, **more: Any) -> Case:
    """Returns a case of one run that is to end as the plain one."""
    more.setdefault("check", same)
    step = Step((*RUN, *words), ends(0), lines=more.pop("lines", 3), wrap=more.pop("wrap", ()))
    return Case("", name, (step,), needs=("images",), **more)


def _odd_values(value: Any, meta: Any, draw: random.Random) -> list[str]:
    """Returns values that a setting with this one may not have."""
    default = meta["default"]
    kind = type(default if value is None else value)
    odd = ["[[]]", "{a:1}", "[1,[2]]"]
    if issubclass(kind, bool):
        return [*odd, "2", "maybe", "0.5", "null,", "[true]"]
    if kind in (int, float):
        odd += ["x", "nan", "inf", "-inf", "1e400", "[1]", "0x1G", "1_", "--1", "１２x", "9" * 400]
        if kind is int:
            odd += ["1.5", "1e3", "true_", "1.0.0"]
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if name in meta:
                odd.append(str(meta[name] + step))
        return odd
    if issubclass(kind, tuple):
        size = len(default)
        return ["[]", "[x]", "1", f"[{','.join('1' * (size + 1))}]", "[" * 30 + "]" * 30,
                f"[{','.join(['nan'] * size)}]", f"[{','.join(['null'] * size)}]"]  # fmt: skip
    if issubclass(kind, Enum):
        name = draw.choice(list(kind)).name
        return [*odd, "none_", name.upper() + "X", f"{name} ", f"{name}\u200b", "99", "''", "[]"]
    return []


def _mistyped(name: str, draw: random.Random) -> str:
    """Returns a setting's name with one letter wrong."""
    at = draw.randrange(len(name))
    return draw.choice((
        name[:at] + name[at + 1 :] + "q", name[:at] + "." + name[at:], name.upper(),
        name.replace("e", "\u0435") + "\u0430", name + "." + name, name + "\u202e",
        f"{name}\x1b[2J",
        name.replace("_", "-") + "-", f" {name}x", name + "x" * 3000, f"{name}[0]x", f"{name}\tx",
    ))  # fmt: skip


def _drawn(draw: random.Random) -> Iterator[Case]:
    settings = [
        (path, value, {**declared.metadata, "default": declared.default})
        for path, value, declared in schema.walk(schema.Config())
    ]
    draw.shuffle(settings)
    count = 0
    for path, value, meta in settings:
        values = _odd_values(value, meta, draw)
        if not values or count == 34:
            continue
        count += 1
        odd = draw.choice(values)
        more = ("data=digits",) if not path.startswith("data.") else ()
        yield refusal(f"{path}={odd[:30]!r}", *more, f"{path}={odd}")
    for path, _, _ in settings[:14]:
        name = _mistyped(path, draw)
        yield refusal(f"name {name[:40]!r}", "data=digits", f"{name}=1")


_WORDS: tuple[tuple[str, ...], ...] = (
    ("optim.name=2",), ("trainer.precision=3",), ("dist.name=1",),
    ("seed=1", "--cfg", "job", "run.name=y"), ("--info", "config", "seed=1", "--resolve"),
    ("seed=${seed}",), ("seed=${data}",), ("data.root=${data.root}", "data=imagefolder"),
    ("data.root=${oc.env:NOT_THERE}", "data=imagefolder"), ("seed=${oc.decode:'['}",),
    ("seed=${oc.create:{a:1}}",), ("seed=${nothing:1}",), ("seed=${",), ("seed=}",), ("seed=\\",),
    ("run.name='",), ('run.name="',), ("run.name=a\nb",), ("run.name=\u202etxt",), ("=1",),
    ("seed==1",), ("+seed=1", "+seed=2"), ("~seed",), ("~model",), ("~optim.lr",), ("~run",),
    ("data=",), ("optim=[sgd,adamw]",), ("optim={name:sgd}",), ("data@x=digits",),
    ("+optim@extra=adamw",), ("optim@model=adamw",), ("model=../x",),
    ("data=/etc/passwd",), ("experiment=../../x",), ("experiment=[smoke,smoke]",), ("tuner=null",),
    ("seed=range(1,3)",), ("seed=choice(1,2)",), ("seed=glob(*)",),
    ("optim.lr=tag(a,1)",), ("seed=sort(3,1)",), ("seed=str(x)",), ("model.name=os:system",),
    ("model.name=:",), ("model.name=a:b:c",), ("model.name=os.path:",), ("data.name=json:loads",),
    ("model.name=\x00",), ("device=cuda:99",), ("device=cpu:1",),
    ("device=meta",), ("device=''",), ("device=cuda:-1",), ("device=xpu",), ("device=CPU",),
    ("profile.steps=10-5",), ("profile.steps=\u0661-\u0662",), ("profile.steps=-1",),
    ("data.md5=x",), ("data.mirror=file:///etc", "data=cifar10"),
    ("data.mirror=http://127.0.0.1:9/\x1b[2J", "data=cifar10"),
    ("data.mirror=gopher://127.0.0.1:9", "data=cifar10"), ("data.mirror=''", "data=cifar10"),
    ("data.mirror=http://[::1", "data=cifar10"), ("data.mirror=http://127.0.0.1:x/",
    "data=cifar10"),
    ("resume=auto",), ("resume=''",), ("resume=.",), ("resume=/dev/zero",), (
        "resume=/proc/self/mem",),
    ("model.weights=/dev/stdin",), ("model.weights=/dev/null",), ("model.weights=DEFAULT",),
    ("model.weights=.",), ("optim.betas=[0.9]",), ("augment.scale=[0.9,0.1]",),
    ("schedule.warmup_epochs=1e18",), ("dist=spawn", "dist.nprocs=0"), ("dist=torchrun",),
    ("dist.backend=nccl", "dist=spawn", "dist.nprocs=2", "device=cpu"),
)  # fmt: skip


def settings(draw: random.Random) -> Iterator[Case]:
    """Values, names and ways to write them."""
    yield from _drawn(draw)
    for words in draw.sample(_WORDS, 50):
        if any("\0" in word for word in words):
            continue
        codes = ends(2, 3, 4)
        # a number of a choice, or what another program would say
        if words[0].startswith(("seed=str", "--info", "seed=1", "+optim@", "experiment=[", "~")):
            codes = ends(0, 2, 3)
        base = ("device=cpu",) if not any(word.startswith("device") for word in words) else ()
        more = () if any(word.startswith(("data", "experiment")) for word in words) else DIGITS[:1]
        yield refusal(f"{' '.join(words)[:40]!r}", *base, *more, "trainer.max_steps=1", *words,
                      codes=codes)  # fmt: skip


_HEAD = "# @package _global_\n"
_FILES: dict[str, tuple[bytes, frozenset[int]]] = {
    "empty": (b"", EITHER),
    "a list": (b"- 1\n- 2\n", REFUSED),
    "a scalar": (b"5\n", REFUSED),
    "two documents": (f"{_HEAD}seed: 1\n---\nseed: 2\n".encode(), REFUSED),
    "byte order mark": (b"\xef\xbb\xbf" + f"{_HEAD}seed: 1\n".encode(), EITHER),
    "NUL": (f"{_HEAD}run:\n  name: 'a\\0b'\n".encode(), REFUSED),
    "escape in a value": (f'{_HEAD}run:\n  name: "a\\e[31m"\n'.encode(), REFUSED),
    "escape in a key": (f'{_HEAD}"a\\e]0;x\\a": 1\n'.encode(), REFUSED),
    "key is a list": (f"{_HEAD}? [a, b]\n: 1\n".encode(), REFUSED),
    "key is a number": (f"{_HEAD}1: 2\n".encode(), REFUSED),
    "key is null": (f"{_HEAD}null: 2\n".encode(), REFUSED),
    "recursive alias": (f"{_HEAD}run: &a\n  name: *a\n".encode(), REFUSED),
    "recursive list": (f"{_HEAD}x: &a [*a]\n".encode(), REFUSED),
    "unknown alias": (f"{_HEAD}seed: *nobody\n".encode(), REFUSED),
    "binary tag": (f"{_HEAD}seed: !!binary aGVsbG8=\n".encode(), REFUSED),
    "set tag": (f"{_HEAD}data: !!set {{a, b}}\n".encode(), REFUSED),
    "omap tag": (f"{_HEAD}data: !!omap [a: 1]\n".encode(), REFUSED),
    "timestamp": (f"{_HEAD}seed: 2001-12-14t21:59:43.10-05:00\n".encode(), REFUSED),
    "date": (f"{_HEAD}run:\n  name: 2001-12-14\n".encode(), EITHER),
    "bad date": (f"{_HEAD}run:\n  name: 2001-99-99\n".encode(), EITHER),
    "python name": (f"{_HEAD}seed: !!python/name:os.system\n".encode(), REFUSED),
    "python module": (f"{_HEAD}seed: !!python/module:os\n".encode(), REFUSED),
    "sexagesimal": (f"{_HEAD}seed: 1:30\n".encode(), EITHER),
    "octal": (f"{_HEAD}seed: 0o17\n".encode(), EITHER),
    "huge exponent": (f"{_HEAD}optim:\n  lr: 1e99999\n".encode(), REFUSED),
    "utf-16 surrogate": (b"# @package _global_\nrun:\n  name: \"\\ud800\"\n", REFUSED),
    "directive": (b"%YAML 9.9\n---\nseed: 1\n", REFUSED),
    "unknown directive": (b"%FOO x\n---\nseed: 1\n", REFUSED),
    "package to nowhere": (b"# @package a.b.c\nseed: 1\n", REFUSED),
    "bad package": (b"# @package ..\nseed: 1\n", REFUSED),
    "package header twice": (b"# @package _global_ _group_\nseed: 1\n", REFUSED),
    "defaults no list": (f"{_HEAD}defaults: 5\n".encode(), REFUSED),
    "defaults of numbers": (f"{_HEAD}defaults:\n  - 5\n".encode(), REFUSED),
    "defaults missing": (f"{_HEAD}defaults:\n  - nowhere\n".encode(), REFUSED),
    "defaults up": (f"{_HEAD}defaults:\n  - ../../../../etc/passwd\n".encode(), REFUSED),
    "defaults interpolated": (f"{_HEAD}defaults:\n  - /data: ${{nothing}}\n".encode(), REFUSED),
    "defaults null": (f"{_HEAD}defaults:\n  - override /data: null\n".encode(), EITHER),
    "override of nothing": (f"{_HEAD}defaults:\n  - override /nope: x\n".encode(), REFUSED),
    "target": (f"{_HEAD}model:\n  _target_: os.system\n  name: small\n".encode(), REFUSED),
    "interpolation of itself": (f"{_HEAD}seed: ${{seed}}\n".encode(), REFUSED),
    "circle of two": (f"{_HEAD}seed: ${{optim.lr}}\noptim:\n  lr: ${{seed}}\n".encode(), REFUSED),
    "group is a scalar": (f"{_HEAD}optim: 5\n".encode(), REFUSED),
    "group is null": (f"{_HEAD}optim: null\n".encode(), REFUSED),
    "group is a list": (f"{_HEAD}loader: [1]\n".encode(), REFUSED),
    "value is a mapping": (f"{_HEAD}seed: {{a: 1}}\n".encode(), REFUSED),
    "hydra's callbacks": (
        f"{_HEAD}hydra:\n  callbacks:\n    a:\n      _target_: os.system\n      command: touch x\n"
        .encode(),
        EITHER,
    ),
    "dots in a key": (f"{_HEAD}optim.lr: 0.5\n".encode(), REFUSED),
    "merge of itself": (f"{_HEAD}run: &a\n  <<: *a\n".encode(), EITHER),
    "unclosed": (f"{_HEAD}seed: [1\n".encode(), REFUSED),
    "only colons": (b":::::\n", REFUSED),
    "tabs after a key": (f"{_HEAD}seed:\t1\n".encode(), EITHER),
    "carriage returns": (b"# @package _global_\rseed: 1\r", EITHER),
    "line separators": (f"{_HEAD}seed: 1\u2028optim: 5\n".encode(), EITHER),
}  # fmt: skip


def files(draw: random.Random) -> Iterator[Case]:
    """A user's files of settings: of an experiment, of a whole folder."""
    for name in draw.sample(sorted(_FILES), 40):
        content, codes = _FILES[name]

        def prepare(place: Path, content: bytes = content) -> None:
            (place / "work/mine/experiment").mkdir(parents=True)
            (place / "work/mine/experiment/bad.yaml").write_bytes(content)

        words: tuple[str, ...] = (
            "--config-dir=mine",
            "experiment=bad",
            "--cfg",
            "job",
            "--resolve",
        )
        if draw.random() < 0.5:
            words = (*words[:2], *DIGITS[:-1])
        else:
            # values are not checked, only composed
            codes = EITHER
        yield refusal(name, *words, codes=codes, prepare=prepare)
    yield from _odd_files()


def _odd_files() -> Iterator[Case]:
    makers: dict[str, Callable[[Path], object]] = {
        "FIFO": lambda path: os.mkfifo(path),
        "folder": lambda path: path.mkdir(),
        "link to itself": lambda path: path.symlink_to(path),
        "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "link to nothing": lambda path: path.symlink_to("nowhere"),
    }
    for name, make in makers.items():
        for group in ("experiment", "data"):

            def prepare(place: Path, make: Any = make, group: str = group) -> None:
                (place / "work/mine" / group).mkdir(parents=True)
                make(place / "work/mine" / group / "bad.yaml")

            yield refusal(f"{group} is a {name}", "--config-dir=mine", f"{group}=bad",
                          prepare=prepare)  # fmt: skip

        def whole(place: Path, make: Any = make) -> None:
            (place / "work/mine").mkdir()
            make(place / "work/mine/config.yaml")

        yield refusal(f"config.yaml is a {name}", "--config-path=mine", prepare=whole)


_FLAGS: tuple[tuple[tuple[str, ...], frozenset[int]], ...] = (
    (("--config-name=nope",), REFUSED), (("--config-name=../x",), REFUSED),
    (("--config-name=",), EITHER), (("--config-dir=/nope",), REFUSED),
    (("--config-dir=/dev/null",), REFUSED), (("--config-dir=",), EITHER),
    (("--config-path=/nope",), REFUSED), (("--config-path=pkg://nope",), REFUSED),
    (("--config-path=file:///nope",), REFUSED), (("--config-path=pkg://harness.conf",), REFUSED),
    (("--config-dir",), REFUSED), (("--cfg=bogus",), REFUSED), (("--cfg",), REFUSED),
    (("--info=bogus",), REFUSED), (("--info=all", *DIGITS[:1]), EITHER),
    (("--info=defaults-tree",), EITHER), (("--package=nope", "--cfg=job"), EITHER),
    (("--package=data", "--cfg=job"), EITHER), (("--resolve",), REFUSED),
    (("--cfg=hydra", "--resolve"), EITHER), (("--cfg=all",), EITHER), (("--hydra-help",), EITHER),
    (("--help", "seed=x"), EITHER), (("--help", "data=nope"), EITHER),
    (("--shell-completion",), EITHER), (("-sc", "install=bash"), EITHER),
    (("-sc", "query=bash"), EITHER), (("-sc", "install=nope"), REFUSED),
    (("--experimental-rerun=config.pickle",), REFUSED), (("--experimental-rerun=../in",), REFUSED),
    (("hydra/launcher=nope",), REFUSED), (("hydra/sweeper=nope",), REFUSED),
    (("hydra.searchpath=[file:///nope]", "experiment=nope"), REFUSED),
    (("hydra.searchpath=5", "seed=1"), REFUSED), (("hydra.searchpath=[pkg://os]",), EITHER),
    (("hydra.mode=MULTIRUN", "seed=x"), REFUSED), (("hydra.mode=x",), REFUSED),
    (("hydra=null",), REFUSED), (("hydra.job.env_set.OMP_NUM_THREADS=x", "seed=x"), REFUSED),
    (("hydra.verbose=true", "seed=x"), REFUSED), (("hydra.verbose=[a,b]", "seed=x"), REFUSED),
    (("hydra.run.dir=${seed}", "seed=x"), REFUSED),
    (("hydra.run.dir=" + "x/" * 3000,), REFUSED), (("hydra.run.dir=" + "x" * 300,), REFUSED),
    (("hydra.run.dir=/proc/1/x",), REFUSED), (("hydra.run.dir=/sys/x",), REFUSED),
    (("hydra.run.dir=null",), REFUSED),
    (("-m", "hydra.sweep.dir=/dev/null/x", "seed=1"), REFUSED),
    (("-m", "seed=1,x"), REFUSED), (("-m", "seed=range(1)"), EITHER),
    (("-m", "seed=range(3,1)"), REFUSED), (("-m", "seed="), REFUSED),
    (("-m", "run.name=a,a", "seed=x"), REFUSED), (("-m", "-m", "seed=x"), REFUSED),
    (("-h", "-m"), EITHER), (("--version", "--bogus"), EITHER), (("page",), REFUSED),
    (("compare",), REFUSED), (("page", "--bogus"), REFUSED), (("compare", "--json"), REFUSED),
    (("--multirun=yes",), REFUSED), (("--bogus=1",), REFUSED), (("-x",), REFUSED), (("-",),
    REFUSED),
    (("--",), EITHER), (("---",), REFUSED), (("",), REFUSED), ((" ",), REFUSED), (("\t",), REFUSED),
    (("--seed", "1"), REFUSED), (("-c",), REFUSED), (("-c", "job", "-p", "x.y"), EITHER),
)  # fmt: skip


def flags(draw: random.Random) -> Iterator[Case]:
    """Hydra's own flags and its own settings."""
    for words, codes in draw.sample(_FLAGS, 55):
        more = () if words[0] in ("page", "compare") else ("device=cpu", "trainer.max_steps=1")
        alone = any(word.startswith("data=") for word in words)
        if not more or alone or words[-1] in ("--config-dir", "--cfg", "-c"):
            yield refusal(f"{' '.join(words)[:40]!r}", *words, codes=codes)
        else:
            yield refusal(f"{' '.join(words)[:40]!r}", *more, "data=digits", *words, codes=codes)
    yield trained("hydra.job.chdir=true", "hydra.job.chdir=true", f"data.root=../../{IMAGES}")
    yield trained("hydra.output_subdir=sub", "hydra.output_subdir=sub")
    yield trained("hydra/job_logging=default", "hydra/job_logging=default", lines=40)
    yield trained("hydra.verbose=true", "hydra.verbose=true", lines=200)
    yield trained("hydra.job.env_set", "+hydra.job.env_set.OMP_NUM_THREADS=x")
    yield trained("hydra.mode=RUN", "hydra.mode=RUN")


_VARIABLES: tuple[dict[str, str | None], ...] = (
    {"OMP_NUM_THREADS": "x"}, {"OMP_NUM_THREADS": "-1"}, {"OMP_NUM_THREADS": "99999"},
    {"MKL_NUM_THREADS": "x"}, {"CUDA_VISIBLE_DEVICES": "x"}, {"CUDA_VISIBLE_DEVICES": "0,0,-1"},
    {"LANG": "C", "LC_ALL": "C"}, {"LC_ALL": "xx_YY.bogus"}, {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"}, {"PYTHONUTF8": "0", "LC_ALL": "C"},
    {"TERM": "bogus", "FORCE_COLOR": None}, {"COLUMNS": "1"}, {"COLUMNS": "x"}, {"LINES": "-5"},
    {"HOME": None}, {"HOME": "/nonexistent"}, {"HOME": ""}, {"HOME": "/dev/null"},
    {"HOME": None, "WELLFED_CACHE": None, "XDG_CACHE_HOME": "../cache"},
    {"XDG_CACHE_HOME": "/dev/null", "WELLFED_CACHE": None}, {"WELLFED_CACHE": "relative"},
    {"WELLFED_CACHE": "/dev/null"}, {"WELLFED_CACHE": "/proc/x"}, {"WELLFED_CACHE": "/dev/full"},
    {"WELLFED_CACHE": "x" * 5000}, {"WELLFED_CACHE": "../cache/\udcff"}, {"TMPDIR": "/nonexistent"},
    {"TMPDIR": ""}, {"TMPDIR": "."}, {"TMPDIR": "/dev/null"}, {"TMPDIR": "../in/images"},
    {"PYTHONWARNINGS": "error"}, {"PYTHONHASHSEED": "7"}, {"PYTHONOPTIMIZE": "2"},
    {"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONDEVMODE": "1"}, {"PYTHONSAFEPATH": "1"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"RANK": "1"}, {"RANK": "5",
    "WORLD_SIZE": "2"},
    {"RANK": "\u0662"}, {"RANK": "9" * 30}, {"RANK": "-1"}, {"WORLD_SIZE": "2"},
    {"WORLD_SIZE": "0"},
    {"LOCAL_RANK": "7"}, {"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, {"SLURM_JOB_ID": "\x1b[31m"},
    {"SLURM_CPUS_PER_TASK": "x"}, {"TORCHELASTIC_RUN_ID": "x"}, {"MASTER_PORT": "x"},
    {"MASTER_ADDR": "nowhere"}, {"TORCHELASTIC_RESTART_COUNT": "x"}, {"TORCH_HOME": "/dev/null"},
    {"HYDRA_FULL_ERROR": "0"}, {"HYDRA_FULL_ERROR": "x"}, {"UV": "x\x1b[31m"}, {"PATH": ""},
    {"PATH": None}, {"NO_COLOR": "1", "TERM": "dumb"}, {"SHELL": "/dev/null"}, {"USER": None},
    {"LD_PRELOAD": ""}, {"PYTHONSTARTUP": "/dev/null"}, {"KMP_AFFINITY": "disabled"},
)  # fmt: skip
_MAY_WARN = ("PYTHONDEVMODE", "PYTHONWARNINGS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_MAY_REFUSE = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "TORCHELASTIC_RUN_ID",
    "TMPDIR",
    "PYTHONWARNINGS",
)


def variables(draw: random.Random) -> Iterator[Case]:
    """What launchers and shells set, around a whole run."""
    for env in draw.sample(_VARIABLES, 42):
        name = " ".join(f"{key}={(value or str(value))[:20]!r}" for key, value in env.items())
        step = Step(
            (*RUN, *draw.choice(((), ("loader.num_workers=1",), ("loader.num_workers=0",)))),
            ends(0, 2) if any(key in env for key in _MAY_REFUSE) else ends(0),
            lines=12 if any(key in env for key in _MAY_WARN) else 4,
        )
        yield Case("", name, (step,), needs=("images",), env=env, check=same_if_done,
                   leaves=("relative", "~"), leaves_tmp="TMPDIR" in env,
                   changes_in=False)  # fmt: skip
    for given in ({"RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1"}, {"LOCAL_RANK": "1"}):
        # it holds a run already, and must not be mixed with another
        step = Step((*RUN, "seed=1"), REFUSED)
        yield Case("", f"{' '.join(given)} in a folder that holds a run", (step,), env=given,
        check=same,
                   needs=("images", "done"))  # fmt: skip
    for name, value in (("RANK", "x"), ("WORLD_SIZE", " 2"), ("LOCAL_WORLD_SIZE", "1.5"),
                        ("MASTER_PORT", "port")):  # fmt: skip
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", name: value}  # fmt: skip
        yield refusal(f"torchrun's {name}={value}", *BARE, "dist=torchrun", "run.name=x", env=env)
