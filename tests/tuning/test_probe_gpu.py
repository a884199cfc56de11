"""Tuning's measurements that need a CUDA device."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.feed.base import HostBatch
from harness.runtime import accelerator
from harness.runtime.seeding import random_state
from harness.tuning.lab import LoaderBenchmark
from harness.tuning.snapshot import Snapshot


def copies_s() -> tuple[float, float]:
    """Returns the seconds to copy a large batch from pageable and from pinned memory."""
    images = torch.zeros(128, 3, 224, 224, dtype=torch.uint8)
    labels = torch.zeros(128, dtype=torch.int64)
    lab: Any = SimpleNamespace(
        trainee=SimpleNamespace(device=torch.device("cuda", 0)),
        batch=HostBatch(images, labels, labels),
    )
    seconds = LoaderBenchmark.copies_s(lab)
    assert seconds is not None
    return seconds


@pytest.mark.cuda_order
def test_copies_are_timed() -> None:
    """Copies from either memory take time."""
    assert min(copies_s()) > 0


@pytest.mark.cuda_values
def test_pinned_memory_is_not_slower() -> None:
    """A batch comes no sooner from pageable memory."""
    pageable_s, pinned_s = copies_s()
    assert pinned_s <= 1.2 * pageable_s


@pytest.mark.cuda_order
def test_waiting_for_the_device_costs_no_processor_time() -> None:
    """The host sleeps while the device works."""
    device = torch.device("cuda", torch.cuda.current_device())
    accelerator.get(device).synchronize()
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    torch.cuda._sleep(500_000_000)
    accelerator.get(device).synchronize()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert wall_s > 0.05
    assert cpu_s < 0.5 * wall_s


@pytest.mark.cuda_order
def test_a_snapshot_is_the_hosts_and_goes_back_in_place() -> None:
    """Weights on the device are as before, at the same address, without a copy there; its random
    state too.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    network = torch.nn.Linear(1000, 1000).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    # on the host: kernels that compare may compute nothing
    before = network.weight.detach().cpu()
    address = network.weight.data_ptr()
    state = random_state(device)["cuda"]
    used = torch.cuda.memory_allocated(device)
    snapshot = Snapshot((network, optimizer), device)
    assert torch.cuda.memory_allocated(device) == used
    network(torch.rand(8, 1000, device=device)).sum().backward()
    optimizer.step()
    snapshot.restore()
    assert torch.equal(network.weight.cpu(), before) and network.weight.data_ptr() == address
    assert not optimizer.state and network.weight.grad is None
    assert torch.equal(random_state(device)["cuda"], state)
