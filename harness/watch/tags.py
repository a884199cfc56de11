"""The names under which figures are logged, in TensorBoard and in ``metrics.jsonl`` alike."""

from __future__ import annotations

from enum import StrEnum


class Tag(StrEnum):
    """Every figure that a run may log; a device that cannot give one leaves it out."""

    LOSS = "train/loss"
    LR = "train/lr"
    VAL_TOP1 = "val/top1"
    VAL_TOP5 = "val/top5"
    VAL_LOSS = "val/loss"
    IMAGES_PER_S = "speed/images_per_s"
    STEP_MS = "time/step_ms"
    DATA_WAIT_MS = "time/data_wait_ms"
    COPY_MS = "time/copy_ms"
    COMPUTE_MS = "time/compute_ms"
    STALL_FRACTION = "stall/data_fraction"
    DATA_WAIT_FRACTION = "stall/data_wait_fraction"
    GPU_UTILIZATION = "gpu/utilization"
    GPU_MEMORY_USED_BYTES = "gpu/memory_used_bytes"
    GPU_POWER_W = "gpu/power_w"
    CPU_FRACTION = "host/cpu_fraction"
    RAM_USED_BYTES = "host/ram_used_bytes"
    DISK_READ_BYTES_PER_S = "host/disk_read_bytes_per_s"
