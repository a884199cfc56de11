"""The network of a checkpoint in evaluation mode, for a mode of the command line or in Python."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from harness.config import Config, DataConfig, Mode, ModelConfig
from harness.data.datasets import as_evaluated
from harness.data.decode import decode, decode_opened
from harness.feed.prefetcher import Normalise
from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import read_regular
from harness.runtime.folder import log
from harness.runtime.seeding import SampleRng
from harness.training import checkpoint, models, resume

ImageLike = str | os.PathLike[str] | bytes | Image.Image | np.ndarray


class Transform:
    """Turns an image into what the network takes, with the pixels of an evaluation.

    Args:
        data: size, normalisation and the like.
        device: where the result is to be.

    Attributes:
        normalise: turns uint8 ``[N, 3, S, S]`` into floats, on the CPU.
    """

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self._options, self._centred = as_evaluated(data)
        cpu = torch.device("cpu")
        self.normalise = Normalise(cpu, data.mean, data.std, torch.float32, channels_last=False)
        self._device = device

    def __call__(self, image: ImageLike) -> Tensor:
        """Returns ``image`` normalised, float ``[3, S, S]``.

        ``image`` is the path of a file, its bytes, an image of Pillow's, or uint8 ``[H, W, 3]``.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no image, or damaged.
            TypeError: something else was given.
        """
        given: Any = image
        if isinstance(given, str | os.PathLike):
            given = read_regular(given)
        if isinstance(given, bytes):
            given = decode(given, self._options)
        elif isinstance(given, Image.Image):
            given = decode_opened(given, self._options)
        is_pixels = isinstance(given, np.ndarray) and given.dtype == np.uint8
        if not is_pixels or given.shape[2:] != (3,) or not given.size:
            raise TypeError(
                "an image is a path, bytes, an image of Pillow's, or an array of uint8 [H, W, 3]"
            )
        pixels = np.empty((self._centred.size, self._centred.size, 3), np.uint8)
        self._centred(given, SampleRng(0, 0, 0), pixels.transpose(2, 0, 1))
        images = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
        return self.normalise(images)[0].to(self._device)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trained network.

    Attributes:
        model: from float ``[N, 3, S, S]`` to logits ``[N, classes]``; in fp32, in evaluation mode.
        transform: from an image to float ``[3, S, S]`` on the network's device.
        classes: their names, by place in the logits.
    """

    model: nn.Module
    transform: Transform
    classes: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    model_name: str | None = None,
) -> Loaded:
    """Returns the network of a run's folder, of which the newest checkpoint counts, or of a file.

    Args:
        path: the folder or the file.
        device: where the network is to be.
        model_name: a function of yours that builds the network, as ``my_module:build``. A
            checkpoint that names one is refused unless you name it here.

    Raises:
        CheckpointError: it is missing, damaged, without classes, or names code of yours.
        ConfigError: the network cannot be built.
    """
    where = printable(os.fspath(path))
    # no image is read, from wherever
    config = Config(mode=Mode.predict, data=DataConfig(root="."), model=ModelConfig(weights=where))
    typed: tuple[str, ...] = ()
    if model_name is not None:
        config.model.name = model_name
        typed = (f"model.name={model_name}",)
    saved = checkpoint.Saved(where, checkpoint.read_any(Path(path)))
    config = resume.settings(config, saved, typed, tell=log.debug)
    model, classes = network(saved, config)
    place = torch.device(device)
    return Loaded(model.to(place), Transform(config.data, place), classes)


def network(saved: checkpoint.Saved, config: Config) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns the network in ``saved`` on the CPU, in evaluation mode, and its classes' names.

    Raises:
        CheckpointError: there are no classes, or the weights do not fit.
        ConfigError: the network cannot be built.
    """
    classes = saved.classes
    if not classes:
        raise CheckpointError(
            f"{saved.where}: holds no names of classes; name a checkpoint or the folder of a run"
        )
    size = config.data.image_size
    built = models.build(config.model, len(classes), image_size=size, filled=True)
    resume.fill(built, saved, config.model.name)
    return built.eval(), classes
