"""Defines the errors that end a run, with an exit code and one line for the user."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import TextIO

from ..config import ConfigError
from ..suggestions import explain

_TOO_SMALL = "data.image_size: too small for the network's layers; raise it"
# by message from torch or Python
_ANSWERS = {
    "Output size is too small": (_TOO_SMALL, 2),
    "Kernel size can't be greater than actual input size": (_TOO_SMALL, 2),
    "Expected more than 1 value per channel when training": (
        "loader.batch_size: batch normalization needs more than one value per channel; raise it or "
        "data.image_size, or drop a final batch of one image with loader.drop_last=true",
        2,
    ),
    "AF_UNIX path too long": (
        "TMPDIR: the path is too long for worker process sockets; set a shorter one",
        2,
    ),
    "Duplicate GPU detected": (
        "device: two ranks share a GPU; start one rank per GPU on a node, or make a different "
        "GPU visible to each rank",
        2,
    ),
    "can't start new thread": ("the thread limit was reached; raise it (ulimit -u)", 6),
    "Too many open files": ("the open-file limit was reached; raise it (ulimit -n)", 6),
    "failed to map segment": (
        "a library cannot be loaded: not enough memory (ulimit -v), or a folder is mounted noexec",
        8,
    ),
}


class RunError(Exception):
    """An expected error that ends the run; its one printable line includes a fix."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(": ".join(self.args))


class DataError(RunError):
    """The dataset is missing, incomplete or unreadable."""

    exit_code = 3


class BadSample(DataError):
    """An unreadable sample.

    Args:
        where: the file, or the array and the row.
        reason: why it is unreadable, as text.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason


class CheckpointError(RunError):
    """A checkpoint is missing, corrupt or incompatible."""

    exit_code = 4


class NonFiniteError(RunError):
    """The loss was not finite for too many consecutive steps."""

    exit_code = 5


class LoaderError(RunError):
    """A worker died, hung or could not return its batch."""

    exit_code = 6


class DiskError(RunError):
    """One of the run's files could not be written."""

    exit_code = 7


class LockedError(RunError):
    """Another run owns the folder."""

    exit_code = 9


class Interrupted(RunError):
    """A signal asked the run to end.

    Args:
        signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if signum == signal.SIGINT:
            name = "Ctrl-C"
        super().__init__(f"stopped by {name}")
        self.exit_code = 128 + signum


# exit code of a rank that lost another rank, which reports the cause itself
LOST_RANK = 10
_LOST = re.compile(
    "(gloo|NCCL|ProcessGroup)(?s:.*)"
    "(closed by peer|reset by peer|Broken pipe|[Tt]imed out|[Tt]imeout|remote process exited)"
    # gloo: one wait timed out during another
    "|Application timeout caused pair closure"
)


def described(error: BaseException) -> tuple[str, int] | None:
    """Returns the line for the user and the exit code; None for an unexpected error."""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    # libraries wrap errors from our callbacks; an error may be its own cause
    while cause is not None and cause not in seen:
        if isinstance(cause, RunError | ConfigError):
            # a reason may include the advice
            is_bad = isinstance(cause, BadSample) and ";" not in cause.reason
            fix = "; set data.on_error=skip, or fix the image" if is_bad else ""
            return f"{cause}{fix}", cause.exit_code
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    if words(error) and (refusal := explain(error)):
        return refusal, 2
    if isinstance(error, KeyboardInterrupt):
        return described(Interrupted(signal.SIGINT))
    if is_out_of_memory(error):
        # torch's prefix for host errors is meaningless
        said = words(error).rpartition("err == 0. ")[2].split(". ")[0]
        return (
            f"{said or 'out of host memory'}; halve loader.batch_size "
            "(trainer.accumulate_steps=2 keeps the effective batch size) or set "
            "trainer.precision=bf16 (fp16 on GPUs older than Ampere)",
            8,
        )
    # from gloo or NCCL, in a collective call or inside the network
    if isinstance(error, RuntimeError) and _LOST.search(words(error)):
        return "another rank exited or is not responding; see its output", LOST_RANK
    for said, answer in _ANSWERS.items():
        if said in words(error):
            return answer
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'the run folder'}: {error.strerror}; free some disk space", 7
    return None


def words(error: BaseException) -> str:
    """Returns the message of ``error``; empty if a user's class fails to produce one."""
    with contextlib.suppress(Exception):
        return str(error)
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator ran out of memory: Python's, torch's, a device's or a codec's."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = re.search(
        "DefaultCPUAllocator|not enough memory|bad_alloc|CUDA error: out of memory|ALLOC_FAILED|"
        r"Cuda failure 2\b",
        words(error),
    )
    return isinstance(error, RuntimeError) and said is not None


def message(error: BaseException) -> tuple[str, int]:
    """Returns the line and the exit code; prints a traceback if the error is unexpected."""
    if known := described(error):
        return known
    traceback.print_exception(error)
    return f"{type(error).__name__}: {words(error)}", 1


def tell(failures: Sequence[BaseException]) -> int:
    """Prints a line per failure; returns the first exit code, or 0 if there are no failures."""
    lines = [message(failure) for failure in failures]
    name = "\x1b[1;31merror:\x1b[0m" if draws(sys.stderr) else "error:"
    with contextlib.suppress(OSError):
        # output may be closed; the exit code is enough
        for text, _ in lines:
            print(name, printable(text), file=sys.stderr, flush=True)
    return lines[0][1] if lines else 0


def say(line: str) -> None:
    """Prints a line from wellfed amid a watched script's output."""
    with contextlib.suppress(OSError, ValueError):
        print(f"wellfed: {printable(line)}", file=sys.stderr, flush=True)


def tell_crashes() -> None:
    """Makes native crashes print the stack of each thread of this process."""
    # in a notebook, stderr has no file descriptor
    with contextlib.suppress(OSError, RuntimeError):
        faulthandler.enable()


def draws(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that should get colors and cursor movement."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Returns ``text`` with control characters escaped, for example in file names."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rounded(value: float) -> str:
    """Returns ``value`` with two significant digits and no exponent: 0.17, 1.7, 17, 170."""
    return f"{float(f'{value:.2g}'):f}".rstrip("0").rstrip(".")


def listed(names: Sequence[str], between: str = ", ") -> str:
    """Returns the first five ``names`` and the number of remaining ones."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return between.join(names[:5]) + more
