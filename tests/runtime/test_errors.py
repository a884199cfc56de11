"""What is said of an error, and with which exit code."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from commands import ran

from harness.config import ConfigError, DataConfig
from harness.data.datasets import ImageDataset
from harness.data.storage import ArraySource
from harness.data.transforms import CropTransform
from harness.feed.base import BatchWorker
from harness.runtime import user_code
from harness.runtime.errors import described, message, rounded

ADVICE = (
    "; halve loader.batch_size (trainer.accumulate_steps=2 keeps the effective batch size) or set "
    "trainer.precision=bf16 (fp16 on GPUs older than Ampere)"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of host memory"),
        (MemoryError("no memory for images of 12 MB"), "no memory for images of 12 MB"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"),
            "CUDA out of memory",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        ),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "[Errno 12] Cannot allocate memory"),
    ],
    ids=["python", "ours", "device", "torch", "driver", "system"],
)
def test_memory_of_any_allocator(error: Exception, said: str) -> None:
    """Exit code 8, in one line that says what to lower."""
    assert described(error) == (f"{said}{ADVICE}", 8)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError, KeyError])
def test_an_error_that_cannot_say_what_it_is(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told by its class and its traceback, without one of ours."""

    class Odd(kind):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert message(Odd()) == ("Odd: ", 1)
    assert "ZeroDivisionError" not in capsys.readouterr().err
    wrapped = ConfigError(user_code.message(Odd()))
    wrapped.__cause__ = Odd()
    assert described(wrapped) == ("Odd", 2)


def test_torch_says_so_itself() -> None:
    """The words that are looked for are those of the torch that is installed."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 55, dtype=torch.uint8)
    found = described(error.value)
    assert found is not None and found[1] == 8 and "tried to allocate" in found[0]


@pytest.mark.parametrize(
    "said", [jobs.GLOO, "Application timeout caused pair closure"], ids=["gone", "stopped"]
)
def test_a_lost_rank_is_one_line(said: str) -> None:
    """Gloo's lines become one, with the exit code of an echo."""
    line, code = described(RuntimeError(said)) or ("", 0)
    assert line.startswith("another rank ") and code == 10


@pytest.mark.parametrize(
    "said",
    [
        "[enforce fail at /src/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find",
        "NCCL error in: x.cpp:1, invalid usage",
    ],
)
def test_a_group_that_was_never_joined_is_no_lost_rank(said: str) -> None:
    """What is not known keeps its traceback."""
    assert described(RuntimeError(said)) is None


@pytest.mark.timeout(10)
def test_a_circle_of_causes_has_an_end() -> None:
    """An error may be its own cause, or the cause of its cause."""
    own = ValueError("x")
    own.__cause__ = own
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert described(own) is described(first) is None


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (RuntimeError("Calculated padded input ... Output size is too small"), "image_size", 2),
        (ValueError("Expected more than 1 value per channel when training, got"), "batch_size", 2),
        (RuntimeError("can't start new thread"), "ulimit -u", 6),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "x"), "ulimit -n", 6),
        (ImportError("x.so: failed to map segment from shared object"), "ulimit -v", 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_others_say_has_an_answer(error: Exception, said: str, code: int) -> None:
    """Torch and Python name neither the setting nor the limit."""
    line, found = described(error) or ("", 0)
    assert said in line and found == code


def test_memory_is_no_samples_fault() -> None:
    """An allocator that refuses while a sample is made ends the run, and skips nothing."""

    class Full(CropTransform):
        def __call__(self, *_: object) -> None:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    source = ArraySource(np.zeros((2, 8, 8, 3), np.uint8), np.arange(2), ["a", "b"], "x")
    options = DataConfig(max_pixels=100)
    dataset = ImageDataset(source, Full(8), options, 8, 0, skips=True)
    filler = BatchWorker(dataset, 0, None, None)
    pixels, labels = np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int64)
    with pytest.raises(MemoryError, match="can't allocate memory"):
        filler.fill(filler.timer.begin(2), 0, np.arange(2), pixels, labels)


def test_a_run_without_memory_ends_with_8(tmp_path: Path) -> None:
    """Of a whole command, whose memory is limited: one line, no traceback."""
    # the first batch alone is too large: where the last bytes go, glibc itself may end the process
    limit = 8 << 30
    done = ran(
        sys.executable,
        "-c",
        "import resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
        "from wellfed.cli.app import command; command()",
        "data=digits",
        "data.image_size=4000",
        "data.eval_resize=null",
        "loader.batch_size=256",
        "loader.backend=threads",
        "loader.num_workers=1",
        "device=cpu",
        "trainer.max_steps=1",
        cwd=tmp_path,
    )
    assert done.returncode == 8, done.stderr
    assert "Traceback" not in done.stderr and "halve loader.batch_size" in done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.012"), (1.0, "1"), (1.66, "1.7"), (20.0, "20"), (168.0, "170"), (1234.0, "1200")],
)
def test_figures_are_rounded_without_an_exponent(value: float, text: str) -> None:
    """A loader may be 170 times as fast, and a sample may take 120 ms."""
    assert rounded(value) == text
