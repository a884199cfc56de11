"""The link that opens TensorBoard with the stall cards pinned."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

from harness.page.link import PINNED, pinned_link
from harness.watch.figures import FIGURES


def test_the_link_names_the_cards() -> None:
    """Its query is TensorBoard's own: JSON of plugin and tag, nothing smoothed."""
    address = urlsplit(pinned_link(6007))
    query = parse_qs(address.query)
    assert (address.netloc, address.fragment, query["smoothing"]) == (
        "localhost:6007",
        "timeseries",
        ["0"],
    )
    assert json.loads(query["pinnedCards"][0]) == [
        {"plugin": "scalars", "tag": tag} for tag in PINNED
    ]


def test_every_card_is_a_tag_that_runs_log() -> None:
    """A pinned card of a tag that nobody writes would never show."""
    tags = {figure.tag for figure in FIGURES}
    assert {tag.removesuffix("/median").removesuffix("/max") for tag in PINNED} <= tags
