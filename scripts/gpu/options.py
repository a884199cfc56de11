"""What every part of ``gpu_check.py`` is given, and how it answers."""

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
"""Rows as they are measured, ``{"wrong": ...}`` for what is wrong, and at the end one line."""


class SkippedError(Exception):
    """A part that this machine cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a part may use: a device, a folder that is thrown away, and how long."""

    device: torch.device
    quick: bool
    scratch: Path
    deadline: float

    @property
    def on_gpu(self) -> bool:
        """Whether there is a CUDA device; otherwise a part does less, on the CPU."""
        return accelerator.get(self.device).has_streams

    def scaled(self, full: T, little: T) -> T:
        """Returns how much a part does: ``full`` on a GPU, ``little`` on a CPU."""
        return full if self.on_gpu else little

    @property
    def images(self) -> int:
        """How many JPEGs a part may generate."""
        return self.scaled(1280 if self.quick else 2560, 64)

    @property
    def turns(self) -> int:
        """How often something is measured."""
        return 3 if self.quick or not self.on_gpu else 9

    def need_gpu(self, why: str) -> None:
        """Does nothing where there is a CUDA device.

        Raises:
            SkippedError: there is none; with ``why`` the part needs one.
        """
        if not self.on_gpu:
            raise SkippedError(f"no CUDA device: {why}")

    def need_compiler(self) -> None:
        """Does nothing where a network can be compiled: on a GPU, beside a compiler of C.

        Raises:
            SkippedError: there is none, or Python's headers are missing.
        """
        self.need_gpu("the emulated device has no network to compile")
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not (shutil.which("gcc") or shutil.which("clang")) or not header.is_file():
            raise SkippedError(f"Triton needs gcc and {header}: apt-get install gcc python3-dev")

    def left_s(self) -> float:
        """Seconds until the part has to be done."""
        return self.deadline - time.monotonic()


Part = Callable[[Options], Said]
