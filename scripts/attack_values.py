"""Settings with odd values, and settings that may contradict each other, as a command has them."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
import types
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from harness import config as schema
from harness.cli import app, job
from harness.cli import compose as composing
from harness.config import Config, DistName, Mode
from harness.runtime import folder
from scripts.attack_case import Case, End, inside, quiet, refused

# what a run needs to be over in a quarter of a second
_SMALL = (
    "data=digits", "data.image_size=16", "data.eval_resize=16", "trainer.max_steps=2",
    "loader.batch_size=8", "device=cpu", "trainer.num_threads=1",
)  # fmt: skip
_FEEDS = (
    ("loader.backend=threads", "loader.num_workers=0"), ("loader.num_workers=0",),
    ("loader.backend=threads", "loader.num_workers=1"), ("loader.backend=arrays",),
)  # fmt: skip

NUMBERS = (
    "nan", "inf", "-inf", "-0.0", "-1", "0", "1", "2", "0.5", "1e308", "1e-320", "1" + 30 * "0",
    str(2**63), str(2**31), str(2**31 - 1), "-9223372036854775809", "1e3", "007", "1_000", "0x10",
    "1e-300", "3.0", "+1", "1e400",
)  # fmt: skip
WORDS = (
    "true", "false", "yes", "on", "off", "True", "", "null", "None", "~", "???", "[]", "{}",
    "[1,2]", "[1,2,3]", "[nan,nan,nan]", "[0.5,true,0.5]", "{a:1}", "[[1],[2]]", "text", "'text'",
    "\u0663", "\u0664\u0662", "\uff11", 5000 * "x", "'a\x1b[31mb'", "'a\tb'", "'a\nb'", "\x00",
    "'\x00'", "'\x7f'", "'\u202e\u2066'", "'\udcff'", "\udcff", "..", "../..", "/", "/dev/null",
    "/proc/self/mem", "~nouser/x", "'a b'", "a=b", "a:b", ":", "a:", ":b", "os:getcwd", "a;b", "-",
    "--", "%s", "{0}", "\\", "'\\''", "a,b", "(", "choice(1,2)", "range(1,3)", "glob(*)", "1-1",
    "0-0", "2-1", "1-99999999999999999999", "\u0661-\u0662", "1-2\n",
)  # fmt: skip
RESOLVED = (
    "${seed}", "${loader.batch_size}", "${self}", "${NAME}", "${oc.env:NONE_SUCH}",
    "${oc.env:HOME}", "${oc.env:NONE_SUCH,null}", "${oc.env:NONE_SUCH,5}", "${oc.decode:'1'}",
    "${oc.decode:'[1,2]'}", "${oc.decode:'{'}", "${oc.select:seed}", "${oc.select:none.such,3}",
    "${oc.create:{a:1}}", "${oc.dict.keys:optim}", "${oc.dict.values:optim}",
    "${oc.deprecated:seed}", "${hydra:job.name}", "${hydra:runtime.cwd}", "${wellfed.run_dir:}",
    "${now:%Y}", "${..seed}", "${.}", "${}", "${", "'${'", "${a", "\\${seed}", "${optim}",
    "${data}", "${optim.lr}${optim.lr}", "${seed}x", "${oc.env:A_NUL}", "${oc.env:BYTES}",
    "${oc.env:NUMBER}", "${oc.env:${oc.env:NUMBER}}",
)  # fmt: skip
_PLAIN = re.compile(r"[\w./:-]+")


def register() -> None:
    """Has Hydra compose in this process, as often as is asked."""
    composing.register()
    for name in ("wellfed.run_dir", "wellfed.sweep_dir"):
        OmegaConf.register_new_resolver(name, lambda *_: "never used", replace=True)
    os.environ |= {"NUMBER": "7", "BYTES": os.fsdecode(b"\xff")}
    GlobalHydra.instance().clear()
    # what is imported and generated once is no call's time
    small = [*_SMALL, "loader.num_workers=0"]
    assert trained(checked(small), small) == End()


def checked(overrides: Sequence[str]) -> Config:
    """Returns the settings of a command line, checked up to the run's folder.

    Raises:
        Exception: what the command would tell.
    """
    try:
        with initialize_config_dir(str(schema.CONF), version_base="1.3"):
            config = schema.load(
                compose("config", overrides=composing.prepared([*overrides]).overrides)
            )
        job.check(config)
        folder.own(Path(folder.run_folder(config.run.name, config.resume, config.mode)))
    except Exception as error:
        found = app._composing(error)
        if found is error:
            raise
        raise found from error
    return config


def is_cheap(c: Config) -> bool:
    """Whether a run of two steps by these settings takes less than a second or so."""
    workers = {c.loader.num_workers, c.loader.val.num_workers} - {None, 0, 1, 2}
    form = schema.named_backend(c)
    has_processes = form is schema.BackendName.processes and bool(
        {c.loader.num_workers, c.loader.val.num_workers} - {0}
    )
    return (
        c.data.name == "digits"
        and c.mode in (Mode.train, Mode.verify)
        and c.model.name == "small"
        and c.dist.name is DistName.single
        and c.device in ("cpu", "auto")
        and not (c.loader.autotune or c.trainer.compile or workers or has_processes)
        and c.data.image_size <= 64
        and (c.data.eval_resize or 0) <= 64
        and (c.trainer.max_steps or 99) * min(c.trainer.accumulate_steps, 200) <= 400
        and (c.trainer.num_threads or 99) <= 8
        and c.augment.rand_augment <= 2
        and c.augment.pad <= 1000
    )


def trained(config: Config, overrides: Sequence[str]) -> End:
    """Runs ``config`` in this process, in a folder of its own."""
    with inside() as place, quiet() as text:
        try:
            job.run(0, job.Job(config, place / "run", tuple(overrides)))
        except Exception as error:
            return refused(error)
        files = {file.name for file in (place / "run").iterdir()}
        if config.mode is Mode.train and "report.json" not in files:
            return End(wrong=f"no report.json, only {sorted(files)}")
    if "Traceback" in text.getvalue():
        return End(wrong=f"a traceback was printed: {text.getvalue()[-600:]}")
    return End()


def leaves() -> dict[str, Any]:
    """Returns every setting's dotted name and its type."""
    found: dict[str, Any] = {}

    def look(kind: type, prefix: str) -> None:
        for name, hint in get_type_hints(kind).items():
            if dataclasses.is_dataclass(hint):
                look(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                found[f"{prefix}{name}"] = hint

    look(Config, "")
    return found


def _value(config: Config, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


def changed_silently(kind: Any, text: str, value: Any) -> str:
    """Returns how an accepted ``value`` differs from the ``text`` that was typed; else nothing.

    Only what is written plainly has one meaning.
    """
    kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    told = f"typed {text}, became {value!r}"
    if value is None:
        is_meant = text in ("null", "None", "~") or "${" in text
        return "" if is_meant and type(None) in kinds else told
    if not _PLAIN.fullmatch(text):
        return ""
    if bool in kinds:
        meant = {"true": True, "yes": True, "on": True, "1": True}
        meant |= {"false": False, "no": False, "off": False, "0": False}
        return "" if meant.get(text.lower()) is value else told
    if int in kinds or float in kinds:
        try:
            number = float(text) if float in kinds else int(text)
        except ValueError:
            return told
        return "" if type(value) in (int, float) and value == number else told
    if str in kinds:
        return "" if str(value) == text else told
    if isinstance(value, Enum):
        return "" if value.name == text else told
    return ""


def _odd(path: str, kind: Any, text: str, feed: Sequence[str], run: bool) -> Case:
    text = text.replace("NAME", path)
    typed = f"{path}={text}"
    overrides = [each for each in (*_SMALL, *feed) if each.partition("=")[0] != path] + [typed]

    def tried() -> End:
        with inside(), quiet():
            try:
                config = checked(overrides)
            except Exception as error:
                return refused(error, (path, text[:20] or "''", path.rpartition(".")[2]))
        value = _value(config, path)
        if wrong := changed_silently(kind, text, value):
            return End(wrong=f"silent change: {wrong}")
        plain = schema.to_plain(config)
        if schema.from_plain(plain) != config:
            return End(wrong="other settings after a checkpoint's way and back")
        if isinstance(value, float) and not math.isfinite(value):
            return End(wrong=f"silent change: accepted {value}")
        return trained(config, [typed]) if run and is_cheap(config) else End()

    return Case(f"train.py {' '.join(map(_shown, overrides))}", tried)


def _shown(text: str) -> str:
    return ascii(text if len(text) < 200 else f"{text[:60]}... ({len(text)} characters)")[1:-1]


def odd_values(seed: int, place: Path) -> Iterator[Case]:
    """Every setting with a sample of all odd values."""
    register()
    rng = random.Random(f"settings {seed}")
    while True:
        for path, kind in leaves().items():
            for values in (NUMBERS, NUMBERS, WORDS, WORDS, WORDS, RESOLVED, RESOLVED):
                # a run of processes, of a search or without an end is no cheap one
                yield _odd(path, kind, rng.choice(values), rng.choice(_FEEDS), run=True)


def _fair(path: str, kind: Any, meta: Any, rng: random.Random) -> str | None:
    """Returns a valid value of a setting by itself, typed."""
    kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    if type(None) in kinds and rng.random() < 0.2:
        return "null"
    first = kinds[0]
    if first is bool:
        return rng.choice(("true", "false"))
    if isinstance(first, type) and issubclass(first, Enum):
        return str(rng.choice([*first]).name)
    if first in (int, float):
        low = meta.get("ge", meta.get("gt", 0))
        high = min(meta.get("le", meta.get("lt", low + 1000)), low + 1000)
        if first is int:
            return str(rng.choice((low, low + 1, low + 2, min(low + 7, high), high)))
        edges = (low + 1e-9, low + (high - low) / 3, high - 1e-9, low + 0.001 * (high - low))
        return repr(float(rng.choice(edges)))
    if get_origin(first) is tuple:
        number = rng.choice((0.001, 0.25, 0.5, 0.999))
        if get_args(first)[0] is int:
            number = rng.choice((0, 1, 255))
        return f"[{','.join([str(number)] * len(get_args(first)))}]"
    return None


_GROUPS = (
    "optim=adamw", "optim=sgd", "schedule=step", "schedule=constant", "schedule=cosine",
    "augment=imagenet", "augment=cifar", "augment=center", "augment=shapes", "tuner=grid",
    "experiment=smoke", "data=shapes", "data=fake", "data=own", "mode=verify", "mode=evaluate",
    "resume=auto run.name=x", "resume=auto", "run.name=x", "profile.steps=1-1",
    "profile.steps=2-9", "data.cache=ram", "data.cache=disk", "data.on_error=skip",
    "trainer.precision=bf16", "trainer.precision=fp16", "trainer.deterministic=true",
    "checkpoint.every_steps=1",
    "loader.restart_workers=true loader.backend=threads loader.num_workers=1",
    "loader.drop_last=false", "trainer.accumulate_steps=3", "loader.batch_size=1",
    "loader.batch_size=1438", "loader.batch_size=1439", "loader.val.batch_size=1",
    "data.image_size=8 data.eval_resize=8", "augment.mixup=0.2 augment.cutmix=1.0",
    "augment.crop=pad augment.pad=999", "augment.random_erasing=1.0", "augment.rand_augment=2",
    "watch.tensorboard=false", "checkpoint.enabled=false", "model.weights=DEFAULT",
    "loader.timeout_s=1e300 loader.backend=threads loader.num_workers=2", "watch.sample_s=3600",
    "checkpoint.grace_s=1e300", "checkpoint.every_minutes=1e300",
    "checkpoint.every_minutes=1e-300", "optim.lr=1e300", "optim.clip_norm=1e-300",
    "optim.weight_decay=1e300", "augment.mixup=1e300", "optim.label_smoothing=0.9999999999999999",
    "augment.mixup=1e-300", "augment.cutmix=1e-300", "schedule.warmup_epochs=1 trainer.epochs=1",
    "schedule.gamma=1e-300", "optim.eps=1e-300", "augment.scale=[1e-300,1e-300]",
    "augment.ratio=[1e-300,1e300]", "augment.ratio=[1e300,1e300]",
    "augment.color_jitter=[1e300,1e300,1e300,0.5]", "data.std=[1e-300,1e-300,1e-300]",
    "data.max_pixels=1", "data.max_bad_fraction=1.0 data.on_error=skip",
    "loader.val.num_workers=1",
)  # fmt: skip


def _together(texts: Sequence[str], feed: Sequence[str]) -> Case:
    small = [*_SMALL, *feed]
    names = {text.partition("=")[0] for text in texts}
    overrides = [text for text in small if text.partition("=")[0] not in names] + [*texts]

    def tried() -> End:
        with inside(), quiet():
            try:
                config = checked(overrides)
            except Exception as error:
                names = tuple(text.partition("=")[0] for text in texts)
                return refused(error, (*names, *(name.rpartition(".")[2] for name in names)))
        for text in texts:
            path, _, value = text.partition("=")
            if path in leaves() and (
                wrong := changed_silently(leaves()[path], value, _value(config, path))
            ):
                return End(wrong=f"silent change: {path}: {wrong}")
        return trained(config, texts) if is_cheap(config) else End()

    return Case(f"train.py {' '.join(map(_shown, overrides))}", tried)


def together(seed: int, place: Path) -> Iterator[Case]:
    """Two or three settings, each valid by itself."""
    register()
    rng = random.Random(f"together {seed}")
    kinds = leaves()
    metas = {path: declared.metadata for path, _, declared in schema.walk(Config())}
    for text in _GROUPS:
        yield _together(text.split(), ("loader.num_workers=0",))
    while True:
        texts: dict[str, str] = {}
        for _ in range(rng.choice((2, 2, 3))):
            if rng.random() < 0.5:
                for text in rng.choice(_GROUPS).split():
                    texts[text.partition("=")[0]] = text
                continue
            path = rng.choice([*kinds])
            value = _fair(path, kinds[path], metas[path], rng)
            if value is not None:
                texts[path] = f"{path}={value}"
        # a group first, or it would take back what is chosen within it
        yield _together(sorted(texts.values(), key=lambda text: "." in text), rng.choice(_FEEDS))
