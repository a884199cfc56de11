"""The library's own objects, DataPrefetcher, StepClock and tune, with odd arguments and loaders."""

from __future__ import annotations

import collections
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.clock.clock import StepClock
from harness.config import TunerConfig
from harness.feed.prefetcher import DataPrefetcher
from harness.runtime.errors import RunError
from harness.tuning.library import tune
from scripts.attack_case import Case, End, quiet
from scripts.attack_parts import CircleError, OtherEnd, Samples, UnprintableError

Pair = collections.namedtuple("Pair", "images labels")

_IMAGES = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).reshape(2, 3, 8, 8)
_LABELS = torch.tensor([0, 1])
_ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: ValueError("odd\nlines"), UnprintableError, KeyboardInterrupt, lambda: SystemExit(3),
    OtherEnd, GeneratorExit, CircleError, lambda: StopIteration(5), lambda: MemoryError("x"),
    lambda: RecursionError("x"), lambda: OSError(28, "x"),
)  # fmt: skip


class _Loader:
    """Gives ``batches``; raises ``error`` at one of its methods."""

    def __init__(self, batches: Sequence[Any], at: str = "", error: Any = None) -> None:
        self.batches = batches
        self.at = at
        self.error = error
        if at == "on_device":
            self.on_device = error

    def __iter__(self) -> Iterator[Any]:
        if self.at == "iter":
            raise self.error
        return self

    def __next__(self) -> Any:
        if self.at == "next":
            raise self.error
        self.at = "next" if self.at == "later" else self.at
        self.given = getattr(self, "given", -1) + 1
        if self.given >= len(self.batches):
            self.given = -1
            raise StopIteration
        return self.batches[self.given]

    def __len__(self) -> Any:
        return self.error if self.at == "len" else len(self.batches)


class _Only:
    """Has a ``to`` and nothing else."""

    def to(self, *_: Any, **__: Any) -> Any:
        return self


class _Stamped:
    """Says that it is a batch of a feed of ours."""

    stamps = "odd"
    images: Any = None
    labels: Any = None


class _Sub(torch.Tensor):
    """A tensor of a class of the user's."""


def _tensors() -> dict[str, Any]:
    floats = _IMAGES.float()
    return {
        "empty": _IMAGES[:0], "strided": _IMAGES[..., ::2],
        "expanded": _IMAGES[:1].expand(2, 3, 8, 8), "flipped": _IMAGES.transpose(2, 3),
        "channels last": _IMAGES.to(memory_format=torch.channels_last), "meta": _IMAGES.to("meta"),
        "sparse": floats.to_sparse(), "complex": floats.to(torch.complex64),
        "conj": (floats + 1j).conj(), "bool": _IMAGES > 9, "int64": _IMAGES.long(),
        "int16": _IMAGES.short(), "huge int64": _IMAGES.long() + 2**53 + 1,
        "float64": floats.double(), "float64 huge": floats.double() * 1e300,
        "float16": floats.half(), "bfloat16": floats.bfloat16(),
        "gradient": floats.requires_grad_(), "nan": floats.detach() * float("nan"),
        "0-d": torch.tensor(5), "1-D": torch.ones(2), "3-D": _IMAGES[0], "5-D": _IMAGES[None],
        "one channel": _IMAGES[:, :1], "four channels": torch.cat([_IMAGES, _IMAGES], 1)[:, :4],
        "no pixels": _IMAGES[:, :, :0], "large": torch.zeros(2, 3, 128, 128, dtype=torch.uint8),
        "large strided": torch.zeros(2, 3, 128, 256, dtype=torch.uint8)[..., ::2],
        "nested": torch.nested.nested_tensor([floats[0].detach(), floats[0, :, :4].detach()]),
        "parameter": nn.Parameter(floats.detach().clone()), "subclass": _IMAGES.as_subclass(_Sub),
        "array": _IMAGES.numpy(), "list": _IMAGES.tolist(), "None": None, "text": "x",
        "only to": _Only(), "module": nn.Linear(1, 1), "a class": Tensor,
    }  # fmt: skip


def _given(value: Any) -> Any:
    return value


def _failing(at: str, make: Callable[[], BaseException]) -> Any:
    return _Loader([(_IMAGES, _LABELS)] * 2, at, make())


def _loaders() -> dict[str, Callable[[], Any]]:
    good = (_IMAGES, _LABELS)
    found: dict[str, Callable[[], Any]] = {}
    for name, value in _tensors().items():
        found[f"images {name}"] = partial(_given, [(value, _LABELS)])
        found[f"labels {name}"] = partial(_given, [(_IMAGES, value)])
    for at, make in itertools.product(("iter", "next", "later"), _ERRORS):
        found[f"raises {type(make()).__name__} in {at}"] = partial(_failing, at, make)
    odd: Any
    for odd in (-1, None, "x", 1.5, 2**70):
        found[f"len {odd}"] = partial(_Loader, [good], "len", odd)
    for odd in (None, "x", True, torch.ones(2)):
        found[f"on_device {type(odd).__name__}"] = partial(_Loader, [good], "on_device", odd)
    batches: tuple[Any, ...] = (
        None, 5, "ab", b"ab", (), (_IMAGES,), (*good, 1), {"images": _IMAGES, "labels": _LABELS},
        Pair(*good), [_IMAGES, _LABELS], (None, None), iter(good), _Stamped(), {1, 2}, StepClock,
        torch.stack([_LABELS, _LABELS]), [good, good], np.zeros((2, 2)), object(),
        (_IMAGES, (_LABELS, _LABELS)), (_IMAGES, _LABELS[:1]),
    )  # fmt: skip
    for number, batch in enumerate(batches):
        found[f"batch {number} {type(batch).__name__}"] = partial(_given, [good, batch])
    for odd in (None, 5, "ab", object(), {}, {"a": 1}, list):
        found[f"loader {type(odd).__name__} {ascii(odd)[:20]}"] = partial(_given, odd)
    found["without end"] = lambda: itertools.repeat(good)
    found["of itself"] = lambda: DataPrefetcher([good], "cpu")
    ragged: Any = [torch.ones(2), torch.ones(3)]
    found["DataLoader, ragged"] = lambda: DataLoader(ragged, batch_size=2)
    nothing: Any = [None, None]
    found["DataLoader, None"] = lambda: DataLoader(nothing)
    return found


_BAD_OPTIONS: tuple[dict[str, Any], ...] = (
    {"mean": (0.5,) * 3}, {"std": (0.5,) * 3}, {"mean": (0.5,), "std": (0.5,)},
    {"mean": (), "std": ()}, {"mean": (0.5,) * 3, "std": (0.5,) * 2},
    {"mean": (0.5,) * 3, "std": (0.0,) * 3}, {"mean": (0.5,) * 3, "std": (float("nan"),) * 3},
    {"mean": (float("inf"),) * 3, "std": (1.0,) * 3}, {"mean": (0.5,) * 3, "std": (-1.0,) * 3},
    {"mean": ("a",) * 3, "std": ("b",) * 3}, {"mean": 0.5, "std": 0.5},
    {"mean": np.full(3, 0.5), "std": np.full(3, 0.5)},
    {"mean": torch.full((3,), 0.5), "std": torch.full((3,), 0.5)},
    {"mean": [[0.5]] * 3, "std": [[0.5]] * 3}, {"mean": (None,) * 3, "std": (None,) * 3},
    {"mean": "abc", "std": "abc"}, {"mean": (1e308,) * 3, "std": (1e-308,) * 3},
    {"mean": (0.5,) * 3, "std": (1e-320,) * 3}, {"mean": (10**400,) * 3, "std": (1,) * 3},
    {"device": "gpu"}, {"device": "cuda"}, {"device": "cuda:99"}, {"device": "cpu:7"},
    {"device": None}, {"device": 5}, {"device": "meta"}, {"device": "mps"}, {"device": ""},
    {"device": "cuda:-1"}, {"device": "xla"}, {"dtype": torch.int32}, {"dtype": torch.uint8},
    {"dtype": torch.bool}, {"dtype": "float32"}, {"dtype": None}, {"dtype": torch.complex64},
    {"dtype": torch.float64}, {"dtype": float}, {"clock": "x"}, {"clock": 5}, {"ahead": "no"},
    {"ahead": 5}, {"augment": 5}, {"augment": lambda i, b: None}, {"augment": lambda i, b: 1 / 0},
    {"augment": lambda i: i}, {"mix": lambda i, y, b: i}, {"mix": lambda i, y, b: None},
    {"mix": lambda i, y, b: (i, y, b)}, {"mix": "x"}, {"channels_last": "x"},
    {"unknown": 1},
)  # fmt: skip
_GOOD_OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {}, {"ahead": True}, {"ahead": True}, {"channels_last": True}, {"dtype": torch.bfloat16},
    {"mean": (0.5,) * 3, "std": (0.25,) * 3},
)  # fmt: skip


# what a program raises by mistake; others are torch's and Python's words on a wrong type
_SLIPS = (ArithmeticError, AssertionError, LookupError, NameError, UnboundLocalError)


def _is_own(error: BaseException) -> bool:
    """Whether ``error`` is one that a loader here raises of its own."""
    found: BaseException | None = error
    for _ in range(5):
        if found is None:
            return False
        frame = found.__traceback__
        while frame and frame.tb_next:
            frame = frame.tb_next
        if frame and frame.tb_frame.f_code.co_filename == __file__:
            return True
        found = found.__cause__ or found.__context__
    return False


def judged(error: BaseException, names: tuple[str, ...], bad_loader: bool) -> End:
    """Returns the end that ``error`` is: the caller's own, or a documented one that says what."""
    if _is_own(error):
        return End("the caller's own error")
    try:
        text = str(error)
    except Exception:
        return End(wrong="an error that cannot be printed, of the harness")
    if isinstance(error, RunError):
        return End(text)
    if isinstance(error, ValueError | TypeError):
        named = any(name in text for name in names)
        if bad_loader and not text:
            return End("no text", note="no text")
        if not named:
            return End(text, note=f"poor message: {type(error).__name__}: {text[:200]}")
        return End(text)
    if isinstance(error, _SLIPS):
        return End(wrong=f"undocumented {type(error).__name__}: {text[:200]}")
    return End(text or "no text", note=f"poor message: {type(error).__name__}: {text[:200]}")


def _same(given: Any, had: Tensor, kwargs: dict[str, Any]) -> str:
    """Returns what became of one batch in silence, if anything."""
    if not isinstance(given, Tensor) or given.is_sparse or given.is_nested or given.is_quantized:
        return ""
    if given.device.type == "meta" or kwargs.keys() - {"ahead", "channels_last"}:
        return ""
    if had.device.type == "meta" or (had.is_complex() and not given.is_complex()):
        return ""
    if given.is_complex():
        return "silent change: the imaginary part is gone" if not had.is_complex() else ""
    if given.numel() and not torch.equal(given.float().nan_to_num(), had.float().nan_to_num()):
        return "silent change: other values"
    return ""


def _prefetched(make: Callable[[], Any], kwargs: dict[str, Any], bad_loader: bool) -> End:
    given = dict(kwargs)
    device = given.pop("device", "cpu")
    names = ("DataPrefetcher", "device", *kwargs)
    pre = None
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loader = make()
            pre = DataPrefetcher(loader, device, **given)
            taken = [*itertools.islice(pre, 3)]
            repr(len(pre)) if hasattr(loader, "__len__") else None
            iter(pre)
            pre.next()
            pre.close()
            pre.close()
        except BaseException as error:
            if isinstance(error, TypeError | ValueError) and "__len__" in str(error):
                return End("len() as the loader has it")
            end = judged(error, names, bad_loader)
            # it must be usable once more, and end its thread
            if pre is not None:
                pre.close()
            return end
    if not isinstance(loader, list) or not taken:
        return End()
    if not all(isinstance(part, Tensor) for part in taken[0]) and not isinstance(
        loader[0][0], _Only
    ):
        return End(wrong=f"silent change: gives {[type(part).__name__ for part in taken[0]]}")
    return End(wrong=_same(loader[0][0], taken[0][0], given))


def prefetchers(seed: int, place: Path) -> Iterator[Case]:
    """DataPrefetcher over odd loaders, with odd arguments, and with both."""
    rng = random.Random(f"prefetchers {seed}")
    loaders = _loaders()
    good = lambda: [(_IMAGES, _LABELS)]
    large = lambda: [(torch.zeros(2, 3, 128, 128, dtype=torch.uint8), _LABELS)]
    pairs: list[tuple[str, Callable[[], Any], dict[str, Any], bool]] = [
        *(("good", good, kwargs, False) for kwargs in _BAD_OPTIONS),
        *(("large", large, kwargs, False) for kwargs in _BAD_OPTIONS),
        *((name, make, rng.choice(_GOOD_OPTIONS), True) for name, make in loaders.items()),
    ]  # fmt: skip
    for name, make, kwargs, bad in pairs:
        yield Case(
            f"DataPrefetcher({name}, {ascii(kwargs)[:150]})",
            partial(_prefetched, make, kwargs, bad),
        )
    while True:
        name, make = rng.choice([*loaders.items()])
        kwargs = {**rng.choice(_GOOD_OPTIONS), **rng.choice((*_GOOD_OPTIONS, *_BAD_OPTIONS))}
        yield Case(
            f"DataPrefetcher({name}, {ascii(kwargs)[:150]})",
            partial(_prefetched, make, kwargs, True),
        )


_ODD: tuple[Any, ...] = (
    None, -1, 0, 1.5, float("nan"), float("inf"), 10**400, "x", "", b"x", True, (), [], {}, [1, 2],
    object(), 1j, np.int64(3), np.float64("nan"), np.array([1]), torch.tensor(3), torch.ones(2),
    "1", "\u0663", lambda: 1, 2**63,
)  # fmt: skip


def _ticks(values: Sequence[Any]) -> Callable[[], Any]:
    each = itertools.cycle(values)
    return lambda: next(each)


def _clocked(number: int, rng: random.Random) -> Callable[[], End]:
    odd = rng.choice(_ODD)
    value = rng.choice(_ODD)
    make = rng.choice([*_loaders().values()])

    def use() -> None:
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: [*itertools.islice(StepClock().watch(make()), 4)],
            lambda: [*itertools.islice(StepClock().watch(make(), lambda b: odd), 4)],
            lambda: StepClock(odd),
            lambda: _stepped(StepClock(now=_ticks((0.0, value))), 5),
            lambda: _stepped(StepClock(now=_ticks((3.0, 1.0, 2.0))), 5),
            lambda: _stepped(StepClock(), odd),
            lambda: _stepped(StepClock(), 5).device_steps(odd),
            lambda: _nested(StepClock(), rng, odd),
        )
        kinds[number % len(kinds)]()

    def run() -> End:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                use()
            except BaseException as error:
                said = f"{type(error).__name__}: {str(error)[:200]}" if not _is_own(error) else ""
                if not said:
                    return End("the caller's own error")
                if isinstance(error, ValueError | TypeError | RuntimeError | OverflowError):
                    return End(said, note=f"poor message: {said}")
                return End(wrong=f"undocumented {said}")
        return End()

    return run


def _stepped(clock: StepClock, images: Any) -> StepClock:
    clock.start_epoch()
    for _ in range(3):
        with clock.waiting():
            pass
        with clock.computing():
            pass
        clock.step(images)
    window = clock.total()
    repr(window), clock.close_window(), repr(clock.total())
    return clock


def _nested(clock: StepClock, rng: random.Random, odd: Any) -> None:
    """Enters the clock's blocks in any order, and leaves some by an error."""
    calls: tuple[Callable[[], Any], ...] = (
        clock.waiting, clock.computing, lambda: clock.noted(odd if odd.__hash__ else "x"),
        lambda: clock.pause("x"),
    )  # fmt: skip
    for _ in range(6):
        try:
            with rng.choice(calls)(), rng.choice(calls)():
                clock.step(3)
                clock.start_epoch()
                if rng.random() < 0.3:
                    raise OtherEnd
                clock.held(0.0)
                clock.arrived(None, 0.0)
                clock.settle()
        except OtherEnd:
            pass
        clock.step(1)
    window = clock.total()
    for name in ("data_wait_fraction", "images_per_s"):
        value = getattr(window, name)
        if value is not None and not value >= 0:
            raise AssertionError(f"{name}={value}")


def clocks(seed: int, place: Path) -> Iterator[Case]:
    """StepClock, told odd things in an odd order."""
    for number in itertools.count():
        rng = random.Random(f"clocks {seed} {number}")
        yield Case(
            f"StepClock, seed {seed}, number {number} (kind {number % 9})", _clocked(number, rng)
        )


class _State:
    """Has a state, and cannot take it back."""

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise OtherEnd


_DATASETS: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "a list of tensors": lambda: [torch.ones(3)] * 64,
    "numbers": lambda: [1.0] * 64, "None samples": lambda: [None] * 64, "text": lambda: "ab" * 40,
    "dicts": lambda: [{"x": torch.ones(2)}] * 64,
    "named tuples": lambda: [Pair(torch.ones(2), 1)] * 64,
    "ragged": lambda: [torch.ones(n % 3 + 1) for n in range(64)],
    "objects": lambda: [object()] * 64, "arrays": lambda: [np.ones(3)] * 64,
    "object arrays": lambda: [np.array([{}])] * 64, "empty tensors": lambda: [torch.ones(0)] * 64,
    "meta": lambda: [torch.ones(2, device="meta")] * 64,
    "sparse": lambda: [torch.ones(2, 2).to_sparse()] * 64,
    "complex": lambda: [torch.ones(2, dtype=torch.complex64)] * 64,
    "raises": lambda: Samples(lambda i: (_ for _ in ()).throw(ValueError("odd\nlines \x1b[31m"))),
    "raises at one": lambda: Samples(lambda i: 1 // (i - 5), length=lambda: 64),
    "StopIteration": lambda: Samples(lambda i: next(iter(()))),
    "circle": lambda: Samples(lambda i: (_ for _ in ()).throw(CircleError())),
    "no text": lambda: Samples(lambda i: (_ for _ in ()).throw(UnprintableError())),
    "KeyboardInterrupt": lambda: Samples(lambda i: (_ for _ in ()).throw(KeyboardInterrupt())),
    "OtherEnd": lambda: Samples(lambda i: (_ for _ in ()).throw(OtherEnd())),
    "length 0": lambda: [],
    "length lies": lambda: Samples(lambda i: ([1.0] * 16)[i], length=lambda: 10**6),
    "length -1": lambda: Samples(length=lambda: -1),
    "length text": lambda: Samples(length=lambda: "x"),
    "a generator": lambda: (i for i in range(64)),
    "a dict": lambda: {i: torch.ones(2) for i in range(64)},
    "views": lambda: torch.ones(64, 3).expand(64, 3), "an array": lambda: np.ones((64, 3)),
    "gradients": lambda: torch.ones(64, 3, requires_grad=True),
}  # fmt: skip


def _rows_of(name: str, *values: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def _budget(value: Any) -> TunerConfig:
    return TunerConfig(budget_s=value)


def _workers(value: Any) -> TunerConfig:
    return TunerConfig(max_workers=value)


def _spoils(batch: Any) -> None:
    batch.clear() if isinstance(batch, list) else batch.zero_()


_TUNE: tuple[dict[str, Any], ...] = (
    *_rows_of("batch_size", *_ODD),
    *_rows_of("num_workers", None, -1, 1.5, "2", True, [], float("nan")),
    *_rows_of("start_method", "x", 5, "", "Fork"),
    *_rows_of("device", "gpu", "cuda", 5, "meta", ""),
    *_rows_of("state", None, 5, "x", [None], [5], [_State()], nn.Linear(1, 1), {}),
    *_rows_of("collate_fn", None, 5, lambda b: None, lambda b: 1 / 0, lambda b: b, lambda: 1),
    *_rows_of("worker_init_fn", 5, lambda: 1, lambda w: 1 / 0),
    *_rows_of("config", 5, "x", {}, TunerConfig),
    *_rows_of("config", *map(_budget, (float("nan"), -1.0, 0.0, "x", float("inf")))),
    *_rows_of("config", *map(_workers, (0, -1, 1.5, "x", float("nan")))),
    *_rows_of("step", None, 5, lambda: 1, lambda b: 1 / 0, _spoils, lambda b: next(iter(()))),
)


def _tuned(make: Callable[[], Any], kwargs: dict[str, Any]) -> End:
    given: dict[str, Any] = {"step": lambda batch: None, "batch_size": 4}
    given |= {"config": TunerConfig(budget_s=0.05, max_workers=1)} | kwargs
    names = ("dataset", "batch_size", *kwargs)
    network = nn.Linear(2, 2)
    before = network.weight.detach().clone()
    if "state" not in given:
        given["state"] = [network]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = tune(make(), given.pop("step"), **given)
        except BaseException as error:
            return judged(error, names, True)
    if not torch.equal(before, network.weight):
        return End(wrong="silent change: the network is another one")
    arguments = report.loader_arguments
    if (
        type(arguments["num_workers"]) is not int
        or arguments.get("batch_size") != given["batch_size"]
    ):
        return End(wrong=f"silent change: {arguments}")
    return End()


def tunings(seed: int, place: Path) -> Iterator[Case]:
    """tune() with odd data sets and odd arguments."""
    rng = random.Random(f"tunings {seed}")
    calls: list[tuple[str, dict[str, Any]]] = [
        *(("a list of tensors", kwargs) for kwargs in _TUNE), *((name, {}) for name in _DATASETS),
    ]  # fmt: skip
    rng.shuffle(calls)
    for name, kwargs in calls:
        yield Case(f"tune({name}, {ascii(kwargs)[:150]})", partial(_tuned, _DATASETS[name], kwargs))
