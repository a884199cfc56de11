"""Loads a checkpoint's network in Python, and exports it as one file."""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..config import TIMM, Config, ConfigError, DataConfig, Format, Mode, ModelConfig
from ..data.datasets import as_evaluated
from ..data.decode import decode, decode_opened
from ..feed.prefetcher import Normalize
from ..monitor.console import say
from ..monitor.writer import plain
from ..runtime import user_code
from ..runtime.errors import printable
from ..runtime.files import read_regular, write_whole
from ..runtime.folder import log
from ..runtime.seeding import SampleRng
from ..training import checkpoint_read, models, resume, weights

# number of images used to check an exported file
_CHECKED = 16
# largest difference between logits, relative to the largest logit or to 1, whichever is larger
_TOLERANCE = 1e-4

ImageLike = str | os.PathLike[str] | bytes | Image.Image | np.ndarray


class Transform:
    """Turns an image into the network's input, preprocessed as in evaluation.

    Args:
        data: size, normalization and other preprocessing settings.
        device: device for the result.

    Attributes:
        normalize: turns uint8 ``[N, 3, S, S]`` into floats, on the CPU.
    """

    def __init__(self, data: DataConfig, device: torch.device) -> None:
        self._data = data
        self._centered = as_evaluated(data)
        cpu = torch.device("cpu")
        self.normalize = Normalize(cpu, data.mean, data.std, torch.float32, channels_last=False)
        self._device = device

    def __call__(self, image: ImageLike) -> Tensor:
        """Returns ``image`` normalized, float ``[3, S, S]``.

        ``image`` is a file path, a file's bytes, a Pillow image, or a uint8 array ``[H, W, 3]``.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file or bytes are not an image, or are damaged.
            TypeError: ``image`` is none of these.
        """
        given: Any = image
        if isinstance(given, str | os.PathLike):
            given = read_regular(given)
        if isinstance(given, bytes):
            given = decode(given, self._data)
        elif isinstance(given, Image.Image):
            given = decode_opened(given, self._data)
        is_pixels = isinstance(given, np.ndarray) and given.dtype == np.uint8
        if not is_pixels or given.shape[2:] != (3,) or not given.size:
            raise TypeError(
                "image must be a path, bytes, a Pillow image, or a uint8 array [H, W, 3]"
            )
        pixels = np.empty((self._centered.size, self._centered.size, 3), np.uint8)
        self._centered(given, SampleRng(0, 0, 0), pixels.transpose(2, 0, 1))
        images = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
        return self.normalize(images)[0].to(self._device)


class Loaded(NamedTuple):
    """A trained network.

    Attributes:
        model: maps float ``[N, 3, S, S]`` to logits ``[N, classes]``, in fp32 and in eval mode.
        transform: maps an image to float ``[3, S, S]`` on the network's device.
        classes: the class names, in the order of the logits.
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
    """Returns the network from a checkpoint file, or from the newest checkpoint in a run folder.

    Args:
        path: the folder or the file.
        device: device for the network.
        model_name: your own function that builds the network, as ``my_module:build``. A
            checkpoint that names such a function is rejected unless you specify it here.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has no classes, or names your own
            code.
        ConfigError: the network cannot be built.
    """
    where = printable(os.fspath(path))
    # the root is unused, because no image is read
    config = Config(mode=Mode.predict, data=DataConfig(root="."), model=ModelConfig(weights=where))
    typed: tuple[str, ...] = ()
    if model_name is not None:
        config.model.name = model_name
        typed = (f"model.name={model_name}",)
    saved = checkpoint_read.read(Path(path), foreign=True)
    config = resume.settings(config, saved, typed, tell=log.debug)
    model, classes = network(saved, config, log.debug)
    place = torch.device(device)
    return Loaded(model.to(place), Transform(config.data, place), classes)


def network(
    saved: checkpoint_read.Saved, config: Config, tell: Callable[[str], None] = say
) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns the network in ``saved`` on the CPU, in eval mode, and its class names.

    If the weights are from a different library, classes are identified by number.

    Raises:
        CheckpointError: the weights do not fit.
        ConfigError: the network cannot be built.
    """
    classes = saved.classes
    size = config.data.image_size
    if not classes:
        like = models.build(config.model, 2, image_size=size, filled=True)
        heads = models.head_keys(like)
        given, _ = weights.find(saved.state, like, saved.where, heads)
        counts = {len(given[key]) for key in heads & given.keys()}
        classes = tuple(map(str, range(max(counts, default=1))))
        log.warning(
            "%s has no class names; classes are numbered 0 to %d", saved.where, len(classes) - 1
        )
    built = models.build(config.model, len(classes), image_size=size, filled=True)
    models.take_over(built, saved, f"model.name={config.model.name}", tell=tell)
    return built.eval(), classes


class _Whole(nn.Module):
    """A network with its normalization; maps uint8 ``[N, 3, S, S]`` to logits ``[N, classes]``."""

    def __init__(self, network: nn.Module, data: DataConfig) -> None:
        super().__init__()
        self.network = network
        self.mean = nn.Buffer(255.0 * torch.tensor(data.mean).view(1, 3, 1, 1))
        self.std = nn.Buffer(255.0 * torch.tensor(data.std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Any:
        return self.network((images - self.mean) / self.std)


def export(saved: checkpoint_read.Saved, config: Config, folder: Path) -> None:
    """Writes the network in ``saved`` to ``folder`` in ``export.format``.

    Nothing is written unless the export reproduces the network's logits on noise images.

    Raises:
        CheckpointError: the checkpoint does not fit.
        ConfigError: the network cannot be exported, or the file's logits differ.
    """
    form = config.export.format
    model, classes = network(saved, config)
    size = config.data.image_size
    images = torch.randint(0, 256, (_CHECKED, 3, size, size), dtype=torch.uint8)
    facts = {
        "classes": classes,
        "input": f"uint8 [N, 3, {size}, {size}], 0..255, RGB; normalization is included",
        "output": f"float32 [N, {len(classes)}], logits",
        **{path.removeprefix("data."): attrgetter(path)(config) for path in resume.PIXELS},
        "eval_resize": as_evaluated(config.data).whole_size(1, 1)[0],
    }
    texts = {name: json.dumps(plain(fact)) for name, fact in facts.items()}
    normalized = Transform(config.data, images.device).normalize(images)
    if form is Format.timm:
        files, run = _timm(model, config, classes)
        images = normalized
    else:
        whole = _Whole(model, config.data).eval()
        with user_code.explained(
            f"model.name={config.model.name}: torch.export cannot export the network with a "
            "dynamic batch size; its code may not depend on the batch size or branch on image "
            "content:"
        ):
            # if traced with one image, the batch size would be fixed at one
            dynamic = ({0: Dim("batch", min=1)},)
            program = torch.export.export(whole, (images[:2],), dynamic_shapes=dynamic)
        data, run = (_onnx if form is Format.onnx else _pt2)(program, texts)
        files = {f"model.{form.name}": data}
    with torch.no_grad():
        expected = model(normalized)
        # first a batch of one image
        given = torch.cat([run(images[:1]), run(images)[1:]])
    error = float((given - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    # negated to also reject NaN
    if not error <= _TOLERANCE:
        raise ConfigError(
            f"export.format={form.name}: on {_CHECKED} noise images, the logits differ from the "
            f"network's by {error:.2g}, more than {_TOLERANCE:g}; nothing was written"
        )
    for name, data in files.items():
        write_whole(folder / name, data)
    if form is Format.timm:
        say(f"exported       timm.create_model('local-dir:{folder.absolute()}', pretrained=True)")
    else:
        path = os.path.relpath(folder / f"model.{form.name}")
        say(f"exported       {path}, in fp32: {facts['input']}")
    say(f"checked        on {_CHECKED} noise images: logits differ by at most {error:.1g}")


def _pt2(program: ExportedProgram, texts: dict[str, str]) -> tuple[bytes, Any]:
    """Returns the bytes of a file with ``program`` and ``texts``, and a function that runs it."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files=texts)
    data = file.getvalue()
    return data, torch.export.load(io.BytesIO(data)).module()


def _timm(
    model: nn.Module, config: Config, classes: tuple[str, ...]
) -> tuple[dict[str, bytes], Any]:
    """Returns the files for a folder that timm reads, by name, and a function that runs them.

    Raises:
        ConfigError: the network is not a timm model.
    """
    name = config.model.name
    if not name.startswith(TIMM):
        raise ConfigError(
            f"export.format=timm: model.name={name} is not a timm model; use export.format=pt2"
        )
    import timm
    from safetensors.torch import save

    data = config.data
    size = data.image_size
    resize = as_evaluated(data).whole_size(1, 1)[0]
    facts = {
        "input_size": [3, size, size],
        "interpolation": data.interpolation.name,
        "crop_pct": size / resize,
        "crop_mode": "squash" if data.eval_squash else "center",
        "mean": data.mean,
        "std": data.std,
        "num_classes": len(classes),
    }
    settings = {
        "architecture": name.removeprefix(TIMM).partition(".")[0],
        "num_classes": len(classes),
        "label_names": classes,
        "model_args": {**models.size_args(name, size), **config.model.args},
        "pretrained_cfg": facts,
    }
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    files = {
        "model.safetensors": save(state),
        "config.json": json.dumps(settings, indent=1).encode(),
    }
    with tempfile.TemporaryDirectory() as place:
        for file, content in files.items():
            (Path(place) / file).write_bytes(content)
        again = timm.create_model(f"local-dir:{place}", pretrained=True)
    return files, again.eval()


def _onnx(program: ExportedProgram, texts: dict[str, str]) -> tuple[bytes, Any]:
    """Like ``_pt2``; the input is named ``images`` and the output ``logits``.

    Raises:
        ConfigError: packages are missing, or the network is too large or unsupported by ONNX.
    """
    packages = (
        '; install its packages with pip install -e ".[onnx]" or uv sync --extra onnx; '
        "export.format=pt2 needs none"
    )
    with user_code.explained("export.format=onnx:", packages):
        from onnxruntime import InferenceSession, SessionOptions

        names: Any = {"input_names": ["images"], "output_names": ["logits"]}
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
        made.model.metadata_props.update(texts)
        data = made.model_proto.SerializeToString()
        options = SessionOptions()
        # the default is one per core on the machine
        options.intra_op_num_threads = torch.get_num_threads()
        session = InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return data, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
