"""The names under which figures are logged, in TensorBoard and in ``metrics.jsonl`` alike."""

from __future__ import annotations

from enum import StrEnum


class Tag(StrEnum):
    """Every figure that a run may log; a device that cannot give one leaves it out."""

    __hash__ = str.__hash__  # an enum's own is a function of Python's

    LOSS = "train/loss"
    LR = "train/lr"
    VAL_TOP1 = "val/top1"
    VAL_TOP5 = "val/top5"
    VAL_LOSS = "val/loss"
    VAL_MEMORY_PEAK_BYTES = "val/memory_peak_allocated_bytes"
    IMAGES_PER_S = "speed/images_per_s"
    STEP_MS = "time/step_ms"
    DATA_WAIT_MS = "time/data_wait_ms"
    COPY_MS = "time/copy_ms"
    COMPUTE_MS = "time/compute_ms"
    GAP_MS = "time/gap_ms"
    EXPOSED_COPY_MS = "time/exposed_copy_ms"
    PREPARE_MS = "time/prepare_ms"
    STARVED_MS = "time/starved_ms"
    HOST_MS = "time/host_ms"
    LAUNCH_MS = "time/launch_ms"
    STALL_FRACTION = "stall/data_fraction"
    DEVICE_FULL_FRACTION = "time/device_full_fraction"
    DATA_WAIT_FRACTION = "stall/data_wait_fraction"
    GPU_UTILIZATION = "gpu/utilization"
    GPU_SM_UTILIZATION = "gpu/sm_utilization"
    GPU_OTHERS_UTILIZATION = "gpu/others_utilization"
    GPU_MEMORY_USED_BYTES = "gpu/memory_used_bytes"
    GPU_MEMORY_PEAK_ALLOCATED_BYTES = "gpu/memory_peak_allocated_bytes"
    GPU_MEMORY_PEAK_RESERVED_BYTES = "gpu/memory_peak_reserved_bytes"
    GPU_POWER_W = "gpu/power_w"
    CPU_FRACTION = "host/cpu_fraction"
    MACHINE_CPU_CORES = "host/machine_cpu_cores"
    RAM_USED_BYTES = "host/ram_used_bytes"
    DISK_READ_BYTES_PER_S = "host/disk_read_bytes_per_s"
    CPU_CORES = "host/own_cpu_cores"
    OTHERS_CPU_CORES = "host/others_cpu_cores"
    QUEUED_THREADS = "host/own_queued_threads"
    THROTTLED_FRACTION = "host/throttled_fraction"
    MEMORY_STALL_FRACTION = "host/memory_stall_fraction"
    READ_BYTES_PER_S = "host/own_read_bytes_per_s"
    STORAGE_BYTES_PER_S = "host/own_storage_bytes_per_s"
    MAJOR_FAULTS_PER_S = "host/major_faults_per_s"
    NUM_WORKERS = "loader/num_workers"
    BUSY_FRACTION = "stages/busy_fraction"
