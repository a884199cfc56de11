"""Run folders as the page may find them."""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

# the window's last step: ms of its longest step
SPIKES = {3_330: 900.0, 9_990: 400.0, 10_500: 2_600.0, 19_870: 650.0}
STAGES = (
    ("read", "storage", 0.9, 0.12),
    ("decode", "decode", 5.4, 5.3),
    ("crop", "augment", 0.4, 0.4),
    ("collate", "collate", 0.2, 0.2),
)


def spread(
    median: float, p95: float | None = None, longest: float | None = None
) -> dict[str, float]:
    """A figure of a report."""
    return {"median": median, "p95": p95 or 1.2 * median, "max": longest or 1.5 * median}


def window(
    step: int, parts: dict[str, float], longest_ms: float | None = None, **figures: float | None
) -> dict[str, Any]:
    """Returns a line of ``metrics.jsonl`` with steps of ``parts`` in ms.

    One starved step lasts ``longest_ms``.
    """
    step_ms = sum(parts.values())
    line: dict[str, Any] = {
        "step": step,
        "epoch": 1 + step // 5_001,
        "time_s": step * step_ms / 1e3,
        "train/loss": 1.0,
    }
    for name, ms in {**parts, "step": step_ms}.items():
        spread_of = spread(
            ms, longest=longest_ms if longest_ms and name in ("step", "starved") else None
        )
        line |= {f"time/{name}_ms/{of}": value for of, value in spread_of.items()}
    stalled = (parts.get("starved", 0.0) + parts.get("exposed_copy", 0.0)) / step_ms
    return line | {"stall/data_fraction": stalled, "speed/images_per_s": 256e3 / step_ms} | figures


def parts_of(starved: float, noise: random.Random, *, device: bool) -> dict[str, float]:
    """A step of about 100 ms of which a share is ``starved``."""
    wobble = noise.gauss(1.0, 0.03)
    copy = {"exposed_copy": 1.6 * wobble} if device else {}
    return {
        "compute": 96 * (1 - starved),
        "starved": max(0.1, 96 * starved * wobble),
        **copy,
        "host": 2.4 * wobble,
    }


GPU_MEMORY = {
    "total_bytes": 80e9, "reserved_bytes": 24e9, "training_bytes": 21.3e9,
    "evaluation_bytes": 9.8e9,
}  # fmt: skip
REST_S = {
    "start": 9.0, "tuning": 7.5, "starved": 28.0, "host": 1.5, "evaluate": 5.5, "checkpoint": 2.5,
}  # fmt: skip
VERDICT = {
    "bottleneck": "decode",
    "ceiling": 1.64,
    "next_step": "loader.num_workers=8",
    "sentence": "The GPU waited for data in 38% of the time: decoding takes 5.4 ms of "
    "processor time a sample, and 4 workers cannot make 4,100 images/s with it.",
    "evidence": [
        "workers were busy in 97% of the time",
        "decode is 78% of a sample's 6.9 ms",
        "next suspects: storage (0.8 ms of waiting a sample), transport (8% of the wait)",
    ],
}


def goodput(fraction: float, **rest_s: float) -> dict[str, Any]:
    """Of a run of 100 s."""
    rest = [{"name": name, "s": seconds} for name, seconds in rest_s.items()]
    return {"fraction": fraction, "busy_s": 100 * fraction, "wall_s": 100.0, "rest": rest}


def loader(batch_size: int, num_workers: int, pin_memory: bool) -> dict[str, Any]:
    """What a run's loader used."""
    return {
        "batch_size": batch_size, "num_workers": num_workers, "pin_memory": pin_memory,
        "prefetch_factor": 2, "backend": "processes",
    }  # fmt: skip


def report(
    *, starved: float = 0.38, device: bool = True, steps: int = 400, **changes: Any
) -> dict[str, Any]:
    """A finished run's ``report.json``; a change of None takes a figure out."""
    parts = parts_of(starved, random.Random(0), device=device)
    whole = sum(parts.values())
    found: dict[str, Any] = {
        "status": "completed",
        "epochs": 4,
        "steps": steps,
        "world_size": 1,
        "global_batch_size": 256,
        "images_per_s": 256e3 / whole,
        "step_ms": spread(whole, longest=2_600.0),
        "data_wait_ms": spread(parts["starved"] + 3),
        **{f"{name}_ms": spread(ms) for name, ms in parts.items()},
        "shares": {name: ms / whole for name, ms in parts.items()},
        "wait_parts": {"make": 0.86, "transport": 0.08, "pin": 0.04, "move": 0.02},
        "host_parts_s": {"gc": 0.31, "logging": 0.84},
        "stall_fraction": (parts["starved"] + parts.get("exposed_copy", 0)) / whole,
        "stall_basis": "device" if device else "host",
        "gpu_utilization": 0.61 if device else None,
        "gpu_memory": GPU_MEMORY if device else None,
        "stages": [
            {"name": name, "group": group, "wall_ms": wall, "cpu_ms": cpu}
            for name, group, wall, cpu in STAGES
        ],
        "workers": {"samples": 256 * steps, "busy_fraction": 0.97},
        "goodput": goodput(0.46, **REST_S),
        "loader": loader(256, 4, device),
        "verdict": VERDICT,
        "environment": {
            "python": "3.11.7",
            "torch": "2.15.0",
            "device": "NVIDIA H100" if device else "cpu",
            "ram_bytes": 64e9,
        },
        "run": {"overrides": ["data=imagefolder", "loader.num_workers=4"], "name": "run"},
        "top1": 0.764,
        "loss": 1.02,
        "val_images": 50_000,
    }
    found |= changes
    return copy.deepcopy({key: value for key, value in found.items() if value is not None})


def tuning() -> dict[str, Any]:
    """A ``tuning.json``: rising supply, one setting refused, the choice confirmed in steps."""
    settings = [
        {
            "num_workers": n, "prefetch_factor": 2 if n else None, "pin_memory": True,
            "backend": "processes",
        }
        for n in range(13)
    ]  # fmt: skip
    rates = {0: 160, 1: 190, 2: 380, 4: 740, 6: 1080, 8: 1390, 10: 1420}
    measured = [
        (n, "supply", {"images_per_s": r, "low": 0.93 * r, "high": 1.07 * r}, None)
        for n, r in rates.items()
    ]
    measured.append((8, "steps", {"images_per_s": 1290, "low": 1265, "high": None}, None))
    measured.append((12, "supply", None, "worker 11 exited: /dev/shm is full"))
    trials = [
        {"settings": settings[n], "kind": kind, "rate": rate, "refused": refused}
        for n, kind, rate, refused in measured
    ]
    return {
        "search": "auto", "settings": settings[8],
        "sentence": "Training gets 1,290 images/s instead of 190.",
        "demand": {"images_per_s": 1310, "low": 1290, "high": 1330}, "trials": trials,
        "seconds": 7.5, "reused": False,
    }  # fmt: skip


def write(
    folder: Path, *, report: Any = None, lines: Sequence[Any] = (), tuning: Any = None
) -> Path:
    """Write a run folder; what is None or empty is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("report.json", report), ("tuning.json", tuning)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    if lines:
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def long_run(folder: Path, steps: int = 20_000) -> Path:
    """Writes a run on a GPU with 2,000 windows and ``SPIKES``, four far longer steps."""
    noise = random.Random(1)
    lines = []
    for step in range(10, steps + 1, 10):
        starved = 0.3 + 0.1 * math.sin(step / 1_500)
        sampled = {
            "gpu/utilization": 0.65 + noise.gauss(0, 0.05),
            "host/own_cpu_cores": 4 + noise.gauss(0, 0.2),
            "stages/busy_fraction": 0.95 + noise.gauss(0, 0.01),
            "host/throttled_fraction": 0.02,
            "host/own_read_bytes_per_s": 210e6,
            "host/own_storage_bytes_per_s": 180e6 * max(0.0, 1 - step / 8_000),
        }  # fmt: skip
        lines.append(
            window(
                step,
                parts_of(starved, noise, device=True),
                SPIKES.get(step),
                **(sampled if step % 30 == 0 else {}),
            )
        )
    ranks = [
        {"rank": rank, "step_ms": 100.0 + rank, "stalled_ms": 30.0, "forward_ms": 20.0}
        for rank in range(2)
    ]
    return write(
        folder, report=report(steps=steps, world_size=2, ranks=ranks), lines=lines, tuning=tuning()
    )


def cpu_run(folder: Path, steps: int = 400, **changes: Any) -> Path:
    """A run whose figures come from the host's clock: no GPU, no copy."""
    noise = random.Random(2)
    lines = [
        window(
            step,
            parts_of(0.2, noise, device=False),
            **{"host/own_cpu_cores": 1.9, "host/machine_cpu_cores": 31.5},
        )
        for step in range(10, steps + 1, 10)
    ]
    return write(
        folder, report=report(starved=0.2, device=False, steps=steps, **changes), lines=lines
    )


def sweep(root: Path) -> Path:
    """Writes six jobs over num_workers and the batch size, the last one interrupted."""
    for job in range(6):
        workers = (1, 2, 4)[job % 3]
        batch = (128, 256)[job // 3]
        starved = (0.7, 0.4, 0.05)[job % 3]
        noise = random.Random(job)
        lines = [
            window(
                step, parts_of(starved, noise, device=True), **{"gpu/utilization": 0.9 - starved}
            )
            for step in range(10, 401, 10)
        ]
        found = report(
            starved=starved,
            top1=None if job == 5 else 0.70 + 0.01 * job,
            status="interrupted" if job == 5 else "completed",
            goodput=goodput(0.9 * (1 - starved), starved=90 * starved, start=10.0),
            verdict={
                "bottleneck": "compute" if starved < 0.1 else "workers",
                "ceiling": 1 / (1 - starved),
                "sentence": f"Job {job}.",
            },
            run={
                "overrides": [f"loader.num_workers={workers}", f"loader.batch_size={batch}"],
                "name": str(job),
            },
            loader=loader(batch, workers, True),
        )
        write(root / str(job), report=found, lines=lines)
    return root


def interrupted(folder: Path) -> Path:
    """A run that still writes, or was killed: no report, and its last line is not whole."""
    noise = random.Random(3)
    write(
        folder,
        lines=[window(step, parts_of(0.1, noise, device=True)) for step in range(10, 101, 10)],
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 110, "epo')
    return folder


def damaged(folder: Path) -> Path:
    """Files that hold anything but what they should, markup included."""
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(
        '{"status": "completed", "steps": NaN, "shares": [1], "verdict": '
        '"</script><script>alert(1)"'
    )
    (folder / "tuning.json").write_text('["<img src=x onerror=alert(1)>"]')
    (folder / "metrics.jsonl").write_bytes(
        b'\xff\xfe not json\n[1, 2]\n{"step": "x"}\n'
        + json.dumps(window(10, {"compute": 5.0})).encode()
        + b"\n"
    )
    return folder


def with_mistakes(folder: Path, names: Sequence[str], **changes: Any) -> Path:
    """A run with a mistake of each class, taken for the next one, and a first batch."""
    add_mistakes(cpu_run(folder, steps=50), names, **changes)
    return folder


def add_mistakes(folder: Path, names: Sequence[str], **changes: Any) -> None:
    """Writes what an evaluation and a first batch leave beside the rest of a run."""
    count = len(names)
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "JPEG")
    tiny = base64.b64encode(file.getvalue()).decode()
    classes = {
        "class": [*names],
        "images": [10 + place for place in range(count)],
        "correct": [9 + place for place in range(count)],
        "given": [10 + place for place in range(count)],
        "train_images": [100] * count,
    }
    found = {
        "counts": f"{count} classes of 100 to 100 training images",
        "classes": classes,
        "kinds": [[place, (place + 1) % count, 1] for place in range(count)],
        "mistakes": [
            {"where": f"/data/{names[0]}", "label": names[0], "given": names[-1]}
            | {"probability": 0.987, "picture": tiny}
        ],
    }
    (folder / "mistakes.json").write_text(json.dumps(found | changes))
    (folder / "first_batch.json").write_text(json.dumps([{"label": names[0], "picture": tiny}]))
