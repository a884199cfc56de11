"""Reads weights from any trainer and finds those that match a network."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import zipfile
from collections.abc import Collection, Iterator
from typing import IO, Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from ..runtime import user_code
from ..runtime.errors import CheckpointError, listed

# first bytes of files that are mistaken for weights
_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with git lfs pull",
    b"PK": "a truncated zip archive; download it again",
    b"<": "a web page; download the file itself",
    b"\x89HDF": "an HDF5 file, as written by Keras",
    b"\x08": "an ONNX file",
    b"\x1f\x8b": "gzip-compressed; decompress it with gunzip",
    b"\x80": "a pickle that is corrupt or not written by torch.save; use torch.save",
}
# names of averaged weights
_AVERAGE = re.compile(r"(?<![a-z])(ema|swa|averag\w*)(?![a-z])", re.IGNORECASE)


class _Kind(type):
    """Makes a class equal to ``dict``, the only other class that torch fills."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is dict

    __hash__ = type.__hash__


class StandIn(dict[Any, Any], metaclass=_Kind):
    """Stands in for an object of any other class in a file, without running its code."""

    state: Any = None

    def __init__(self, *given: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(file: IO[bytes], where: str, *, others: bool) -> Any:
    """Returns the content of a torch or safetensors file; ``others`` allows stand-ins.

    Raises:
        CheckpointError: the file has a different format, which the error message specifies.
        Exception: the file is corrupt.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(64)
    file.seek(0)
    if head[8:9] == b"{":
        return load_safetensors(file.read())
    # before torch 1.6, the main pickle follows three short ones
    pickles: list[IO[bytes]] = [file] * 4
    if zipfile.is_zipfile(file):
        archive = zipfile.ZipFile(file)
        members = archive.namelist()
        inside = [name for name in members if name.endswith("/data.pkl")]
        # torch does not compress, and compressed megabytes may expand to gigabytes
        plain = size >= sum(part.file_size for part in archive.infolist())
        if any(name.endswith("/constants.pkl") for name in members):
            raise _pickled(where, "jit.load({})", "a TorchScript archive")
        if not inside or not plain:
            raise CheckpointError(
                f"{where} is not a checkpoint but a zip archive of {listed(members)}; pass a "
                "file written by torch.save"
            )
        pickles = [archive.open(inside[0])]
    elif not head.startswith(b"\x80\x02\x8a\n"):
        kinds = [kind for begin, kind in _BEGINNINGS.items() if head.lstrip().startswith(begin)]
        raise CheckpointError(
            f"{where} is not a checkpoint: "
            + (kinds[0] if kinds else f"begins with {head[:24]!r}" if head else "empty file")
        )
    file.seek(0)
    names: Collection[str] = ()
    if others:
        # not in torch 2.5
        from torch._weights_only_unpickler import get_globals_in_pkl

        names = {*itertools.chain(*map(get_globals_in_pkl, pickles))}
    file.seek(0)
    stands: list[Any] = [(_Kind(name, (StandIn,), {}), name) for name in names]
    try:
        with torch.serialization.safe_globals(stands):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # the file is a module in torch's old format
        if "persistent_load" in str(error):
            raise _pickled(where) from error
        raise


def _pickled(where: str, how: str = "load({}, weights_only=False)", what: str = "") -> Exception:
    """Returns the error for a network pickled with its code; ``how`` is torch's call to load it."""
    code = (
        f"import torch; net = torch.{how.format(repr(where))}; "
        f"torch.save(net.state_dict(), {f'{where}.weights.pth'!r})"
    )
    return CheckpointError(
        f"{where} contains {what or 'a pickled network'}, which would run code when loaded; if "
        f"you trust it, extract its weights with python -c {shlex.quote(code)}"
    )


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the path and value of every leaf in nested dictionaries and sequences."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list | tuple) and value:
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _dotted(path: str) -> str:
    """Returns ``path`` with dots, without the parts added by torch.compile, FSDP and others."""
    return re.sub(r"\b_\w*mod(ule)?\.", "", path).replace("/", ".")


def find(
    state: Any, network: nn.Module, where: str, may_differ: Collection[str] = ()
) -> tuple[dict[str, Tensor], str]:
    """Returns tensors in ``state`` by ``network`` key, and a line about their origin or "".

    In ``state``, they may have any prefix and nesting: the prefix with the most network keys wins.
    An average of all parameters, except those that ``may_differ``, takes precedence. Adjacent
    tensors that the network lacks are returned under their paths.

    Raises:
        CheckpointError: there are no tensors.
    """
    with user_code.explained(f"{where}: cannot be used:", kind=CheckpointError):
        flat = {path.removeprefix("/"): value for path, value in _leaves(state)}
    tensors = {path: value for path, value in flat.items() if isinstance(value, Tensor)}
    own = network.state_dict()
    keys = {_dotted(key): key for key in own}
    # path by key, for each prefix
    found: dict[str, dict[str, str]] = {"": {}}
    for path in tensors:
        dotted = _dotted(path)
        for i, sign in enumerate(f".{dotted}"):
            if sign == "." and (key := keys.get(dotted[i:])):
                found.setdefault(dotted[:i], {})[key] = path
    prefix = max(found, key=lambda each: len(found[each]))
    taken = found[prefix]
    if not taken:
        _refuse_modules(flat, where)
    parameters = {name for name, _ in network.named_parameters()} - {*may_differ}
    averaged = [at for at in found if _AVERAGE.search(at) and found[at].keys() >= parameters]
    for prefix in averaged[:1]:
        taken = taken | found[prefix]
    # counters and indices are not weights
    given = {key: value for key, value in own.items() if not value.is_floating_point()}
    missing = own.keys() - {*taken, *given, *may_differ}
    given |= {key: tensors[path] for key, path in taken.items()}
    key, first = next(iter(taken.items()), ("", next(iter(tensors))))
    box = first.rpartition("/")[0]
    used = {*taken.values()}
    left = {}
    for path, value in flat.items():
        if path in used:
            continue
        beside = path.rpartition("/")[0] == box
        left[path if beside else path.partition("/")[0]] = True
        unknown = beside and (missing or _dotted(path).startswith(prefix))
        if unknown and path in tensors and value.is_floating_point():
            given[path] = value
    origin = (first.removesuffix(key) or "its top level") + " (moving average)" * bool(averaged)
    more = f"; left out: {listed([*left])}" if left and "" in state else ""
    # for wellfed's own runs, only an average is reported
    tells = averaged or "" in state
    return given, f"{where}: {len(taken)} tensors from {origin}{more}" if tells else ""


def _refuse_modules(flat: dict[str, Any], where: str) -> None:
    """Rejects a file that contains pickled networks or no tensors.

    Raises:
        CheckpointError: the file is rejected; the error includes a workaround.
    """
    modules = [path for path in flat if "_parameters" in (getattr(flat[path], "state", None) or ())]
    if modules:
        best = max(modules, key=lambda path: bool(_AVERAGE.search(path)))
        inside = "".join(f"[{name!r}]" for name in best.split("/") if name)
        raise _pickled(where, "load({}, weights_only=False)" + inside)
    if not any(isinstance(value, Tensor) for value in flat.values()):
        raise CheckpointError(f"{where} contains no network weights")
