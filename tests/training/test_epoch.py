"""What the bar and the line of an epoch say."""

from __future__ import annotations

from harness.training.epoch import Shown
from harness.watch.ledger import Ledger


def test_an_epoch_is_the_mean_of_its_windows() -> None:
    """Loss by steps, speed of all ranks, stall by time, and the last learning rate."""
    shown = Shown()
    shown.add(
        10, 1.0, 0.1, Ledger(steps=10, images=640, elapsed_s=2.0, wait_s=1.0).window(), ranks=2
    )
    shown.add(
        30, 2.0, 0.05, Ledger(steps=30, images=1920, elapsed_s=2.0, wait_s=0.0).window(), ranks=2
    )
    assert str(shown) == "loss 1.750, 1280 images/s, stall 25%, lr 0.05"


def test_what_is_not_known_is_left_out() -> None:
    """Where no loss was finite and no step has ended, only the rate is said."""
    shown = Shown()
    shown.add(10, None, 3e-4, None, ranks=1)
    assert str(shown) == "lr 0.0003"
