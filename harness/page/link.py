"""TensorBoard's address with the cards on which a stall is seen pinned on top."""

from __future__ import annotations

import json
from urllib.parse import quote

PINNED = (
    "stall/data_fraction",
    "time/starved_ms/median",
    "time/step_ms/max",
    "speed/images_per_s",
    "gpu/utilization",
    "host/cpu_fraction",
)


def pinned_link(port: int = 6006) -> str:
    """Returns the address of a TensorBoard on this machine, with cards pinned, nothing smoothed.

    A card whose figure a run has not is not shown.
    """
    cards = json.dumps([{"plugin": "scalars", "tag": tag} for tag in PINNED], separators=(",", ":"))
    return f"http://localhost:{port}/?pinnedCards={quote(cards, safe='')}&smoothing=0#timeseries"
