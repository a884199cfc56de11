"""The kinds of bottleneck: their names in files, and in words."""

from __future__ import annotations

from typing import Literal

Bottleneck = Literal[
    "storage", "decode", "augment", "collate", "transport", "copy", "workers", "compute", "launch",
    "quota", "memory", "host", "neighbours", "rank", "balanced", "unknown",
]  # fmt: skip

# of the time: MLPerf Storage asks for an accelerator utilisation of 0.90
HARM = 0.10


HEADLINE: dict[Bottleneck, str] = {
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
# what comes second where the network takes most of the time
SECOND: dict[Bottleneck, str] = {
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
# what keeps workers busy, and what makes that cheaper
WORK: dict[Bottleneck, tuple[str, str]] = {
    "storage": ("reading", "put the files on a faster disk, or keep them in memory"),
    "decode": (
        "decoding",
        "store smaller files (shorter side 1.15 to 2 times the crop), or add cores",
    ),
    "augment": ("augmentation", "make the augmentation cheaper, or add cores"),
    "collate": ("putting batches together", "make images or batches smaller, or add cores"),
    "transport": ("getting memory that processes share", "make images or batches smaller"),
}
