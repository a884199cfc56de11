"""Networks and data sets of a user's that do what none should, named as ``module:function``.

The module that the settings name is this one: ``model.name=scripts.attack_parts:model_12``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from scripts.attack_case import Case, End, inside, quiet, refused
from scripts.attack_values import checked as checked_settings
from scripts.attack_values import register, trained


class UnprintableError(Exception):
    """An error whose text cannot be had, and which cannot be sent."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no text")


class OtherEnd(BaseException):
    """No Exception."""


class CircleError(Exception):
    """An error that is its own cause, as ``raise error from error`` makes it."""

    def __init__(self) -> None:
        super().__init__("circle")
        self.__cause__ = self


def _raise(error: BaseException) -> Any:
    raise error


class Net(nn.Module):
    """A linear network whose output goes through ``odd``, in training or always."""

    def __init__(self, classes: int, odd: Callable[[Any, Tensor, Tensor], Any], always: bool):
        super().__init__()
        self.linear = nn.Linear(3, classes)
        self.odd = odd
        self.always = always
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        """Returns whatever ``odd`` makes of the logits."""
        self.calls += 1
        logits = self.linear(x.mean((2, 3)))
        return self.odd(self, logits, x) if self.always or self.training else logits


OUTPUTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a tuple (logits, auxiliary)": lambda m, y, x: (y, y), "a list": lambda m, y, x: [y],
    "a dict": lambda m, y, x: {"logits": y}, "None": lambda m, y, x: None, "a number": lambda m, y,
    x: 1.0, "NaN": lambda m, y, x: y * float("nan"), "infinity": lambda m, y, x: y * float("inf"),
    "huge logits": lambda m, y, x: y * 1e38, "one class less": lambda m, y, x: y[:, :-1],
    "one class more": lambda m, y, x: torch.cat([y, y[:, :1]], 1), "one image less": lambda m, y,
    x: y[:-1], "one image more": lambda m, y, x: torch.cat([y, y[:1]]), "the mean": lambda m, y,
    x: y.mean(), "a row": lambda m, y, x: y.mean(0), "3-D": lambda m, y, x: y[..., None],
    "the transposed": lambda m, y, x: y.T, "no gradient": lambda m, y, x: y.detach(),
    "an array": lambda m, y, x: y.detach().numpy(), "complex": lambda m, y, x: torch.complex(y, y),
    "integers": lambda m, y, x: y.long(), "booleans": lambda m, y, x: y > 0, "half": lambda m, y,
    x: y.half(), "double": lambda m, y, x: y.double(), "bfloat16": lambda m, y, x: y.bfloat16(),
    "sparse": lambda m, y, x: y.to_sparse(), "meta": lambda m, y, x: y.to("meta"),
    "an expanded row": lambda m, y, x: y[:1].expand_as(y), "strided": lambda m, y,
    x: torch.cat([y, y], 1)[:, ::2], "ValueError": lambda m, y,
    x: _raise(ValueError("odd\nlines \x1b[31m")), "ValueError without a text": lambda m, y,
    x: _raise(ValueError()), "KeyError": lambda m, y, x: _raise(KeyError("x")),
    "StopIteration": lambda m, y, x: _raise(StopIteration()), "GeneratorExit": lambda m, y,
    x: _raise(GeneratorExit()), "no text": lambda m, y, x: _raise(UnprintableError()),
    "an error in a circle": lambda m, y, x: _raise(CircleError()), "MemoryError": lambda m, y,
    x: _raise(MemoryError()), "RecursionError": lambda m, y, x: _raise(RecursionError("deep")),
    "AssertionError": lambda m, y, x: _raise(AssertionError()), "OSError": lambda m, y,
    x: _raise(OSError(28, "No space left on device")), "KeyboardInterrupt": lambda m, y,
    x: _raise(KeyboardInterrupt()), "SystemExit": lambda m, y, x: _raise(SystemExit("x")),
    "the second call": lambda m, y, x: y if m.calls < 3 else _raise(ValueError("the third call")),
    "other sizes later": lambda m, y, x: y if m.calls < 3 else y[:, :3],
    "the input changed": lambda m, y, x: x.fill_(0) and y if False else (x.zero_(), y)[1],
    "one weight set to NaN": lambda m, y, x: (m.linear.weight.data.fill_(float("nan")), y)[1],
    "the weights frozen": lambda m, y, x: (m.requires_grad_(False), y.detach())[1],
    "a new parameter": lambda m, y, x: (m.__setattr__("more", nn.Parameter(torch.ones(1))), y)[1],
    "its parameter gone": lambda m, y,
    x: (m._parameters.clear(), m.linear._parameters.clear(), y)[2],
    "another dtype later": lambda m, y, x: (m.double(), y)[1], "eval mode": lambda m, y,
    x: (m.eval(), y)[1],
}  # fmt: skip


def _changed(change: Callable[[Any], object]) -> Callable[[int], nn.Module]:
    def build(classes: int) -> nn.Module:
        made = Net(classes, lambda m, y, x: y, False)
        change(made)
        return made

    return build


class _Extra(Net):
    def __init__(self, classes: int, extra: Any) -> None:
        super().__init__(classes, lambda m, y, x: y, False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        """Returns what goes into the checkpoint beside the weights."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Takes it back."""
        self.extra = state


def _plain(classes: int) -> nn.Module:
    return Net(classes, lambda m, y, x: y, False)


def _hooked(hook: Callable[[Any], Any]) -> Callable[[int], nn.Module]:
    return _changed(lambda m: m.linear.weight.register_hook(hook))


def _scripted(classes: int) -> Any:
    return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(768, classes)))


def _fails(*_: Any, **__: Any) -> Any:
    raise KeyError("x")


def _with_buffer(value: Any) -> Callable[[int], nn.Module]:
    return _changed(lambda m: m.register_buffer("odd", value))


def _with_parameter(value: Tensor) -> Callable[[int], nn.Module]:
    grad = value.is_floating_point() or value.is_complex()
    return _changed(lambda m: m.register_parameter("odd", nn.Parameter(value, requires_grad=grad)))


BUILDS: dict[str, Callable[..., Any]] = {
    "None": lambda classes: None, "a class": lambda classes: Net,
    "a function": lambda classes: lambda x: x, "no argument": lambda: None,
    "two arguments": lambda a, b: None, "a generator": lambda classes: iter(()),
    "ValueError": lambda classes: _raise(ValueError("odd\nlines \x1b[31m")),
    "no text": lambda classes: _raise(UnprintableError()),
    "SystemExit": lambda classes: _raise(SystemExit(3)),
    "KeyboardInterrupt": lambda classes: _raise(KeyboardInterrupt()),
    "OtherEnd": lambda classes: _raise(OtherEnd()),
    "StopIteration": lambda classes: _raise(StopIteration()),
    "no parameters": lambda classes: nn.Flatten(),
    "frozen": _changed(lambda m: m.requires_grad_(False)),
    "double": _changed(lambda m: m.double()), "half": _changed(lambda m: m.half()),
    "on meta": _changed(lambda m: m.to("meta")),
    "NaN weights": _changed(lambda m: m.linear.weight.data.fill_(float("nan"))),
    "a lazy layer unused": _changed(lambda m: m.add_module("lazy", nn.LazyLinear(3))),
    "a parameter unused": _with_parameter(torch.ones(2)),
    "an empty parameter": _with_parameter(torch.ones(0, 3)),
    "a parameter of one value": _with_parameter(torch.ones(())),
    "complex parameter": _with_parameter(torch.ones(2, dtype=torch.complex64)),
    "integer parameter": _with_parameter(torch.ones(2, dtype=torch.int64)),
    "sparse parameter": _with_parameter(torch.ones(2, 2).to_sparse()),
    "meta parameter": _with_parameter(torch.ones(2, device="meta")),
    "expanded parameter": _with_parameter(torch.ones(1).expand(4)),
    "None buffer": _with_buffer(None), "sparse buffer": _with_buffer(torch.ones(2, 2).to_sparse()),
    "meta buffer": _with_buffer(torch.ones(2, device="meta")),
    "complex buffer": _with_buffer(torch.ones(2, dtype=torch.complex64)),
    "string buffer size": _with_buffer(torch.zeros(1 << 20)),
    "expanded buffer": _with_buffer(torch.ones(1).expand(4)),
    "NaN buffer": _with_buffer(torch.full((2,), float("nan"))),
    "shared weights": _changed(lambda m: m.add_module("twin", m.linear)),
    "itself inside": _changed(lambda m: m._modules.__setitem__("own", m)),
    "a sparse gradient": _changed(lambda m: m.add_module("e", nn.Embedding(4, 3, sparse=True))),
    "a hook that raises": _changed(lambda m: m.register_forward_hook(_fails)),
    "a gradient of None": _hooked(lambda g: g * float("nan")),
    "a gradient hook raises": _hooked(lambda g: _raise(ValueError("x"))),
    "extra state, text": lambda classes: _Extra(classes, "text"),
    "extra state, an object": lambda classes: _Extra(classes, OtherEnd()),
    "extra state, a lambda": lambda classes: _Extra(classes, lambda: None),
    "extra state, None": lambda classes: _Extra(classes, None),
    "extra state, a dict": lambda classes: _Extra(classes, {"a": 1}),
    "an attribute that cannot be copied": _changed(lambda m: setattr(m, "g", iter(()))),
    "state_dict raises": _changed(lambda m: setattr(m, "state_dict", _fails)),
    "a compiled module": _scripted,
}  # fmt: skip


class Source:
    """A source of a user's, with odd parts."""

    def __init__(self, **odd: Any) -> None:
        self.classes: Any = ["a", "b"]
        self.labels: Any = [0, 1] * 8
        self.odd = odd
        for name in odd.keys() & {"classes", "labels"}:
            setattr(self, name, odd[name])

    def __len__(self) -> int:
        return cast("int", self.odd.get("length", lambda: 16)())

    def read(self, i: int) -> Any:
        """Returns a sample, odd or not."""
        if "read" in self.odd:
            return self.odd["read"](i)
        return np.full((16, 16, 3), i, np.uint8), i % 2

    def where(self, i: int) -> Any:
        """Returns a name."""
        return self.odd.get("where", lambda i: f"sample {i}")(i)


class Samples:
    """A map-style data set of a user's, with odd parts."""

    def __init__(self, get: Callable[[int], Any] | None = None, **odd: Any) -> None:
        self.get = get or (lambda i: (torch.full((3, 16, 16), i, dtype=torch.uint8), i % 2))
        self.classes: Any = odd.get("classes", ["a", "b"])
        self.length = odd.get("length", lambda: 16)

    def __len__(self) -> int:
        return cast("int", self.length())

    def __getitem__(self, i: int) -> Any:
        return self.get(i)


class _NoStr:
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


_PIXELS = np.zeros((16, 16, 3), np.uint8)
_TENSOR = torch.zeros(3, 16, 16, dtype=torch.uint8)
_ERRORS: tuple[BaseException, ...] = (
    ValueError("odd\nlines \x1b[31m"), ValueError(), KeyError("x"), StopIteration(),
    GeneratorExit(), UnprintableError(), MemoryError(), RecursionError("deep"),
    OSError(28, "No space left on device"), OSError(12, "Cannot allocate memory"),
    KeyboardInterrupt(), SystemExit(3), OtherEnd(), CircleError(), EOFError(), BrokenPipeError(),
    TimeoutError(), RuntimeError("DataLoader worker killed"),
)  # fmt: skip
_LABELS: tuple[Any, ...] = (
    None, "1", 1.7, True, -1, 2, 10**30, float("nan"), [1], torch.tensor(1), torch.tensor([1]),
    torch.tensor([0, 1]), np.int64(1), np.array([1]), torch.tensor(1.7), 1j, b"1", {}, "\u0661",
)  # fmt: skip
# 1.7, in two ways; labels that are in no class
_NO_LABELS = (2, 14)
_OUTSIDE = (4, 5, 6)
_ROWS: tuple[Any, ...] = (
    None, 5, "text", b"", b"\xff\xd8\xff", (), (1,), (1, 2, 3), {"image": 1}, [], iter(()),
    np.zeros(3), Image.new("RGB", (16, 16)), _TENSOR,
)  # fmt: skip
_IMAGES: tuple[Any, ...] = (
    None, "text", b"x", 5, [], _PIXELS, _PIXELS.astype(np.float32), _PIXELS[:0], _PIXELS[..., :1],
    _PIXELS[..., 0], _PIXELS[::-1], _PIXELS.astype(object), np.zeros((16, 16, 3), "S1"), _TENSOR,
    _TENSOR.float(), _TENSOR.float() * float("nan"), _TENSOR.float() + 2,
    _TENSOR.to(torch.float64), _TENSOR.bfloat16(), _TENSOR.half(), _TENSOR.bool(), _TENSOR.long(),
    _TENSOR.to_sparse(), _TENSOR.to("meta"), _TENSOR.to(torch.complex64), _TENSOR[:, :, ::2],
    _TENSOR[:1], _TENSOR[:2], _TENSOR[:1].expand(3, 16, 16),
    torch.zeros(3, 16, 16, requires_grad=True), _TENSOR[None], torch.zeros(3, 0, 0),
    torch.zeros(4, 16, 16), torch.zeros(3, 16, 16).permute(0, 2, 1), Image.new("RGB", (16, 16)),
    Image.new("L", (16, 16)), Image.new("RGBA", (16, 16)), Image.new("P", (16, 16)),
    Image.new("I;16", (16, 16)), Image.new("F", (16, 16)), Image.new("CMYK", (16, 16)),
    Image.new("1", (16, 16)), Image.new("RGB", (0, 0)), Image.new("RGB", (1, 1)),
    np.ma.masked_array(np.zeros((3, 16, 16))),
)  # fmt: skip
_CLASSES: tuple[Any, ...] = (
    None, 5, "ab", (), [], ["a"], ["a", "a"], [None, None], [1, 2], {"a": 0, "b": 1}, {"a", "b"},
    ["\x1b[31m", "\n"], ["a" * 100_000, "b"], [_NoStr(), _NoStr()], np.array(["a", "b"]),
    (name for name in "ab"), ["\udcff", "b"], ["a\0", "b"], torch.tensor([1, 2]), range(2000),
)  # fmt: skip
_ALL_LABELS: tuple[Any, ...] = (
    None, 5, "text", [], [0], [0] * 15, [0] * 17, [0, 1] * 8000, [[0, 1]] * 8, [[0], [0, 1]],
    [0.0] * 16, [True] * 16, [None] * 16, ["0"] * 16, [-1] * 16, [2] * 16, [10**30] * 16,
    np.zeros(16, np.uint8), np.zeros(16, np.uint64), torch.zeros(16, dtype=torch.int64),
    torch.zeros(16), (0 for _ in range(16)), {0: 1}, np.zeros((16, 1), int),
    np.ma.masked_array(np.zeros(16, int), True), lambda: [0] * 16,
)  # fmt: skip
_LENGTHS: tuple[Any, ...] = (
    lambda: 0, lambda: -1, lambda: 15, lambda: 17, lambda: 1000, lambda: 2**62, lambda: 1.5,
    lambda: None, lambda: "x", lambda: 10**30, lambda: True, lambda: _raise(LookupError()),
    lambda: _raise(KeyboardInterrupt()),
)  # fmt: skip


def _given(value: Any) -> Callable[[int], Any]:
    return lambda i: value


def _raising(error: BaseException) -> Callable[[int], Any]:
    return lambda i: _raise(error)


def _later(odd: Callable[[int], Any], usual: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda i: odd(i) if i == 5 else usual(i)


class _Opens:
    """Opens two sets; ``part`` makes the odd one, for training or for validation."""

    def __init__(self, part: Callable[[], Any], other: Callable[[], Any], first: bool) -> None:
        self.part = part
        self.other = other
        self.first = first

    def __call__(self, data: Any, seed: int) -> Any:
        pair = self.part(), self.other()
        return pair if self.first else pair[::-1]


def _open_given(given: Any, data: Any, seed: int) -> Any:
    return given


def _open_raising(error: BaseException, data: Any, seed: int) -> Any:
    raise error


_SPLITS: tuple[Any, ...] = (
    None, 5, "ab", (), (1,), (1, 2, 3), {}, (None, None), [[], []], ("a", "b"), Source(),
    Samples(), (Source(), Samples()), ([(_TENSOR, 0)], [(_TENSOR, 1)]), torch.zeros(2, 3),
)  # fmt: skip
_WHERES: tuple[Any, ...] = (None, 5, _NoStr(), "\x1b[31m\n", "x" * 10_000)


def _odd_sets() -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yields what is odd, what makes such a set, and what makes a usual one beside it."""
    for name, values in (("classes", _CLASSES), ("labels", _ALL_LABELS), ("length", _LENGTHS)):
        for number, odd in enumerate(values):
            yield f"source, {name} {number}", partial(Source, **{name: odd}), Source
            if name != "labels":
                yield f"set, {name} {number}", partial(Samples, **{name: odd}), Samples
    reads: list[tuple[str, Any, Any]] = []
    for error in _ERRORS:
        reads.append((f"raises {type(error).__name__}", _raising(error), _raising(error)))
    for row in _ROWS:
        reads.append((f"gives {ascii(row)[:30]}", _given(row), _given(row)))
    for number, label in enumerate(_LABELS):
        said = f"label {number} {ascii(label)[:20]}"
        reads.append((said, _given((_PIXELS, label)), _given((_TENSOR, label))))
    for number, image in enumerate(_IMAGES):
        reads.append((f"image {number}", _given((image, 1)), _given((image, 1))))
    for name, read, get in reads:
        yield f"source {name}", partial(Source, read=read), Source
        yield f"source {name} later", partial(Source, read=_later(read, Source().read)), Source
        yield f"set {name}", partial(Samples, get), Samples
        yield f"set {name} later", partial(Samples, _later(get, Samples().get)), Samples
    fails = _raising(ValueError("x"))
    for number, where in enumerate(_WHERES):
        yield f"source where {number}", partial(Source, where=_given(where), read=fails), Source
    yield "source where raises", partial(Source, where=fails, read=fails), Source


def _sets() -> dict[str, Callable[..., Any]]:
    """Returns what opens odd data sets, by what is odd."""
    found: dict[str, Callable[..., Any]] = {}
    for name, part, other in _odd_sets():
        found[f"{name}, training"] = _Opens(part, other, first=True)
        found[f"{name}, validation"] = _Opens(part, other, first=False)
    for number, given in enumerate(_SPLITS):
        found[f"returns {number}"] = partial(_open_given, given)
    for error in _ERRORS:
        found[f"raises {type(error).__name__}"] = partial(_open_raising, error)
    return found


SETS = _sets()


def _module_part(name: str) -> Any:
    """Returns the function that a setting names by its place in a table."""
    kind, _, number = name.rpartition("_")
    place = int(number)
    if kind == "model":
        return [*BUILDS.values()][place]
    if kind in ("trains", "always"):
        odd = [*OUTPUTS.values()][place]
        return lambda num_classes: Net(num_classes, odd, kind == "always")
    return [*SETS.values()][place]


def __getattr__(name: str) -> Any:
    if name.rpartition("_")[0] in ("model", "trains", "always", "set"):
        return _module_part(name)
    raise AttributeError(name)


_RUN = (
    "data.image_size=16", "data.eval_resize=16", "trainer.max_steps=3", "loader.batch_size=8",
    "device=cpu", "trainer.num_threads=1", "loader.num_workers=0",
)  # fmt: skip
_MORE = (
    (), (), (), ("trainer.precision=bf16",), ("trainer.accumulate_steps=2",),
    ("augment.mixup=0.2",), ("optim=adamw", "optim.clip_norm=1"),
    ("data.on_error=skip", "data.max_bad_fraction=1.0"),
    ("trainer.channels_last=false", "trainer.precision=fp16"),
)  # fmt: skip


def _tried(overrides: Sequence[str], names: tuple[str, ...], own: bool) -> End:
    try:
        with inside(), quiet():
            try:
                config = checked_settings(overrides)
            except Exception as error:
                return refused(error, names)
        return trained(config, overrides)
    except KeyboardInterrupt as error:
        # the command has a line for it
        return refused(error)
    except (SystemExit, GeneratorExit, OtherEnd):
        return End("ended by the user's own code")
    except Exception as error:
        # a user's own error within a step has its traceback
        if own and type(error).__name__ in _OWN_ERRORS:
            return End("its own error, with a traceback", note=f"traceback: {type(error).__name__}")
        raise


_OWN_ERRORS = (
    "ValueError", "KeyError", "UnprintableError", "RecursionError", "AssertionError",
    "StopIteration",
)  # fmt: skip


def _must_be_refused(said: str) -> bool:
    """Whether a set cannot be what its user meant: labels of no class, samples without a label."""
    name, _, number = said.partition(",")[0].rpartition(" label ")
    if name in ("source", "set"):
        return int(number.split()[0]) in (*_NO_LABELS, *(_OUTSIDE if name == "source" else ()))
    return bool(re.match(r"source, length (0|2|3|4|5)", said))


def _set_tried(said: str, overrides: Sequence[str]) -> End:
    end = _tried(overrides, ("data.name", "sample"), False)
    if not (end.refused or end.wrong) and _must_be_refused(said):
        return End(wrong="silent change: other labels, or another number of samples")
    return end


def models(seed: int, place: Path) -> Iterator[Case]:
    """Networks that are built, or that answer, in an odd way."""
    register()
    names = [(f"model_{i}", f"build: {said}") for i, said in enumerate(BUILDS)]
    names += [(f"trains_{i}", f"in training: {said}") for i, said in enumerate(OUTPUTS)]
    names += [(f"always_{i}", f"gives {said}") for i, said in enumerate(OUTPUTS)]
    for number, (name, said) in enumerate(names):
        setting = f"model.name=scripts.attack_parts:{name}"
        more = _MORE[(number + seed) % len(_MORE)]
        overrides = ["data=digits", *_RUN, *more, setting]
        own = any(
            error in said
            for error in ("Error", "StopIteration", "no text", "call", "hook", "later", "gone")
        )
        yield Case(
            f"{setting} ({said}) {' '.join(more)}",
            partial(_tried, overrides, ("model.name",), own),
        )


def sets(seed: int, place: Path) -> Iterator[Case]:
    """Data sets of a user's, as sources and as map-style data sets."""
    register()
    order = [*enumerate(SETS)]
    random.Random(f"sets {seed}").shuffle(order)
    for number, said in order:
        setting = f"data.name=scripts.attack_parts:set_{number}"
        more = _MORE[(number + seed) % len(_MORE)]
        overrides = ["data=own", *_RUN, *more, setting]
        yield Case(
            f"{setting} ({said}) {' '.join(more)}",
            partial(_set_tried, said, overrides),
        )
