"""The schema declares every setting: its type, unit, range and description.

The dataclasses below are the schema; the files in ``conf/`` hold values only. ``load`` turns the
settings that Hydra composed into a checked ``Config``. This module never imports Hydra.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import operator
import re
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import suggestions


class ConfigError(ValueError):
    """An invalid setting: one line with its name, value and fix."""

    exit_code = 2


Mode = Enum("Mode", "train evaluate diagnose verify predict export")
Format = Enum("Format", "pt2 onnx timm")
OnError = Enum("OnError", "raise skip")
Evaluate = Enum("Evaluate", "val test")
Policies = Enum("Policies", "none trivial rand three auto")
Crop = Enum("Crop", "random_resized pad center")
Interpolation = Enum("Interpolation", "bilinear bicubic")
BackendName = Enum("BackendName", "processes threads arrays auto")
DataCache = Enum("DataCache", "none ram disk")
StartMethod = Enum("StartMethod", "forkserver spawn fork")
OrderName = Enum("OrderName", "uniform lanes")
TunerName = Enum("TunerName", "auto grid")
ScheduleName = Enum("ScheduleName", "constant step cosine linear exponential onecycle plateau")
Precision = Enum("Precision", "fp32 fp16 bf16")
Wandb = Enum("Wandb", "disabled offline online")
DistName = Enum("DistName", "single spawn torchrun")
DistBackend = Enum("DistBackend", "auto nccl gloo")

# modes that apply a checkpoint's network to other images
_APPLIED = "mode=predict, mode=export"
_OTHER_POLICIES = "augment.auto=trivial, augment.auto=three, augment.auto=auto"
# numeric ranges
_ANY: Mapping[str, float] = {}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_COUNT = {"ge": 1}
_NATURAL = {"ge": 0}
_WORKERS = {"ge": 0, "le": 512}
_NOT_NEGATIVE = {"ge": 0.0}
_POSITIVE = {"gt": 0.0}
_SHARE = {"ge": 0.0, "le": 1.0}
_BELOW_ONE = {"ge": 0.0, "lt": 1.0}
_PART = {"gt": 0.0, "le": 1.0}
_INNER = {"gt": 0.0, "lt": 1.0}
_NUMBER = r"\d+(\.\d+)?(e[+-]?\d+)?"

# prefix of timm network names
TIMM = "timm/"
# this project's own networks
OURS = ("small", "resnet9_cifar", "resnet18_cifar", "resnet20_cifar")

# inside the package in a wheel, next to it in a checkout
CONF = Path(__file__).with_name("conf")
if not CONF.is_dir():
    CONF = Path(__file__).parents[1] / "conf"


def setting(default: Any, text: str, limits: Mapping[str, float] = _ANY, **more: Any) -> Any:
    """Returns a dataclass field with its description and range.

    Args:
        default: the value, unless a file in ``conf/`` sets another one.
        text: a one-sentence description, with the unit.
        limits: bounds for a number, or for every number in a tuple: any of ``_SIGNS``.
        **more: also any of ``_SIGNS``, ``increasing`` (a tuple whose values may not decrease),
            ``pattern`` (for the value as typed, and what to use) and ``no_effect_with`` (other
            settings as typed, separated by commas: in combination with any of these, only the
            default is accepted).
    """
    metadata = {"text": text, **limits, **more}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type) -> Any:
    """A dataclass field with the settings of the dataclass ``kind``."""
    return field(default_factory=kind)


@dataclass(slots=True)
class RunConfig:
    """The run's folder."""

    name: str | None = setting(
        None,
        "Folder under outputs/; null: the start date and time.",
        pattern=(
            r"\w[\w.+=@ -]{0,199}",
            "up to 200 letters, digits and, after the first character, ._+=@-",
        ),
    )


@dataclass(slots=True)
class GenerateConfig:
    """Generated data sets (data=shapes and data=fake only)."""

    classes: int = setting(10, "Number of classes.", ge=2, le=10_000)
    train_images: int = setting(8000, "Number of training images.", _COUNT)
    val_images: int = setting(2000, "Number of validation images.", _COUNT)
    width: int = setting(80, "Width of generated images in pixels.", ge=32, le=4096)
    height: int = setting(80, "Height of generated images in pixels.", ge=32, le=4096)
    quality: int = setting(90, "JPEG quality of generated images.", ge=1, le=100)
    seed: int = setting(0, "Generator seed; each seed gives a different data set.", _NATURAL)


@dataclass(slots=True)
class ColumnsConfig:
    """Columns of data.table by name, or by number from 1 if the table has no header."""

    image: str | None = setting(
        None, "Column with image paths below data.root; null: detected by name."
    )
    label: str | None = setting(None, "Column with class names; null: detected by name.")
    split: str | None = setting(
        None,
        "Column with train, val or test for each image; null: the split column, if there is one.",
    )
    group: str | None = setting(
        None,
        "Column with groups, such as patients, that split_fraction and fold keep together; null: "
        "the group, patient or subject column, if there is one.",
    )


@dataclass(slots=True)
class DataConfig:
    """The data set."""

    name: str = setting(
        "shapes",
        "Data set: a name from harness/data/datasets.py, or your own function, such as "
        "my_module:open_splits.",
    )
    root: str | None = setting(
        None, "Folder or file with the data; null: a folder in the user's cache."
    )
    download: bool = setting(True, "Download or generate missing data (cifar10, cifar100, shapes).")
    mirror: str | None = setting(None, "Base URL for downloads; null: the original site.")
    md5: str | None = setting(None, "MD5 of a trusted archive; null: that of the original.")
    image_size: int = setting(
        64, "Side length of the network's square input in pixels.", ge=8, le=4096
    )
    train_size: Any = setting(
        None,
        "Side length of training images in pixels, if different, such as 176; or a list of side "
        "lengths, one for each epoch in train_size_epochs; null: image_size.",
        pattern=(
            r"\d+|\[\d+(,\d+)*\]",
            "null, a side length such as 176, or a list such as [128,160,192]",
        ),
        ge=8,
        le=4096,
        no_effect_with="data=fake",
    )
    train_size_epochs: Any = setting(
        None,
        "First epoch of each side length in train_size, counted from 0, such as [0,6,12]; null "
        "if there is only one.",
        _NATURAL,
        pattern=(r"\[\d+(,\d+)*\]", "null, or epochs such as [0,6,12]"),
        increasing=True,
    )
    eval_resize: int | None = setting(
        None,
        "Length of the shorter side before the center crop in evaluation; null: image_size * 256 "
        "/ 224, or no resizing of images that already match image_size.",
        ge=8,
    )
    eval_squash: bool = setting(
        False,
        "Before the center crop in evaluation, resize to a square, ignoring aspect ratio.",
    )
    interpolation: Interpolation = setting(
        Interpolation.bilinear,
        "Filter used to resize images; both choices are antialiased, as in Pillow.",
    )
    mean: tuple[float, float, float] = setting(
        (0.485, 0.456, 0.406), "Channel means, as fractions of 255.", _SHARE
    )
    std: tuple[float, float, float] = setting(
        (0.229, 0.224, 0.225),
        "Channel standard deviations, as fractions of 255.",
        _PART,
    )
    table: str | None = setting(
        None,
        "Table that lists the images (data=table only), relative to root or to the current "
        "folder: CSV, TSV, JSONL or Parquet.",
    )
    train: str | None = setting(
        None,
        "Training set shards (data=shards only), such as train-{000..146}.tar or "
        "'train-*.tar' below root; null: those listed in _info.json, else all.",
    )
    val: str | None = setting(None, "Validation set shards (data=shards only); null: none.")
    split_fraction: float | None = setting(
        None,
        "Fraction of images held out for validation if root or table has no train and val sets.",
        _INNER,
    )
    fold: int | None = setting(
        None,
        "Fold held out for validation, counted from 0; -m data.fold=0,1,2,3,4 runs a "
        "cross-validation.",
        _NATURAL,
    )
    folds: int = setting(
        5, "Number of folds, stratified by class.", ge=2, no_effect_with="data.fold=null"
    )
    evaluate: Evaluate = setting(
        Evaluate.val,
        "Images that mode=evaluate uses: val or test (the folder next to train and val). If root "
        "contains class folders instead, all its images are used.",
    )
    repeats: int = setting(
        1,
        "Number of times that each image in an epoch is used, with a different augmentation "
        "each time (repeated augmentation). The epoch length does not change, so an epoch "
        "covers fewer images.",
        ge=1,
        le=100,
        no_effect_with="data=fake, loader.order=lanes",
    )
    fraction: float = setting(
        1.0,
        "Fraction of the training images in each class to use, but at least one image per class; "
        "every seed uses the same images.",
        _PART,
        no_effect_with="data=fake",
    )
    balance: float = setting(
        0.0,
        "How strongly rare classes are oversampled, 0 to 1: with 0, an epoch uses every image "
        "once; with 1, all classes appear equally often; 0.5 follows the square root of the "
        "class size. The images in a class take turns, augmented differently each time. The "
        "epoch length does not change.",
        _SHARE,
        no_effect_with="data=fake, loader.order=lanes",
    )
    exif_orientation: bool = setting(
        False, "Rotate images according to their EXIF orientation, common in phone photos."
    )
    background: tuple[int, int, int] = setting(
        (255, 255, 255), "Background color (RGB) for transparent pixels.", ge=0, le=255
    )
    max_pixels: int = setting(
        50_000_000,
        "Largest image to decode, in pixels; a larger image is treated as unreadable.",
        _COUNT,
    )
    on_error: OnError = setting(
        OnError["raise"],
        "What to do if an image cannot be read: raise ends the run; skip replaces it with "
        "another image, always the same one, and lists it in bad_samples.jsonl.",
        no_effect_with=_APPLIED,
    )
    max_bad_fraction: float = setting(
        0.001,
        "Maximum fraction of the training or validation images that may be skipped (one image is "
        "always allowed); the run ends if more are skipped.",
        _SHARE,
        no_effect_with="data.on_error=raise",
    )
    cache: DataCache = setting(
        DataCache.none,
        "Cache for decoded pixels: none, ram (for this run) or disk (for later runs too).",
        no_effect_with=f"mode=evaluate, {_APPLIED}",
    )
    cache_gb: float | None = setting(
        None,
        "Maximum cache size in GB; null: half of the free space.",
        _POSITIVE,
        no_effect_with="data.cache=none",
    )
    cache_max_side: int | None = setting(
        None,
        "Maximum longer side of a cached image in pixels; larger images are shrunk, which changes "
        "crops; null: no limit.",
        ge=32,
        no_effect_with="data.cache=none",
    )
    scratch: str | None = setting(
        None,
        "Folder on a fast disk for samples read from shards, reused by later epochs and runs "
        "and by all ranks on a machine; null: none.",
    )
    scratch_gb: float = setting(
        100.0, "Maximum size of scratch in GB.", _POSITIVE, no_effect_with="data.scratch=null"
    )
    columns: ColumnsConfig = section(ColumnsConfig)
    generate: GenerateConfig = section(GenerateConfig)


@dataclass(slots=True)
class AugmentConfig:
    """Augmentation of training images: a function of (seed, epoch, index) only."""

    crop: Crop = setting(
        Crop.random_resized,
        "Crop: random_resized (ImageNet), pad (CIFAR) or center (as in evaluation).",
    )
    scale: tuple[float, float] = setting(
        (0.08, 1.0),
        "Area of a random_resized crop as a fraction of the image area.",
        _PART,
        increasing=True,
    )
    ratio: tuple[float, float] = setting(
        (3 / 4, 4 / 3),
        "Aspect ratio (width / height) of a random_resized crop.",
        _POSITIVE,
        increasing=True,
    )
    pad: int = setting(
        4,
        "Number of zero pixels added on each side before a random crop (crop=pad).",
        _NATURAL,
        no_effect_with="augment.crop=random_resized, augment.crop=center",
    )
    hflip: float = setting(0.5, "Probability of a horizontal flip.", _SHARE)
    vflip: float = setting(0.0, "Probability of a vertical flip.", _SHARE)
    rotate: float = setting(
        0.0, "Maximum rotation in either direction in degrees; 0: none.", ge=0.0, le=180.0
    )
    color_jitter: tuple[float, float, float, float] = setting(
        (0.0, 0.0, 0.0, 0.0),
        "Maximum change in brightness, contrast, saturation and hue; at most 0.5 for hue.",
        _NOT_NEGATIVE,
    )
    auto: Policies = setting(
        Policies.none,
        "Policy: trivial (TrivialAugment), rand (RandAugment with two operations), three "
        "(3-Augment) or auto (AutoAugment).",
    )
    rand_augment: int = setting(
        0,
        "RandAugment: number of operations per image; 0: none.",
        ge=0,
        le=10,
        no_effect_with=f"{_OTHER_POLICIES}, augment.auto=rand",
    )
    rand_augment_magnitude: int = setting(
        9,
        "RandAugment: magnitude, on torchvision's 31-bin scale.",
        ge=0,
        le=30,
        no_effect_with=f"{_OTHER_POLICIES}, augment.rand_augment=0 augment.auto=none",
    )
    random_erasing: float = setting(0.0, "Probability of erasing a rectangle in an image.", _SHARE)
    erasing_scale: tuple[float, float] = setting(
        (0.02, 0.33),
        "Erased area as a fraction of the image area.",
        _PART,
        increasing=True,
        no_effect_with="augment.random_erasing=0.0",
    )
    erasing_ratio: tuple[float, float] = setting(
        (0.3, 3.3),
        "Aspect ratio (height / width) of the erased rectangle.",
        _POSITIVE,
        increasing=True,
        no_effect_with="augment.random_erasing=0.0",
    )
    mixup: float = setting(0.0, "Mixup: alpha of the beta distribution; 0: none.", _NOT_NEGATIVE)
    cutmix: float = setting(
        0.0,
        "CutMix: alpha of the beta distribution; 0: none. If mixup is also set, each batch uses "
        "one of the two.",
        _NOT_NEGATIVE,
    )
    own: str | None = setting(
        None,
        "Your own function, such as my_augment:cutout, called for each image after crop and flip "
        "with uint8 pixels and a random generator; null: none.",
        no_effect_with="loader.backend=arrays, data=fake",
    )
    own_batch: str | None = setting(
        None,
        "Your own function, called for each batch on its device before normalization, with "
        "uint8 images and random numbers; null: none.",
    )


@dataclass(slots=True)
class ValLoaderConfig:
    """Validation loader settings."""

    batch_size: int | None = setting(
        None, "Images per batch and rank; null: loader.batch_size.", _COUNT
    )
    num_workers: int | None = setting(
        None,
        "Workers per rank; null: as in training.",
        _WORKERS,
        no_effect_with="loader.backend=arrays",
    )
    prefetch_factor: int | None = setting(
        None,
        "Batches prefetched per worker; null: 2, or 2 in total for threads.",
        ge=1,
        le=10_000,
        no_effect_with="loader.backend=arrays, loader.val.num_workers=0, "
        "loader.num_workers=0 loader.val.num_workers=null",
    )


@dataclass(slots=True)
class LoaderConfig:
    """The data loader."""

    autotune: bool = setting(
        False,
        "Tune the settings below before training, with the search selected by tuner=.",
        no_effect_with=f"mode=evaluate, mode=diagnose, mode=verify, data=fake, {_APPLIED}",
    )
    backend: BackendName | None = setting(
        None,
        "How batches are made: by processes, by threads, from arrays in memory, or auto "
        "(chosen by tuner=auto). null: auto with autotune; otherwise threads, or processes for "
        "your own Dataset.",
    )
    batch_size: int = setting(64, "Images per batch and rank.", _COUNT)
    num_workers: int | None = setting(
        None,
        "Workers (processes or threads) per rank; 0: load in the main process; null: one per "
        "usable core, up to 16.",
        _WORKERS,
        no_effect_with="loader.backend=arrays",
    )
    pin_memory: bool | None = setting(
        None, "Copy batches to page-locked memory; null: only if there is a CUDA device."
    )
    prefetch_factor: int | None = setting(
        None,
        "Batches prefetched per worker; null: 2, or 2 in total for threads.",
        ge=1,
        le=10_000,
        no_effect_with="loader.backend=arrays, loader.num_workers=0",
    )
    persistent_workers: bool | None = setting(
        None,
        "Keep worker processes alive between epochs; null: true. Threads are always kept.",
        no_effect_with="loader.backend=arrays, loader.num_workers=0",
    )
    drop_last: bool = setting(
        True, "Drop the last images in an epoch if there are too few for a full update."
    )
    order: OrderName = setting(
        OrderName.uniform,
        "Image order in an epoch: uniform shuffles all images; lanes reads shards "
        "block by block and shuffles the images within a window of blocks.",
    )
    lanes: int = setting(
        64,
        "Number of block sequences read side by side; ideally a multiple of the number of "
        "ranks that divides the global batch size.",
        ge=1,
        le=4096,
        no_effect_with="loader.order=uniform",
    )
    window_mb: int = setting(
        1024,
        "Data shuffled together across all lanes, in MiB; at least one block per lane.",
        _COUNT,
        no_effect_with="loader.order=uniform",
    )
    timeout_s: float = setting(
        120.0, "Maximum wait for a worker's batch in seconds; 0: no limit.", _NOT_NEGATIVE
    )
    restart_workers: bool = setting(
        False,
        "Replace workers (processes or threads) that died or did not respond for timeout_s, "
        "and retry the batch; a third failure on the same batch ends the run.",
        no_effect_with="loader.num_workers=0",
    )
    start_method: StartMethod = setting(StartMethod.forkserver, "How worker processes are started.")
    device_prefetch: bool = setting(
        True, "Copy and normalize one batch ahead on a separate CUDA stream."
    )
    val: ValLoaderConfig = section(ValLoaderConfig)


@dataclass(slots=True)
class TunerConfig:
    """Loader tuning (loader.autotune=true)."""

    name: TunerName = setting(TunerName.auto, "Search method.")
    budget_s: float | None = setting(
        None,
        "Time limit for the search in seconds; a running measurement is completed. null: auto "
        "takes at most 5 s, or seven steps if they take longer, and never more than a tenth of the "
        "rest of the run; grid has no limit (tuner=grid sets 1800).",
        _POSITIVE,
    )
    max_workers: int | None = setting(
        None,
        "Maximum workers per rank for auto; null: four per usable core, at least 8.",
        ge=1,
        le=512,
    )
    live: bool | None = setting(
        None,
        "Adjust the number of loader threads during training if that helps; null: yes, except "
        "on CUDA. Only with one rank, tuner=auto and threads.",
        no_effect_with="loader.autotune=false, tuner=grid",
    )
    fresh: bool = setting(False, "Ignore the stored tuning result from a similar run.")


@dataclass(slots=True)
class ModelConfig:
    """The network."""

    name: str = setting(
        "small",
        "small, resnet9_cifar, resnet18_cifar, resnet20_cifar, any torchvision classifier by "
        "name, a timm model as timm/NAME, or your own function: my_module:build.",
    )
    weights: str | None = setting(
        None,
        "Initial weights; null: random; DEFAULT: the best weights in torchvision, or those "
        "that the timm model's name selects, with their data.* settings; otherwise the path to a "
        "checkpoint, or to timm's model.safetensors.",
    )
    args: dict[str, Any] = setting(
        {}, "Additional arguments for the network's constructor, such as {drop_path_rate:0.1}."
    )


@dataclass(slots=True)
class OptimConfig:
    """The optimizer."""

    name: str = setting(
        "sgd",
        "sgd, adamw, a torch.optim class such as RMSprop, one of timm's optimizers such as "
        "lamb, or your own function: my_module:build.",
    )
    args: dict[str, Any] = setting(
        {}, "Additional arguments for the optimizer, such as {betas:[0.9,0.98]}."
    )
    lr: float = setting(0.1, "Peak learning rate.", _NOT_NEGATIVE)
    lr_per: int | None = setting(
        None,
        "Effective batch size that lr refers to: the learning rate is lr * images / lr_per; "
        "null: lr.",
        _COUNT,
    )
    momentum: float = setting(0.9, "Momentum (sgd).", _BELOW_ONE)
    nesterov: bool = setting(False, "Nesterov momentum (sgd).")
    betas: tuple[float, float] = setting(
        (0.9, 0.999), "Decay rates of the two moving averages (adamw).", _BELOW_ONE
    )
    eps: float = setting(1e-8, "Term added to the denominator (adamw).", _POSITIVE)
    weight_decay: float = setting(1e-4, "Weight decay.", _NOT_NEGATIVE)
    decay_norm_and_bias: bool = setting(
        False, "Apply weight decay to norms and biases too, as pytorch/examples does."
    )
    clip_norm: float | None = setting(
        None, "Maximum total norm of all gradients; null: no clipping.", _POSITIVE
    )
    loss: str = setting(
        "ce",
        "Training loss: ce (cross-entropy), bce (binary cross-entropy for each class), or your "
        "own function: my_module:loss. Evaluation reports cross-entropy.",
        pattern=(r"ce|bce|.*:.*", "ce, bce or module:function"),
    )
    bce_threshold: float | None = setting(
        None,
        "Mixed-image labels above this value are treated as 1, others as 0; null: unchanged.",
        _BELOW_ONE,
        no_effect_with="optim.loss=ce",
    )
    label_smoothing: float = setting(0.0, "Label smoothing in the training loss.", _BELOW_ONE)
    class_weights: Any = setting(
        None,
        "Class weights in the training loss, which is averaged over images: a list in class "
        "order; balanced: images / (classes * images in the class), as in scikit-learn; "
        "null: 1 for all.",
        _POSITIVE,
        pattern=(
            rf"balanced|\[{_NUMBER}(,{_NUMBER})*\]",
            "null, balanced, or a number above 0 for each class, such as [1,2.5]",
        ),
        no_effect_with="data=fake",
    )
    freeze: str | None = setting(
        None,
        "Frozen parameters: all_but_head, or a regular expression matched at the start of "
        "their names, such as layer1; null: none.",
    )
    freeze_epochs: int | None = setting(
        None,
        "Epochs before frozen parameters are unfrozen; null: they stay frozen.",
        _COUNT,
        no_effect_with="optim.freeze=null",
    )
    layer_decay: float | None = setting(
        None,
        "Factor by which the learning rate is multiplied from each block to the preceding one; "
        "the head uses lr; null: lr for all.",
        _PART,
    )
    ema_decay: float | None = setting(
        None,
        "Decay of an exponential moving average of the weights, which is updated at each step "
        "and evaluated in their place; null: no average.",
        _INNER,
    )


@dataclass(slots=True)
class ScheduleConfig:
    """The learning rate over time."""

    name: ScheduleName = setting(ScheduleName.cosine, "Schedule type.")
    warmup_epochs: float = setting(
        0.0, "Number of linear warm-up epochs; may be fractional.", _NOT_NEGATIVE
    )
    warmup_steps: int | None = setting(
        None, "Number of linear warm-up updates; null: see warmup_epochs.", _COUNT
    )
    warmup_start: float = setting(
        0.0,
        "Fraction of the peak rate at which warm-up begins; 0: one warm-up increment above zero.",
        _SHARE,
    )
    warmup_overlaps: bool = setting(
        False, "Start the cosine in the first epoch, during the warm-up, as in timm's script."
    )
    per_epoch: bool = setting(
        False,
        "Change the learning rate only between epochs, as torchvision's and timm's scripts do.",
    )
    step_epochs: int = setting(
        30, "Epochs between learning-rate drops (step, exponential).", _COUNT
    )
    milestones: Any = setting(
        None,
        "Epochs at the start of which the learning rate drops (step), such as [60,120,160]; "
        "null: see step_epochs.",
        _COUNT,
        pattern=(r"\[\d+(,\d+)*\]", "null, or epochs such as [60,120,160]"),
        increasing=True,
    )
    gamma: float = setting(0.1, "Factor for each drop (step, exponential, plateau).", _PART)
    final_fraction: float = setting(
        0.0, "Fraction of the peak rate at the end (cosine, linear, onecycle).", _SHARE
    )
    patience_epochs: int = setting(
        10,
        "Number of consecutive evaluations without a better top-1 before the learning rate "
        "drops (plateau).",
        _NATURAL,
    )


@dataclass(slots=True)
class TrainerConfig:
    """The training loop."""

    epochs: int = setting(10, "Number of passes over the training set.", _COUNT)
    max_steps: int | None = setting(
        None, "Stop after this many optimizer updates; null: at the end of the last epoch.", _COUNT
    )
    max_hours: float | None = setting(
        None,
        "Number of hours, from the start of this command, after which it evaluates, saves and "
        "exits; null: no limit.",
        _POSITIVE,
    )
    patience_epochs: int | None = setting(
        None,
        "Stop after this many evaluated epochs without a better top-1; null: never.",
        _COUNT,
    )
    precision: Precision = setting(
        Precision.fp32, "fp32, or autocast to fp16 (with a gradient scaler) or bf16."
    )
    channels_last: bool = setting(False, "Keep activations in NHWC layout.")
    compile: bool = setting(
        False,
        "Train with torch.compile; short batches and evaluations run eagerly.",
    )
    compile_mode: str = setting(
        "default",
        "torch.compile mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs.",
        pattern=(
            "default|reduce-overhead|max-autotune(-no-cudagraphs)?",
            "default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
        ),
        no_effect_with="trainer.compile=false",
    )
    sync_batch_norm: bool = setting(
        False, "Let batch normalization use the images on all ranks; requires GPUs."
    )
    checkpoint_blocks: bool = setting(
        False,
        "Recompute each block's activations in the backward pass: uses less memory, but steps "
        "take longer.",
    )
    accumulate_steps: int = setting(
        1, "Number of batches whose gradients are accumulated per optimizer update.", _COUNT
    )
    eval_every_epochs: int = setting(
        1, "Epochs between evaluations; the last epoch is always evaluated.", _COUNT
    )
    max_nonfinite_steps: int = setting(
        20,
        "Number of consecutive updates that may be skipped because of a non-finite loss before "
        "the run fails.",
        _NATURAL,
    )
    num_threads: int | None = setting(
        None,
        "Number of torch threads per rank; null: usable cores divided by ranks.",
        ge=1,
        le=1024,
    )
    deterministic: bool = setting(False, "Use only deterministic kernels; no cuDNN benchmarking.")


@dataclass(slots=True)
class CheckpointConfig:
    """Checkpoints."""

    enabled: bool = setting(True, "Save checkpoints.")
    every_epochs: int = setting(
        1, "Epochs between checkpoints; one is always saved at the end of a run.", _COUNT
    )
    every_steps: int | None = setting(
        None, "Optimizer updates between checkpoints within an epoch; null: none.", _COUNT
    )
    every_minutes: float | None = setting(
        10.0, "Minutes between checkpoints within an epoch; null: none.", _POSITIVE
    )
    grace_s: float = setting(
        25.0, "Seconds allowed for a run to save and exit after a signal.", _POSITIVE
    )
    keep_last: int = setting(
        2, "Number of most recent checkpoints to keep, in addition to the best.", ge=2
    )


@dataclass(slots=True)
class WatchConfig:
    """Logging."""

    window_steps: int = setting(10, "Steps per logged window.", _COUNT)
    sample_s: float = setting(1.0, "Seconds between GPU and host load samples.", ge=0.1, le=3600.0)
    tensorboard: bool = setting(True, "Write a TensorBoard event file.")
    wandb: Wandb = setting(
        Wandb.disabled,
        "Log metrics to Weights & Biases: offline keeps them in the run's folder, for `wandb "
        "sync`.",
        no_effect_with=f"mode=diagnose, mode=verify, {_APPLIED}",
    )
    wandb_project: str | None = setting(
        None,
        "W&B project; null: $WANDB_PROJECT, else the W&B default.",
        no_effect_with="watch.wandb=disabled",
    )


@dataclass(slots=True)
class DistConfig:
    """Processes and devices."""

    name: DistName = setting(
        DistName.single,
        "single: one process; spawn: several on this node; torchrun: the default under torchrun.",
    )
    nprocs: int | None = setting(
        None,
        "Number of processes for spawn; null: one per GPU.",
        ge=1,
        le=1024,
        no_effect_with="dist=single, dist=torchrun",
    )
    backend: DistBackend = setting(DistBackend.auto, "auto: nccl with CUDA, otherwise gloo.")
    timeout_s: float = setting(600.0, "Timeout for collectives in seconds.", gt=0.0, le=2.5e6)
    find_unused_parameters: bool = setting(
        False, "Allow parameters that do not contribute to a step's loss; slows every step."
    )


@dataclass(slots=True)
class ProfileConfig:
    """torch.profiler."""

    steps: str | None = setting(
        None,
        "First and last step of a profiler trace, such as 10-20, which is written to the run "
        "folder; null: none.",
        pattern=(r"[1-9]\d*-[1-9]\d*", "the first and the last step, such as 10-20"),
    )


@dataclass(slots=True)
class PredictConfig:
    """Output of mode=predict."""

    top_k: int = setting(
        5,
        "Number of classes listed for each image, the most probable first.",
        _COUNT,
    )


@dataclass(slots=True)
class ExportConfig:
    """Output of mode=export."""

    format: Format = setting(
        Format.pt2,
        "pt2: a torch.export program; onnx: needs the onnx extra; timm: for timm's networks, "
        "the folder that timm.create_model('local-dir:FOLDER') reads.",
    )


@dataclass(slots=True)
class Config:
    """A whole run."""

    mode: Mode = setting(
        Mode.train,
        "train; evaluate, predict or export with the checkpoint in model.weights or resume; "
        "diagnose: find the bottleneck; verify: check that every image can be read.",
    )
    seed: int = setting(0, "Seed for everything random.", ge=0, le=2**32 - 1)
    device: str = setting(
        "auto", "auto (an idle GPU, else cpu), cpu, cuda, cuda:N or mps (untested)."
    )
    resume: str | None = setting(
        None,
        "null: start at epoch 1; auto: resume if this run's folder contains a checkpoint; a run "
        "folder: resume there; a checkpoint: continue from it in a new folder.",
        no_effect_with="mode=diagnose, mode=verify",
    )
    callbacks: tuple[str, ...] = setting(
        (),
        "Your own classes, called at the start and end of training and at each step, window "
        "and epoch, such as [my_callbacks:GradientNoise].",
    )
    run: RunConfig = section(RunConfig)
    data: DataConfig = section(DataConfig)
    augment: AugmentConfig = section(AugmentConfig)
    loader: LoaderConfig = section(LoaderConfig)
    tuner: TunerConfig = section(TunerConfig)
    model: ModelConfig = section(ModelConfig)
    optim: OptimConfig = section(OptimConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    watch: WatchConfig = section(WatchConfig)
    dist: DistConfig = section(DistConfig)
    profile: ProfileConfig = section(ProfileConfig)
    predict: PredictConfig = section(PredictConfig)
    export: ExportConfig = section(ExportConfig)


_NAMELESS = "published weights have no class names; specify a run folder or one of its checkpoints"
# settings that contradict each other, as typed; the message names the first one
_CONTRADICTIONS = {
    "loader.drop_last=false dist=spawn": (
        "batches would differ in size between ranks; set it to true or use dist=single"
    ),
    "loader.drop_last=false dist=torchrun": (
        "batches would differ in size between ranks; set it to true or start one process"
    ),
    "loader.backend=auto tuner=grid": "tuner=grid only tries processes; use tuner=auto",
    "loader.backend=auto loader.autotune=false mode=train": (
        "the tuner chooses it; add loader.autotune=true, or choose processes, threads or arrays"
    ),
    "optim.nesterov=true optim=adamw": (
        "only affects sgd; for AdamW with its own defaults write optim=adamw"
    ),
    "optim.nesterov=true optim.momentum=0.0": "needs a momentum; set optim.momentum=0.9",
    "data=own": "specify the function that opens your data: data.name=my_module:open_splits",
    "mode=diagnose data=fake": "data=fake loads nothing; specify a data set with data=NAME",
    "mode=verify data=fake": "data=fake has no images; specify a data set with data=NAME",
    "mode=evaluate model.weights=null resume=null": (
        "nothing to evaluate; write model.weights=PATH or resume=PATH"
    ),
    "mode=predict model.weights=null resume=null": (
        "no network to predict with; write model.weights=PATH or resume=PATH"
    ),
    "mode=export model.weights=null resume=null": (
        "nothing to export; write model.weights=PATH or resume=PATH"
    ),
    "mode=predict model.weights=DEFAULT resume=null": _NAMELESS,
    "mode=export model.weights=DEFAULT resume=null": _NAMELESS,
    "mode=predict data.root=null": "nothing to predict; write data.root=FOLDER or data.root=FILE",
    "mode=export dist=spawn": "only one process exports; use dist=single",
    "mode=export dist=torchrun": "only one process exports; start it without torchrun",
}


def load(composed: DictConfig) -> Config:
    """Checks the settings that Hydra composed, and returns them.

    Raises:
        ConfigError: a setting is unknown, of the wrong type, out of its range, or contradicts
            another.
    """
    config = typed_settings(composed)
    settings = list(walk(config))
    # as typed: dist= is dist.name=
    held = {f"{path.removesuffix('.name')}={shown(value)}" for path, value, _ in settings}
    for path, value, declared in settings:
        for why in _faults(value, declared, held):
            raise ConfigError(f"{path}={shown(value)}: {why}")
    for text in _contradictions(config, held):
        raise ConfigError(text)
    return config


def _faults(value: Any, declared: Field[Any], held: set[str]) -> Iterator[str]:
    """Yields the reasons why a setting is out of range, or has no effect with the ones ``held``."""
    meta = declared.metadata
    default = declared.default
    numbers = value if isinstance(value, tuple) else (value,)
    # OmegaConf does not check items that are mappings or lists
    if default and isinstance(default, tuple) and [*map(type, numbers)] != [*map(type, default)]:
        yield f"takes exactly {len(default)} numbers"
    pattern, hint = meta.get("pattern", (".*", ""))
    text = value if isinstance(value, str) else shown(value)
    if value is not None and not re.fullmatch(pattern, text, re.S):
        yield f"use {hint}"
    # bool is an int too
    for number in (each for each in numbers if type(each) in (int, float)):
        # also rejects NaN, and an integer that is too large for a float
        if not abs(number) <= 1e300:
            yield "must be a finite number"
        for name, sign in _SIGNS.items():
            if name in meta and not getattr(operator, name)(number, meta[name]):
                yield f"must be {sign} {meta[name]}"
    if meta.get("increasing") and list(numbers) != sorted(numbers):
        yield "the first number may not be larger than the second"
    # a setting without effect is rejected, unless it requests nothing
    if not value or value == default:
        return
    for others in filter(None, meta.get("no_effect_with", "").split(", ")):
        if held.issuperset(others.split()):
            yield f"has no effect with {others}; change that, or set it to {shown(default)}"


def _contradictions(c: Config, held: set[str]) -> Iterator[str]:
    """Yields contradictory settings."""
    for together, reason in _CONTRADICTIONS.items():
        if held.issuperset(together.split()):
            yield f"{together.split()[0]}: {reason}"
    for name, none in (("class_weights", None), ("label_smoothing", 0.0)):
        if ":" in c.optim.loss and (value := getattr(c.optim, name)) != none:
            yield (
                f"optim.{name}={shown(value)}: has no effect with optim.loss={c.optim.loss}; set "
                f"it to {shown(none)}"
            )
    for name, only in (("momentum", "sgd"), ("betas", "adamw"), ("eps", "adamw")):
        value = getattr(c.optim, name)
        if c.optim.name != only and value != getattr(OptimConfig(), name):
            yield (
                f"optim.{name}={shown(value)}: only affects {only}; if optim.name={c.optim.name} "
                f"takes it, write 'optim.args={{{name}:{shown(value)}}}'"
            )
    if c.data.repeats > 1 and c.data.balance > 0:
        yield f"data.repeats={c.data.repeats}: data.balance also repeats images; use one of the two"
    jitter = c.augment.color_jitter
    if jitter[3] > 0.5:
        yield f"augment.color_jitter={shown(jitter)}: the last number is the hue; use at most 0.5"
    if c.optim.class_weights == "balanced" and c.data.balance > 0:
        yield (
            f"optim.class_weights=balanced: data.balance={c.data.balance:g} already corrects "
            "the imbalance; use one of the two, or a list of weights"
        )
    if (c.data.fold or 0) >= c.data.folds:
        yield (
            f"data.fold={c.data.fold}: there are {c.data.folds} folds, counted from 0; raise "
            "data.folds"
        )
    if c.schedule.warmup_epochs > c.trainer.epochs:
        yield (
            f"schedule.warmup_epochs={c.schedule.warmup_epochs}: longer than "
            f"trainer.epochs={c.trainer.epochs}; lower it"
        )
    if (c.data.eval_resize or c.data.image_size) < c.data.image_size:
        yield (
            f"data.eval_resize={c.data.eval_resize}: smaller than "
            f"data.image_size={c.data.image_size}; raise it or set it to null"
        )
    starts = c.data.train_size_epochs or (0,)
    if starts[0] or len(starts) != len(train_sizes(c.data)):
        yield (
            f"data.train_size_epochs={shown(c.data.train_size_epochs)}: specify one epoch for each "
            "side length in data.train_size, starting with 0"
        )
    steps = [*map(int, (c.profile.steps or "1-1").split("-"))]
    if steps != sorted(steps):
        yield (
            f"profile.steps={c.profile.steps}: write the first step before the last, such as 10-20"
        )


class Interpolated(str):
    """A setting's value that was ``written`` as an interpolation, such as ``${oc.env:TOKEN}/x``."""

    written: str


def typed_settings(composed: DictConfig) -> Config:
    """Returns ``composed`` with the schema's types, without any other checks."""
    try:
        # without Hydra's own part; resolving finds every missing environment variable
        ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        plain = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
        # merged again, because composing accepts unknown keys that were added with a plus
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except (OmegaConfBaseException, OverflowError) as error:
        raise ConfigError(suggestions.explain(error)) from error
    assert isinstance(config, Config)
    # without the schema's defaults, alone or within a group that is interpolated
    written = dict(leaves(OmegaConf.to_container(ours)))
    for path, value, _ in list(walk(config)):
        place, _, name = path.rpartition(".")
        group = operator.attrgetter(place)(config) if place else config
        if isinstance(value, list):
            # OmegaConf makes lists of tuples
            value = tuple(value)
        elif isinstance(value, str) and "${" in str(written.get(path)):
            value = Interpolated(value)
            value.written = written[path]
        setattr(group, name, value)
    return config


def to_plain(config: Config) -> dict[str, Any]:
    """Returns ``config`` as nested dictionaries of plain values, enums by name.

    Interpolations such as ``${...}`` stay as written, because their values may be secrets.
    """
    tree = OmegaConf.structured(config)
    for path, value, _ in walk(config):
        if isinstance(value, Interpolated):
            OmegaConf.update(tree, path, value.written)
    return OmegaConf.to_container(tree, enum_to_str=True)  # type: ignore[return-value]


def from_plain(plain: dict[str, Any]) -> Config:
    """Returns the settings from which ``to_plain`` made ``plain``."""
    return load(OmegaConf.create(plain))


def saved(text: bytes) -> dict[str, Any]:
    """Returns the settings in a run's ``.hydra/config.yaml``, nested and unchecked.

    Raises:
        ConfigError: it is not YAML, or has aliases, which may stand for any number of values.
    """
    try:
        # a file that is nested too deeply fails here, long before its last event
        yaml.compose(text.decode(), yaml.SafeLoader)
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError("contains aliases, which Hydra does not write")
        plain: Any = OmegaConf.to_container(OmegaConf.create(text.decode()))
    # YAML's errors, which have no built-in base class but Exception, and OmegaConf's
    except Exception as error:
        raise ConfigError(suggestions.explain(error) or str(error)) from error
    # a list, in a file that is not ours
    return plain if isinstance(plain, dict) else {}


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yields every leaf in a tree of settings: its dotted name, value and declaration."""
    for declared in dataclasses.fields(config):
        path = f"{prefix}{declared.name}"
        value = getattr(config, declared.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{path}.")
        else:
            yield path, value, declared


suggestions.SETTINGS += [path for path, _, _ in walk(Config())]
# settings whose values are mappings
MAPPINGS = {path for path, value, _ in walk(Config()) if isinstance(value, dict)}


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf in nested dictionaries: its dotted name and value."""
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in MAPPINGS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def adopted(
    config: Config,
    theirs: Mapping[str, Any],
    kept: Collection[str],
    source: str,
    tell: Callable[[str], None],
) -> Config:
    """Returns ``config`` with the values in ``theirs``, by path, except for the paths ``kept``.

    ``tell`` reports every difference, along with the ``source`` of the values.
    """
    tree = OmegaConf.create(to_plain(config))
    taken = []
    for path, ours, _ in walk(config):
        value = theirs.get(path, ours)
        text = shown(value)
        if text == shown(ours):
            continue
        if path in kept:
            tell(f"{source}: {path} {text}, now {shown(ours)}")
            continue
        written = value.written if isinstance(value, Interpolated) else value
        OmegaConf.update(tree, path, written, merge=False)
        taken.append(f"{path}={text}")
    if taken:
        tell(f"from {source}: {' '.join(taken)}")
    return load(tree)


def train_sizes(data: DataConfig) -> tuple[int, ...]:
    """Returns the side lengths of training images in pixels, in epoch order."""
    sides = data.train_size or data.image_size
    return sides if isinstance(sides, tuple) else (sides,)


def train_size(data: DataConfig, epoch: int) -> int:
    """Returns the side length in pixels of training images in ``epoch``, counted from 0."""
    return train_sizes(data)[bisect(data.train_size_epochs or (0,), epoch) - 1]


def named_backend(config: Config) -> BackendName | None:
    """Returns the requested backend: the named one, or processes with ``tuner=grid``."""
    loader = config.loader
    if loader.backend not in (None, BackendName.auto):
        return loader.backend
    searched = loader.autotune and config.tuner.name is TunerName.grid
    return BackendName.processes if searched else None


def shown(value: Any) -> str:
    """Returns a setting's value as it is written on the command line."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, Enum):
        return value.name
    if value is None:
        return "null"
    if isinstance(value, Interpolated):
        return value.written
    # true and false in YAML's way
    return str(value).lower() if isinstance(value, bool) else str(value)


def installed(package: str, wish: str) -> Path:
    """Returns the first file of an extra's package, without importing the package.

    Raises:
        ConfigError: it is not installed, and ``wish`` needs it.
    """
    found = importlib.util.find_spec(package)
    # a folder with that name is not a package
    if found is None or found.origin is None:
        raise ConfigError(
            f'{wish} needs {package}: pip install -e ".[{package}]" or uv sync --extra {package}'
        )
    return Path(found.origin)


def classifiers(package: str = "torchvision") -> list[str]:
    """Returns the names of torchvision's classifiers, or timm's, read from its source.

    Importing the package would import torch.

    Raises:
        ConfigError: timm is not installed.
    """
    init = installed(package, f"model.name={TIMM}NAME")
    builder = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.M)
    files = init.with_name("models").glob("*.py")
    start = TIMM if package == "timm" else ""
    return sorted(
        start + name for file in files for name in builder.findall(file.read_text(encoding="utf-8"))
    )


def check_model(model: ModelConfig) -> None:
    """Rejects unknown networks, and networks without the requested weights; does not import torch.

    Raises:
        ConfigError: the network or its weights do not exist.
    """
    is_own = ":" in model.name
    name = model.name
    # no names if a package has another layout; building the network then rejects unknown ones
    if name.startswith(TIMM):
        # the name of the weights follows a dot
        name = name.partition(".")[0]
        known = classifiers("timm") or [name]
    else:
        known = [*OURS, *(classifiers() or [name])]
    if not is_own and name not in known:
        own = "; specify your own network as module:function"
        hint = suggestions.nearest(model.name, known) or own
        raise ConfigError(f"model.name={model.name}: unknown{hint}")
    if (is_own or name in OURS) and model.weights == "DEFAULT":
        raise ConfigError(
            f"model.weights=DEFAULT: no weights for model.name={model.name}; use null or a path"
        )


def check_names(config: Config) -> None:
    """Rejects networks and data sets that do not exist, without importing torch.

    Raises:
        ConfigError: a name does not exist; the error lists the nearest names.
    """
    check_model(config.model)
    name = config.data.name
    # data=own only asks the user to specify a function
    sets = [known for known in choices("data") if known != "own"]
    if ":" not in name and name not in sets:
        raise ConfigError(
            f"data.name={name}: no such data set; choose from {', '.join(sets)}"
            f"{suggestions.nearest(name, sets)}"
        )


def choices(group_name: str) -> list[str]:
    """Returns the names that ``GROUP=`` accepts."""
    return sorted(file.stem for file in (CONF / group_name).glob("*.yaml"))
