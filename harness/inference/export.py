"""mode=export: a trained network as one file that runs without this project."""

from __future__ import annotations

import io
import json
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from harness.config import Config, ConfigError, DataConfig, Format
from harness.data.datasets import as_evaluated
from harness.inference.loaded import Transform, network
from harness.runtime import parts
from harness.runtime.files import write_whole
from harness.training import checkpoint, resume
from harness.watch.board import plain
from harness.watch.console import say

# images that a file is checked on
_CHECKED = 16
# most that logits may differ, as a share of the largest of those that are above 1
_TOLERANCE = 1e-4


class _Whole(nn.Module):
    """A network behind its normalisation: uint8 ``[N, 3, S, S]`` to logits ``[N, classes]``."""

    def __init__(self, network: nn.Module, data: DataConfig) -> None:
        super().__init__()
        self.network = network
        self.mean = nn.Buffer(255.0 * torch.tensor(data.mean).view(1, 3, 1, 1))
        self.std = nn.Buffer(255.0 * torch.tensor(data.std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Any:
        return self.network((images - self.mean) / self.std)


def export(saved: checkpoint.Saved, config: Config, folder: Path) -> None:
    """Writes the network in ``saved`` into ``folder``, as ``model.pt2`` or ``model.onnx``.

    The file is there only if it gives the logits of the network itself, on images of noise.

    Raises:
        CheckpointError: the checkpoint does not fit.
        ConfigError: the network cannot be exported, or the file gives other logits.
    """
    form = config.export.format
    model, classes = network(saved, config)
    size = config.data.image_size
    images = torch.randint(0, 256, (_CHECKED, 3, size, size), dtype=torch.uint8)
    program = _program(_Whole(model, config.data).eval(), config)
    facts = {
        "classes": list(classes),
        "input": f"uint8 [N, 3, {size}, {size}], 0..255, RGB; normalisation is inside",
        "output": f"float32 [N, {len(classes)}], logits",
        **{path.removeprefix("data."): attrgetter(path)(config) for path in resume.PIXELS},
        "eval_resize": as_evaluated(config.data)[1].whole_size(1, 1)[0],
    }
    texts = {name: json.dumps(plain(fact)) for name, fact in facts.items()}
    data, run = (_onnx if form is Format.onnx else _pt2)(program, texts)
    with torch.no_grad():
        expected = model(Transform(config.data, images.device).normalise(images))
        # an image alone comes first
        given = torch.cat([run(images[:1]), run(images)[1:]])
    error = float((given - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    # so that NaN is refused too
    if not error <= _TOLERANCE:
        raise ConfigError(
            f"export.format={form.name}: on {_CHECKED} images of noise the logits differ by "
            f"{error:.2g} from the network's, more than {_TOLERANCE:g}; nothing is written"
        )
    path = folder / f"model.{form.name}"
    write_whole(path, data)
    say(f"exported       {os.path.relpath(path)}, in fp32: {facts['input']}")
    say(f"checked        on {_CHECKED} images of noise, logits differ by {error:.1g} at most")


def _program(whole: nn.Module, config: Config) -> ExportedProgram:
    """Returns ``whole`` as a program of any number of images.

    Raises:
        ConfigError: torch cannot make one.
    """
    size = config.data.image_size
    # made of one image, a program would be for one alone
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    with parts.explained(
        f"model.name={config.model.name}: torch.export can make no program of the network for any "
        "number of images; its code may not depend on that number, nor branch by what is in the "
        "images:"
    ):
        return torch.export.export(whole, (images,), dynamic_shapes=({0: Dim("batch", min=1)},))


def _pt2(program: ExportedProgram, texts: dict[str, str]) -> tuple[bytes, Any]:
    """Returns the bytes of a file with ``program`` and ``texts``, and what runs the file."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files=texts)
    data = file.getvalue()
    return data, torch.export.load(io.BytesIO(data)).module()


def _onnx(program: ExportedProgram, texts: dict[str, str]) -> tuple[bytes, Any]:
    """As ``_pt2``; the names of what goes in and comes out are ``images`` and ``logits``.

    Raises:
        ConfigError: packages are missing, the network has no form in ONNX, or is too large.
    """
    packages = (
        '; its packages come by pip install -e ".[onnx]" or uv sync --extra onnx; '
        "export.format=pt2 needs none"
    )
    with parts.explained("export.format=onnx:", packages):
        from onnxruntime import InferenceSession, SessionOptions

        names: Any = {"input_names": ["images"], "output_names": ["logits"]}
        made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
        made.model.metadata_props.update(texts)
        data = made.model_proto.SerializeToString()
        options = SessionOptions()
        # else one for each core of the machine
        options.intra_op_num_threads = torch.get_num_threads()
        session = InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return data, lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
