"""Compares the rates and losses of the recipes in ``conf/experiment`` with their sources'.

The sources run in place, with their parsers, optimizers and schedules, but without data and steps.
Imports that they do not need are stubbed.

    uv run python -m scripts.bench.recipes FOLDER

``FOLDER`` has the checkouts ``vision``, ``pytorch-image-models``, ``ffcv-imagenet``, ``ConvNeXt``
and ``vision_transformer``. Needs timm, fastargs and terminaltables.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import multiprocessing
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from torch.optim import Optimizer

# updates per epoch: rates are compared at each of them
STEPS = 7
CLASSES = 1000
# as published: torchvision's blog, README.md of its references; "ResNet strikes back", table 2;
# rn50_16_epochs.yaml; TRAINING.md of ConvNeXt, ConvNeXt-B from ImageNet-22K at 224 pixels
FLAGS = {
    "imagenet_resnet50": "--model resnet50 --batch-size 256",
    "imagenet_resnet50_v2": (
        "--model resnet50 --batch-size 128 --world-size 8 --lr 0.5 --lr-warmup-epochs 5 "
        "--lr-scheduler cosineannealinglr --lr-warmup-method linear --auto-augment ta_wide "
        "--epochs 600 --random-erase 0.1 --weight-decay 0.00002 --norm-weight-decay 0.0 "
        "--label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 --train-crop-size 176 "
        "--model-ema --val-resize-size 232 --ra-sampler --ra-reps 4"
    ),
    "imagenet_resnet50_a1": (
        "--lr 5e-3 --weight-decay 0.01 --epochs 600 --mixup 0.2 --smoothing 0.1 --drop-path 0.05"
    ),
    "imagenet_resnet50_a2": (
        "--lr 5e-3 --weight-decay 0.02 --epochs 300 --mixup 0.1 --smoothing 0 --drop-path 0.05"
    ),
    "imagenet_resnet50_a3": "--lr 8e-3 --weight-decay 0.02 --epochs 100 --mixup 0.1 --smoothing 0",
    "imagenet_resnet50_16epochs": "rn50_configs/rn50_16_epochs.yaml",
    "finetune_convnext": (
        "--model convnext_base --drop_path 0.2 --input_size 224 --batch_size 32 --lr 5e-5 "
        "--warmup_epochs 0 --epochs 30 --weight_decay 1e-8 --layer_decay 0.8 "
        "--head_init_scale 0.001 --cutmix 0 --mixup 0"
    ),
    "finetune_vit": "",
}
PROCEDURE = (
    "folder --model resnet50 --opt lamb --sched cosine --warmup-epochs 5 --warmup-lr 1e-4 "
    "--min-lr 1e-6 --bce-loss --bce-target-thresh 0.2 --cutmix 1.0 --device cpu --val-split="
)


@dataclass
class Course:
    """A recipe's treatment of each parameter.

    Attributes:
        parameters: in the order of the network of torchvision or timm.
        network: the network that owns them.
        rows: learning rate and weight decay of each parameter at each update.
        loss: of logits ``[N, classes]``, labels ``[N]`` and mixed labels ``[N, classes]``.
        more: other settings by name.
    """

    network: nn.Module
    parameters: list[nn.Parameter]
    rows: list[list[tuple[float, float]]] = field(default_factory=list)
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def look(self, optimizer: Optimizer) -> None:
        """Records the rates of the next update."""
        groups = optimizer.param_groups
        self.rows.append([(float(group["lr"]), group["weight_decay"]) for group in groups])
        self.more |= {
            key: value
            for key, value in groups[0].items()
            if key in ("momentum", "nesterov", "betas", "eps", "max_grad_norm", "bias_correction")
        }
        self.groups = {p: n for n, group in enumerate(groups) for p in group["params"]}

    def rates(self) -> np.ndarray:
        """Returns float ``[updates, parameters, 2]``."""
        return np.array(self.rows)[:, [self.groups[p] for p in self.parameters]]


def harness_course(name: str) -> Course:
    """Runs the schedule of the experiment ``name``, all updates."""
    from harness import config as schema
    from harness.cli.compose import register
    from harness.runtime.distributed import World
    from harness.training.losses import make_loss
    from harness.training.state import make_state

    register()
    typed = [f"experiment={name}", "model.weights=null", "data.root=."]
    with initialize_config_dir(str(schema.CONF), version_base="1.3"):
        config = schema.load(compose("config", overrides=typed))
    world = World(0, 1, 0, 1, torch.device("cpu"))
    state = make_state(config, CLASSES, world, STEPS, images=config.optim.lr_per or 0)
    course = Course(state.network, [*state.network.parameters()])
    for _ in range(config.trainer.epochs * STEPS):
        course.look(state.optimizer)
        state.schedule.step()
    loss = make_loss(config.optim, None)
    course.loss = lambda logits, labels, mixed: loss(
        logits, mixed if config.augment.mixup else labels
    )
    course.more |= {"ema_decay": config.optim.ema_decay, "clip_norm": config.optim.clip_norm}
    return course


def vision(name: str, folder: Path) -> Course:
    """Runs ``main`` of torchvision's references/classification/train.py."""
    sys.path.insert(0, str(folder / "vision/references/classification"))
    train: Any = importlib.import_module("train")

    found: list[Course] = []

    def epoch(model: nn.Module, criterion: Any, optimizer: Optimizer, *more: Any) -> None:
        average = more[4]
        if not found:
            found.append(Course(model, [*model.parameters()]))
            found[0].loss = lambda logits, labels, mixed: criterion(
                logits, mixed if "mixup" in FLAGS[name] else labels
            )
        for _ in range(STEPS):
            found[0].look(optimizer)
        if average is not None:
            share = 1 - float(average.avg_fn(torch.zeros(1), torch.ones(1), 1))
            found[0].more["ema_decay"] = share ** (1 / more[3].model_ema_steps)

    images = torch.utils.data.TensorDataset(torch.zeros(CLASSES, 1))
    images.classes = range(CLASSES)  # type: ignore[attr-defined]
    order = range(CLASSES)
    train.load_data = lambda *_: (images, images, order, order)
    train.train_one_epoch, train.evaluate = epoch, MagicMock()
    flags = f"{FLAGS[name]} --device cpu --data-path . --output-dir="
    train.main(train.get_args_parser().parse_args(flags.split()))
    return found[0]


def image_models(name: str, folder: Path) -> Course:
    """Runs ``main`` of timm's train.py."""
    sys.path.insert(0, str(folder / "pytorch-image-models"))
    from timm.data.mixup import mixup_target

    train: Any = importlib.import_module("train")

    found: list[Course] = []
    flags = FLAGS[name]
    smoothing = float(flags.partition("--smoothing ")[2].split()[0])

    def epoch(
        number: int, model: nn.Module, loader: Any, optimizer: Optimizer, *_: Any, **more: Any
    ) -> dict[str, float]:
        if not found:
            found.append(Course(model, [*model.parameters()]))
            found[0].loss = lambda logits, labels, mixed: more["task"].criterion(
                logits, mixup_target(labels, CLASSES, 0.3, smoothing)
            )
        for step in range(STEPS):
            found[0].look(optimizer)
            more["lr_scheduler"].step_update(num_updates=number * STEPS + step + 1)
        return {"loss": 0.0}

    train.create_dataset = MagicMock()
    train.create_loader = lambda *_, **__: [0] * STEPS
    train._set_loader_epoch, train.train_one_epoch = MagicMock(), epoch
    train.utils.CheckpointSaver = MagicMock()
    train.utils.CheckpointSaver.return_value.save_checkpoint.return_value = (0.0, 0)
    with tempfile.TemporaryDirectory() as out:
        sys.argv = ["train.py", *f"{PROCEDURE} {flags} --output {out}".split()]
        train.main()
    return found[0]


def ffcv(name: str, folder: Path) -> Course:
    """Runs the trainer of FFCV's train_imagenet.py on a network with one parameter."""
    absent = " .pipeline.operation .loader .transforms .fields.rgb_image .fields.basics"
    sys.modules.update({f"ffcv{part}": MagicMock() for part in absent.split(" ")})
    sys.modules["torchmetrics"] = MagicMock()
    sys.path.insert(0, str(folder / "ffcv-imagenet"))
    import train_imagenet as source  # type: ignore[import-not-found]

    written = yaml.safe_load((folder / "ffcv-imagenet" / FLAGS[name]).read_text())
    written["data"] |= {"train_dataset": ".", "val_dataset": "."}
    source.get_current_config().collect(written).collect({"training.distributed": 0})
    trainer = object.__new__(source.ImageNetTrainer)
    trainer.gpu = "cpu"
    trainer.model, trainer.scaler = trainer.create_model_and_scaler(distributed=0)
    trainer.create_optimizer()
    course = Course(trainer.model, [*trainer.model.parameters()])
    course.loss = lambda logits, labels, _: trainer.loss(logits, labels)
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: course.look(optimizer))
    trainer.train_loader = [(torch.ones(1, 1), torch.zeros(1).long())] * STEPS
    trainer.model = nn.Linear(1, CLASSES)
    for epoch in range(written["training"]["epochs"]):
        trainer.train_loop(epoch)
    course.more["sizes"] = [trainer.get_resolution(epoch) for epoch in range(16)]
    return course


def convnext(name: str, folder: Path) -> Course:
    """Runs ConvNeXt's optimizer, schedule and engine on a network with one parameter."""
    import timm.optim  # noqa: F401

    for absent in ("novograd", "nadam", "radam", "rmsprop_tf", "nvnovograd"):
        sys.modules[f"timm.optim.{absent}"] = MagicMock()
    sys.modules.update({absent: MagicMock() for absent in ("torch._six", "tensorboardX")})
    sys.path.insert(0, str(folder / "ConvNeXt"))
    import engine  # type: ignore[import-not-found]
    import main  # type: ignore[import-not-found]
    import optim_factory  # type: ignore[import-not-found]
    import utils  # type: ignore[import-not-found]
    from models.convnext import convnext_base  # type: ignore[import-not-found]
    from timm.loss import LabelSmoothingCrossEntropy

    args = argparse.ArgumentParser(parents=[main.get_args_parser()], add_help=False).parse_args(
        FLAGS[name].split()
    )
    network = convnext_base(num_classes=CLASSES)
    # as main does, with its 12 groups of layers
    assigner = optim_factory.LayerDecayValueAssigner(
        [args.layer_decay ** (13 - i) for i in range(14)]
    )
    optimizer = optim_factory.create_optimizer(
        args, network, get_num_layer=assigner.get_layer_id, get_layer_scale=assigner.get_scale
    )
    rates = utils.cosine_scheduler(args.lr, args.min_lr, args.epochs, STEPS, args.warmup_epochs)
    decays = utils.cosine_scheduler(args.weight_decay, args.weight_decay, args.epochs, STEPS)

    def key(named: tuple[str, nn.Parameter]) -> tuple[int, int, int]:
        """Returns a parameter's position in the torchvision network."""
        name, _ = named
        found = [int(number) for number in re.findall(r"\d+", name.replace("pwconv", "conv"))]
        stage = 2 * found[0] + name.startswith("stages") if found else 9 + name.startswith("head")
        return (stage, found[1] if found else 0, 0 if name.endswith("gamma") else 1)

    course = Course(
        network, [parameter for _, parameter in sorted(network.named_parameters(), key=key)]
    )
    criterion = LabelSmoothingCrossEntropy(args.smoothing)
    course.loss = lambda logits, labels, _: criterion(logits, labels)
    optimizer.register_step_pre_hook(lambda optimizer, *_: course.look(optimizer))
    torch.cuda.synchronize = MagicMock()
    loader = [(torch.ones(1, 1), torch.zeros(1).long())] * STEPS
    for epoch in range(args.epochs):
        engine.train_one_epoch(
            nn.Linear(1, CLASSES), criterion, loader, optimizer, torch.device("cpu"), epoch, None,
            start_steps=epoch * STEPS, lr_schedule_values=rates, wd_schedule_values=decays,
            num_training_steps_per_epoch=STEPS, update_freq=1,
        )  # fmt: skip
    return course


def vision_transformer(name: str, folder: Path) -> Course:
    """Runs the schedule of vit_jax/utils.py in NumPy; the rest comes from its configuration."""
    tree = ast.parse((folder / "vision_transformer/vit_jax/utils.py").read_text())
    kept = [
        node for node in tree.body if getattr(node, "name", "") == "create_learning_rate_schedule"
    ]
    space: dict[str, Any] = {"jnp": np}
    exec(compile(ast.Module(kept, []), "utils.py", "exec"), space)
    epochs = 20
    network = torchvision.models.vit_b_16(num_classes=CLASSES)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9)
    course = Course(network, [*network.parameters()])
    # for CIFAR-10 it warms up for 500 of 10,000 updates
    rate = space["create_learning_rate_schedule"](epochs * STEPS, 0.03, "cosine", STEPS)
    for step in range(epochs * STEPS):
        # optax counts updates from 0
        optimizer.param_groups[0]["lr"] = rate(step)
        course.look(optimizer)
    course.loss = lambda logits, labels, _: F.cross_entropy(logits, labels)
    course.more["clip_norm"] = 1.0
    return course


SOURCES = {
    "imagenet_resnet50": vision,
    "imagenet_resnet50_v2": vision,
    "imagenet_resnet50_a1": image_models,
    "imagenet_resnet50_a2": image_models,
    "imagenet_resnet50_a3": image_models,
    "imagenet_resnet50_16epochs": ffcv,
    "finetune_convnext": convnext,
    "finetune_vit": vision_transformer,
}


def compared(name: str, folder: Path) -> list[str]:
    """Returns lines on the differences between the recipe ``name`` and its source."""
    torch.manual_seed(0)
    with redirect_stdout(sys.stderr):
        theirs = SOURCES[name](name, folder)
        ours = harness_course(name)
    shapes = [[tuple(p.squeeze().shape) for p in course.parameters] for course in (ours, theirs)]
    assert shapes[0] == shapes[1]
    rates = [course.rates() for course in (ours, theirs)]
    told = [f"{rates[0].shape[1]} parameters, {len(rates[0])} and {len(rates[1])} updates"]
    peak = rates[1][:, :, 0].max(axis=0)
    apart = np.abs(rates[0][:, :, 0] - rates[1][:, :, 0]) / peak
    step, place = np.unravel_index(apart.argmax(), apart.shape)
    names = [key for key, _ in ours.network.named_parameters()]
    told.append(
        f"learning rate: at most {apart.max():.1e} of the peak apart, at update {step + 1} of "
        f"{names[place]}"
    )
    decays = [rate[:, :, 1] for rate in rates]
    others = [names[place] for place in np.flatnonzero((decays[0] != decays[1]).any(axis=0))]
    told.append(f"weight decay: {len(others)} parameters differ {others[:3]}")
    logits, labels = torch.randn(64, CLASSES), torch.randint(CLASSES, (64,))
    share = F.one_hot(labels, CLASSES).float()
    mixed = 0.3 * share + 0.7 * share.flip(0)
    criteria = [course.loss for course in (ours, theirs) if course.loss is not None]
    losses = [float(loss(logits, labels, mixed)) for loss in criteria]
    told.append(f"loss: {losses[0]:.7g} and {losses[1]:.7g}")
    for key in {**ours.more, **theirs.more}:
        pair = ours.more.get(key), theirs.more.get(key)
        told.append(f"{key}: {pair[0]} and {pair[1]}")
    return told


def main() -> None:
    """Prints the differences of all recipes, each in a separate process."""
    folder = Path(sys.argv[1]).resolve()
    names = sys.argv[2:] or list(SOURCES)
    # sources have modules of the same names
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            print(name, *pool.apply(compared, (name, folder)), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
