"""Checks that a checkpoint can be used: its digest says only that nobody changed it."""

from __future__ import annotations

from typing import Any

from harness.runtime.errors import CheckpointError, printable
from harness.runtime.files import typed
from harness.runtime.seeding import random_state, restore_random_state
from harness.training.checkpoint import is_plain, weights_of

# what a run goes on with
_NEEDED = {"model", "optimizer", "schedule", "scaler", "epoch", "step", "random", "settings"}
# where a run stands within an epoch; checkpoints of schema 1 have none of these
_POSITION = {
    "samples": int,
    "length": int,
    "ranks": int,
    "stop": int,
    "steps_per_epoch": int,
    "pending": bool,
    "best_top1": float | None,
}
_COUNTS = _POSITION | {"epoch": int, "step": int}


def check(saved: dict[str, Any], where: str, state: Any = None) -> None:
    """Refuses contents that no run saves, before any of them is used.

    Args:
        saved: what a file holds.
        where: names the file.
        state: the ``TrainState`` that is to take over all of them, and stays as it is; None: the
            network alone is used.

    Raises:
        CheckpointError: names the part. What another network or optimizer has saved passes.
    """
    needed = set[str]()
    if not saved.keys().isdisjoint(_POSITION):
        needed |= _POSITION.keys()
    if state is not None:
        needed |= _NEEDED
    if missing := needed - saved.keys():
        raise CheckpointError(
            f"{where}: holds no {', '.join(sorted(missing))}; resume from another checkpoint"
        )
    if state is not None:
        weights_of({"model": saved["model"]}, where)
    for key, value in saved.items():
        try:
            if key in _COUNTS:
                number = typed(_COUNTS[key], value)
                if not number and key in ("ranks", "stop", "steps_per_epoch"):
                    raise ValueError("is 0")
            elif key == "classes":
                list(map(str.isascii, list.copy(value)))
            elif state is not None:
                _check_part(key, value, state)
        # odd contents may raise anything
        except Exception as error:
            why = printable(f"{type(error).__name__}: {error}"[:200])
            raise CheckpointError(
                f"{where}: its part {key} cannot be used ({why}); resume from another checkpoint"
            ) from error


def _check_part(key: str, value: Any, state: Any) -> None:
    """Raises any error if ``state``, which stays as it is, cannot take over a part."""
    if key == "schedule":
        typed(int, value["last_epoch"])
    elif key == "scaler":
        for name in state.scaler.state_dict():
            typed(float, value[name])
    elif key == "settings":
        typed(str, value["trainer"]["precision"])
    elif key == "random":
        # numpy takes any position, and reads beyond its numbers
        if not 0 <= value["numpy"]["position"] <= len(value["numpy"]["keys"]):
            raise ValueError("odd position")
        former = random_state(state.device)
        try:
            restore_random_state(value, state.device)
        finally:
            restore_random_state(former, state.device)
    elif key == "optimizer":
        own = [item for group in state.optimizer.param_groups for item in group["params"]]
        numbers = [number for group in value["param_groups"] for number in group["params"]]
        if numbers != list(range(len(numbers))) or value["state"].keys() - numbers:
            raise ValueError("odd parameters")
        # other parameters belong to another network, which loading refuses by name
        if len(numbers) != len(own):
            return
        for number, held in value["state"].items():
            for name in held.keys() | next(iter(value["state"].values())).keys():
                tensor = held[name]
                fits = is_plain(tensor) and tensor.is_floating_point()
                if not fits or tensor.shape not in (own[number].shape, ()):
                    raise ValueError(f"{name} of parameter {number} does not fit")
