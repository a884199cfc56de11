"""The page that ``bench_tuner.py`` makes of its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

from scripts.measured import machine_line, markdown
from scripts.tuner_score import Found, Line
from scripts.tuner_strategies import LOADTUNE, LOADTUNE_STEPS, REPEATED, STRATEGIES
from scripts.tuner_workloads import VARIANTS, WORKLOADS

_RIVALS = ("grid", "loadtune", "lightning", "all_cores", "own")


def show(lines: Sequence[Line]) -> str:
    """Everything that was measured, as Markdown."""
    found = Found.collect(lines)
    scored = {name: found[name] for name in WORKLOADS if name in found and found[name].oracle()}
    changes = {name: workload.changes for name, workload in VARIANTS.items() if workload.changes}
    machines = dict.fromkeys(
        f"{line['date']}: {machine_line(line['machine'])}"
        for line in lines
        if line["kind"] == "machine"
    )
    loads = [line["load"] for line in lines if line["kind"] == "machine"]
    parts = ["# The tuner beside others: what was measured", *machines]
    if loads:
        parts.append(
            f"Load average when a part of the benchmark began: {min(loads):.1f} to "
            f"{max(loads):.1f}."
        )
    # each table under its title; one without rows is left out
    tables = (
        ("Workloads", workload_rows(scored)),
        ("Strategies, over all workloads", summary_rows(scored, [*STRATEGIES])),
        (f"{REPEATED} against each", rival_rows(scored, REPEATED, _RIVALS)),
        ("Every choice", strategy_rows(scored)),
        (f"The same question again: {REPEATED}", repeat_rows(found, REPEATED)),
        ("What a change changes", change_rows(found, changes, REPEATED)),
    )
    for title, rows in tables:
        if listed := [*rows]:
            parts += [f"## {title}", markdown(listed)]
    if missing := [name for name in WORKLOADS if name not in scored]:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join([*parts, _NOTES]) + "\n"


_NOTES = f"""## How to read it

- A setting is written 3x2: 3 workers, 2 batches in flight each; 0: no workers. `own` is what a user
  gets who sets nothing.
- Consumers sleep for a set time per batch, as a host does that waits for a device, so that the
  demand is known; that of `cpu_step` is the harness's own training step (measured), on the cores
  that the workers use too. On the `sleep` loads and `heavy_tail` every strategy is told of 8 cores,
  on `small_shm` of 4; no strategy may take more than two workers a core.
- Delivered images/s: what the consumer got in at least the window's time, from when every worker
  has handed a batch over and the primed queue is through, over a whole number of turns of the
  workers (slow batches come in bursts of one from each). All settings of a round load the same
  samples, from a warm page cache, in random order of the settings.
- The oracle looks at every number of workers and form at two prefetch factors. It picks from the
  choosing rounds: the first measures all settings, the others those within a tenth of the best that
  have the fewest workers (six) or were fastest (four), and all that a strategy chose. Scores come
  from the other, later rounds. Where a strategy chose what the oracle picked, both are one
  measurement and the ratio is 1; A/A is the oracle's pick measured twice in each round: what is
  noise.
- Ratios: mean over mean, paired by round [95 % interval, percentile bootstrap over the rounds]. A
  strategy that was asked several times is scored by the mean of its choices. Below user's: on how
  many workloads the interval of delivered over the user's lies below 1. Fewest workers: the
  smallest number that came within 2 % of the best in the choosing rounds.
- Seconds: of the whole choice, the start of workers included; 0 for a rule of thumb.
- `grid`: the PyTorch tutorial's search, four passes over 15 batches a setting, without its guard
  (as printed it passes `num_workers` on CUDA machines only, and so leaves every trial at 0 workers
  elsewhere), and without a budget.
- `loadtune`: {LOADTUNE} from the package index, `loadtune tune FILE --steps {LOADTUNE_STEPS}` in
  processes of its own as it does by itself, a workload file per workload, `os.cpu_count` set to the
  cores that the others are told of; its torch threads, compilation and mixed precision are not
  taken over. `lightning`: cores - 1, at least 1, its `suggested_max_num_workers`.

To repeat: `uv run scripts/bench_tuner.py`, in parts with `--minutes 30` (what is measured stays
measured), then `--write`. Ten repeats of one choice: `--only sleep_10 --auto-repeats 10`. All
options: `--help`."""


def workload_rows(found: Mapping[str, Found]) -> Iterator[dict[str, object]]:
    """A row for each workload: demand, the user's setting and the oracle's, and the control."""
    for name, one in found.items():
        if (oracle := one.oracle()) is None:
            continue
        score = one.rates["score"]
        rates = {
            setting: list(score[setting].values())
            for setting in (oracle[0], *one.settings("own"))
            if setting in score
        }
        cells = {setting: f"{setting}: {mean(values):.0f}" for setting, values in rates.items()}
        yield {
            "workload": name, "what": WORKLOADS[name].about, "demand": f"{one.demand:.0f}",
            "user's: images/s": next((cells[s] for s in one.settings("own") if s in cells), "-"),
            "oracle: images/s": cells.get(oracle[0], "-"), "fewest workers": oracle[1],
            "A/A": one.control() or "-", "n": len(score[oracle[0]]),
        }  # fmt: skip


def strategy_rows(found: Mapping[str, Found]) -> Iterator[dict[str, object]]:
    """Yields a row for each workload and strategy: choice, delivered ratios, cost."""
    for name, one in found.items():
        if one.oracle() is None:
            continue
        for strategy, lines in one.choices.items():
            yield {
                "workload": name,
                "strategy": strategy,
                "choice": ", ".join(dict.fromkeys(line["setting"] or "none" for line in lines)),
                "delivered / oracle": one.ratio(strategy) or "-",
                "delivered / user's": one.ratio(strategy, "own") or "-",
                "seconds": f"{one.seconds(strategy):.1f}",
                "workers over fewest": _signed(one.spare(strategy)),
            }


def summary_rows(
    found: Mapping[str, Found], strategies: Sequence[str]
) -> Iterator[dict[str, object]]:
    """A row for each strategy, over the workloads on which it was scored."""
    for strategy in strategies:
        scored = [one for one in found.values() if one.ratio(strategy)]
        if not scored:
            continue
        ratios = [ratio.value for one in scored if (ratio := one.ratio(strategy))]
        costs = [one.seconds(strategy) for one in scored]
        own = [ratio for one in scored if (ratio := one.ratio(strategy, "own"))]
        spare = [spare for one in scored if (spare := one.spare(strategy)) is not None]
        yield {
            "strategy": strategy, "workloads": len(scored), "mean": f"{mean(ratios):.3f}",
            "worst": f"{min(ratios):.3f}",
            "below user's": sum(ratio.high < 1 for ratio in own),
            "median s": f"{median(costs):.1f}",
            "worst s": f"{max(costs):.1f}",
            "workers <= fewest + 1": f"{sum(s <= 1 for s in spare)} of {len(spare)}",
        }  # fmt: skip


def rival_rows(
    found: Mapping[str, Found], mine: str, rivals: Sequence[str]
) -> Iterator[dict[str, object]]:
    """Yields for each rival where ``mine`` delivers more or less, and the costs' ratio.

    More or less: the interval is without 1.
    """
    for rival in rivals:
        pairs = [(one, ratio) for one in found.values() if (ratio := one.ratio(mine, rival))]
        if not pairs:
            continue
        more = sum(ratio.low > 1 for _, ratio in pairs)
        less = sum(ratio.high < 1 for _, ratio in pairs)
        times = [one.seconds(rival) / one.seconds(mine) for one, _ in pairs]
        yield {
            f"{mine} against": rival, "delivers more": more, "the same": len(pairs) - more - less,
            "less": less,
            "its cost / ours, median": f"{median(times):.1f}", "least": f"{min(times):.1f}",
            "most": f"{max(times):.1f}",
        }  # fmt: skip


def repeat_rows(found: Mapping[str, Found], strategy: str) -> Iterator[dict[str, object]]:
    """Yields how far apart choices lie on workloads asked at least three times."""
    for name, one in found.items():
        workers = [setting.num_workers for setting in one.settings(strategy)]
        if len(workers) < 3:
            continue
        within = max(sum(abs(n - centre) <= 1 for n in workers) for centre in workers)
        seconds = [line["seconds"] for line in one.choices[strategy]]
        yield {
            "workload": name, "n": len(workers), "workers chosen": " ".join(map(str, workers)),
            "within one of each other's middle": f"{within} of {len(workers)}",
            "seconds": f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})",
        }  # fmt: skip


def change_rows(
    found: Mapping[str, Found], changes: Mapping[str, str], strategy: str
) -> Iterator[dict[str, object]]:
    """Yields what ``strategy`` chose, and why, for each variant and its base."""
    for variant, base in changes.items():
        if not found.keys() >= {base, variant}:
            continue
        for name in (base, variant):
            for line in found[name].choices.get(strategy, [])[:1]:
                yield {"workload": name, "choice": line["setting"], "sentence": line["note"]}


def _signed(value: int | None) -> str:
    return "-" if value is None else f"{value:+d}"
