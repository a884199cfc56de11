"""The kinds of bottleneck: their names in files, and in words."""

from __future__ import annotations

from typing import Literal

from harness.watch.supply import Supply

Bottleneck = Literal[
    "storage", "decode", "augment", "collate", "transport", "copy", "workers", "compute", "launch", "quota", "memory", "host",
    "neighbours", "rank", "balanced", "unknown",
]  # fmt: skip

HARM = 0.10  # of the time: MLPerf Storage asks for an accelerator utilisation of 0.90
FED = 0.02  # what a stall below this would give back cannot be told from noise
_NEEDS_CORES = {
    "decode",
    "augment",
    "collate",
    "workers",
    "transport",
    "host",
    "launch",
    "quota",
    "compute",
    "balanced",
}
_MOSTLY = 0.75  # of the time: a network that takes more is named first
_CLASS: dict[Bottleneck, str] = {
    "storage": "Storage-bound",
    "decode": "Decode-bound",
    "augment": "Augmentation-bound",
    "collate": "Collate-bound",
    "transport": "Transport-bound",
    "copy": "Copy-bound",
    "workers": "Too few workers",
    "compute": "Compute-bound",
    "launch": "Launch-bound",
    "quota": "Held back by the processor quota",
    "memory": "Short of memory",
    "host": "Held up by Python",
    "neighbours": "Held back by other programs",
    "rank": "One rank is slow",
    "balanced": "Balanced",
    "unknown": "Unknown",
}
# what makes loading cheaper
CHEAPER: dict[Bottleneck, str] = {
    "storage": "put the files on a faster disk, or keep them in memory",
    "decode": "store smaller files (shorter side 1.15 to 2 times the crop), or add cores",
    "augment": "make the augmentation cheaper, or add cores",
    "collate": "make images or batches smaller, or add cores",
    "transport": "make images or batches smaller",
}
# what comes second where the network takes most of the time
_SECOND: dict[Bottleneck, str] = {
    "storage": "storage",
    "decode": "decoding",
    "augment": "augmentation",
    "collate": "putting batches together",
    "transport": "handing batches over",
    "copy": "copies",
    "workers": "waiting for workers",
    "launch": "launching",
    "host": "Python",
}


def headline(bottleneck: Bottleneck, compute: float | None, lost: float) -> str:
    """Returns the class as a sentence of a few words.

    Args:
        bottleneck: the class.
        compute: the share of the time that the network takes, 0..1; None: not known.
        lost: the share of the time that the bottleneck costs, 0..1.
    """
    mostly = compute is not None and compute >= _MOSTLY and lost >= HARM
    if mostly and bottleneck in _SECOND:
        return f"Mostly compute ({compute:.0%}), then {_SECOND[bottleneck]}."
    return f"{_CLASS[bottleneck]}."


def lacks_cores(bottleneck: Bottleneck, supply: Supply | None, on_cpu: bool, lost: float) -> bool:
    """Whether more processors would help against ``bottleneck``, which costs the share ``lost`` of
    the time.
    """
    reads = bottleneck == "storage" and supply is not None and not supply.waits
    return (reads or bottleneck in _NEEDS_CORES) and harmful(on_cpu, lost)


def harmful(on_cpu: bool, lost: float) -> bool:
    """Whether what slows this machine's processors down can slow the steps down: an accelerator
    that is busy is not harmed.
    """
    return on_cpu or lost >= HARM
