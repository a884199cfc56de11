"""Defines the options and the output of every part of ``gpu_check.py``."""

from __future__ import annotations

import shutil
import sysconfig
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from harness.runtime import accelerator

T = TypeVar("T")
Row = dict[str, Any]
Said = Generator[Row, None, str]
"""Rows as they are measured, ``{"wrong": ...}`` for faults, and finally a summary line."""


class SkippedError(Exception):
    """This machine cannot run a part; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Options:
    """The resources of a part: a device, a temporary folder and a time limit."""

    device: torch.device
    quick: bool
    scratch: Path
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether there is a CUDA device; otherwise a part does less, on the CPU."""
        return accelerator.get(self.device).has_streams

    def scaled(self, full: T, little: T) -> T:
        """Returns ``full`` on a GPU, ``little`` on a CPU."""
        return full if self.on_gpu else little

    @property
    def images(self) -> int:
        """The number of JPEGs a part may generate."""
        return self.scaled(1280 if self.quick else 2560, 64)

    @property
    def turns(self) -> int:
        """The number of repetitions of a measurement."""
        return 3 if self.quick or not self.on_gpu else 9

    def need_gpu(self, why: str) -> None:
        """Requires a CUDA device.

        Raises:
            SkippedError: there is none; the text includes ``why``.
        """
        if not self.on_gpu:
            raise SkippedError(f"no CUDA device: {why}")

    def need_compiler(self) -> None:
        """Requires a GPU and a C compiler, to compile a network.

        Raises:
            SkippedError: one of them or Python's headers are missing.
        """
        self.need_gpu("the emulated device has no network to compile")
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not (shutil.which("gcc") or shutil.which("clang")) or not header.is_file():
            raise SkippedError(f"Triton needs gcc and {header}: apt-get install gcc python3-dev")

    def left_s(self) -> float:
        """Returns the seconds until the part must end."""
        return self.deadline - time.monotonic()


Part = Callable[[Options], Said]
