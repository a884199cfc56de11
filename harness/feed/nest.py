"""Maps over the tensors in a nested batch; other parts are kept."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

# a shortcut for the many strings and numbers in a batch
_PLAIN = {str, int, float, bool, bytes, type(None)}


def changed(part: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns ``part`` with each tensor replaced by the result of ``change``, in order.

    Dictionaries, lists, tuples, named tuples and dataclasses are rebuilt with the same type; any
    other object is kept.
    """
    if type(part) in _PLAIN:
        return part
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, Mapping):
        made: Any = copy.copy(part)
        for key, value in part.items():
            made[key] = changed(value, change)
        return made
    if isinstance(part, tuple | list):
        parts = [changed(each, change) for each in part]
        return type(part)(*parts) if hasattr(part, "_fields") else type(part)(parts)
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        made = copy.copy(part)
        for field in dataclasses.fields(part):
            # also works for a frozen dataclass
            object.__setattr__(made, field.name, changed(getattr(part, field.name), change))
        return made
    return part
