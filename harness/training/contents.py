"""Whether what a checkpoint holds can be used: its digest says only that nobody has changed it
since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import typed
from harness.runtime.seeding import random_state, restore_random_state
from harness.training.checkpoint import is_plain, weights_of


def check(saved: dict[str, Any], where: str, state: Any = None) -> None:
    """Refuse contents that no run saves, before any of them is used.

    Args:
        saved: what a file holds.
        where: names the file.
        state: the ``TrainState`` that is to take over all of them, and stays as it is; None: the
            network alone is used.

    Raises:
        CheckpointError: names the part. What another network or optimizer has saved passes.
    """
    begun = saved.keys() & _POSITION.keys()
    if begun and (missing := _POSITION.keys() - begun):
        raise CheckpointError(
            f"{where}: holds no {', '.join(sorted(missing))}; resume from another checkpoint"
        )
    if state is not None:
        weights_of({"model": saved["model"]}, where)
    for key in saved.keys() & (_COUNTS if state is None else _PARTS).keys():
        try:
            _PARTS[key](saved[key], state)
        # Odd contents may raise anything.
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}"[:200])
            raise CheckpointError(
                f"{where}: its part {key} cannot be used ({why}); resume from another checkpoint"
            ) from error


def _optimizer(saved: Any, state: Any) -> None:
    parameters = [
        parameter for group in state.optimizer.param_groups for parameter in group["params"]
    ]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if numbers != list(range(len(numbers))) or saved["state"].keys() - numbers:
        raise ValueError("odd parameters")
    # With other parameters the network or the groups differ, which the state tells by itself.
    for number, kept in saved["state"].items() if len(numbers) == len(parameters) else ():
        for key in kept.keys() | next(iter(saved["state"].values())).keys():
            value = kept[key]
            if not (
                is_plain(value)
                and value.is_floating_point()
                and value.shape in (parameters[number].shape, ())
            ):
                raise ValueError(f"{key} of parameter {number} does not fit")


def _random(saved: Any, state: Any) -> None:
    # numpy takes any position, and reads beyond its numbers.
    if not 0 <= saved["numpy"]["position"] <= len(saved["numpy"]["keys"]):
        raise ValueError("odd position")
    former = random_state(state.device)
    try:
        restore_random_state(saved, state.device)
    finally:
        restore_random_state(former, state.device)


def _numbers(saved: Any, own: Any) -> None:
    """Raise where ``saved`` has not what ``own`` has; names with ``_`` come and go with torch's
    versions.
    """
    if isinstance(own, dict):
        for key in own:
            if key in saved or not key.startswith("_"):
                _numbers(saved[key], own[key])
    elif isinstance(own, list):
        for pair in zip(saved, own, strict=True):
            _numbers(*pair)
    elif own is not None:
        typed(type(own), saved)


# Where a run stands within an epoch; checkpoints of schema 1 have none of these.
_POSITION: dict[str, Callable[[Any, Any], object]] = {
    **{key: lambda saved, state: typed(int, saved) for key in ("samples", "length")},
    **{
        key: lambda saved, state: 1 // typed(int, saved)
        for key in ("ranks", "stop", "steps_per_epoch")
    },
    "pending": lambda saved, state: typed(bool, saved),
    "best_top1": lambda saved, state: typed(float | None, saved),
}
_COUNTS = _POSITION | {
    "epoch": lambda saved, state: typed(int, saved),
    "step": lambda saved, state: typed(int, saved),
    "classes": lambda saved, state: [*map(str.isascii, list.copy(saved))],
}
_PARTS = _COUNTS | {
    "optimizer": _optimizer,
    "schedule": lambda saved, state: _numbers(saved, state.schedule.state_dict()),
    "scaler": lambda saved, state: _numbers(saved, state.scaler.state_dict()),
    "settings": lambda saved, state: typed(str, saved["trainer"]["precision"]),
    "random": _random,
}
