"""What bounds training and what changes would give, on figures that are known exactly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import samples

from harness.clock.stages import SAMPLE, StageCost, StageTotals
from harness.diagnose.diagnosis import Figures, judged, what_ifs
from harness.feed.base import ARRAYS, FeedSettings
from harness.tuning.measures import Model, Rate, SampleCost, Trial

OTHERS = "neighbors"


def facts(
    workers: int = 1,
    *,
    demand: float = 1000.0,
    delivered: float | None = 200.0,
    waits: float | None = None,
    read: tuple[float, float] = (1.0, 1.0),
    decode: tuple[float, float] = (3.0, 3.0),
    crop: tuple[float, float] = (1.0, 1.0),
    collate: tuple[float, float] = (0.0, 0.0),
    share: tuple[float, float] = (0.0, 0.0),
    cores: float = 8.0,
    by_quota: bool = False,
    step_cpu_ms: float = 0.0,
    on_cpu: bool = False,
    overlaps: bool = False,
    fetch_per_s: float | None = None,
    copy_per_s: float | None = None,
    short_sides: tuple[int, ...] = (),
) -> Figures:
    """A machine on which stages take so many (wall, processor) ms a sample."""
    stages = {"read": read, "decode": decode, "crop": crop, "collate": collate, "share": share}
    totals = StageTotals(
        100,
        0.1 * sum(wall for wall, _ in stages.values()),
        {name: StageCost(wall * 0.1, cpu * 0.1) for name, (wall, cpu) in stages.items()},
    )
    wall_s, cpu_s = (sum(each) / 1e3 for each in zip(*stages.values(), strict=True))
    settings = samples.settings(workers, batch_size=10)
    model = Model(
        demand=demand,
        cost=SampleCost(wall_s, cpu_s, 0.0),
        cores=cores,
        step_cpu_s=step_cpu_ms / 1e3,
        alone_s=0.0 if overlaps else 1 / demand,
    )
    return Figures(
        demand=Rate.exactly(demand),
        step_cpu_s=step_cpu_ms / 1e3,
        loading=Trial(settings, "supply"),
        stages=totals,
        delivered=None if delivered is None else Rate.exactly(delivered),
        wait_fraction=waits,
        fetch=None if fetch_per_s is None else Rate.exactly(fetch_per_s),
        copy_per_s=copy_per_s,
        settings=settings,
        model=model,
        device="cpu" if on_cpu else "cuda",
        by_quota=by_quota,
        image_size=100,
        short_sides=short_sides,
        fits=lambda settings: None,
        others=None,
    )


def measured(found: Figures, **rates: Rate | None) -> Figures:
    """The same with other rates measured."""
    return dataclasses.replace(found, **rates)


def kind(found: Figures) -> str:
    return judged(found).kind


def given(found: Figures) -> dict[str, float]:
    """Images/s under each change."""
    return what_ifs(found, judged(found).kind)


def test_the_most_that_workers_can_give() -> None:
    """1000 images/s of 5 ms take five workers; with two cores there are no more than 400."""
    assert facts(1).most_workers == 5
    assert facts(1, cores=2).most_workers == 2


def test_every_change_is_reckoned_exactly() -> None:
    """One worker, samples of 5 ms of which reading waits 2 and decoding takes 2; a tenth below the
    model everywhere.
    """
    found = facts(
        1,
        delivered=180.0,
        read=(2.0, 0.0),
        decode=(2.0, 2.0),
        fetch_per_s=50.0,
        short_sides=(230, 230),
    )
    rates = given(found)
    assert rates == pytest.approx(
        {
            "loading were free (the ceiling)": 1000.0,
            "loader.num_workers=5": 0.9 * 1000.0,
            "1 more core, and a worker for each": 0.9 * 400.0,
            "2 more cores, and a worker for each": 0.9 * 600.0,
            "4 more cores, and a worker for each": 0.9 * 1000.0,
            "a disk twice as fast": 0.9 * 250.0,
            "preloaded decoded images (no reading, no decoding)": 0.9 * 1000.0,
            "files with a short side of 115 pixels": 0.9 * 500.0,
            "files with a short side of 200 pixels": 0.9 / (1 + 4 * (200 / 230) ** 2) * 1e3,
            "every file came cold from storage": 50.0,
        }
    )


@pytest.mark.parametrize(("on_cpu", "expected"), [(True, 2000 / 4.5), (False, 500.0)])
def test_a_faster_precision_frees_a_cpu(on_cpu: bool, expected: float) -> None:
    """Of two full cores, a step in half its CPU time leaves more to loading."""
    found = facts(
        2, demand=250.0, delivered=250.0, read=(0.0, 0.0), decode=(1.0, 1.0), crop=(0.0, 0.0),
        cores=2.0, step_cpu_ms=7.0 if on_cpu else 1.0, on_cpu=on_cpu, overlaps=True,
    )  # fmt: skip
    rates = given(measured(found, in_bf16=Rate.exactly(500.0)))
    assert rates["trainer.precision=bf16"] == pytest.approx(expected)


def test_waiting_for_a_processor_is_not_the_disks() -> None:
    """Where every stage lasts twice its processor time, reading has nothing that a faster disk
    would shorten.
    """
    crowded = facts(2, read=(2.0, 1.0), decode=(6.0, 3.0), crop=(2.0, 1.0))
    assert "a disk twice as fast" not in given(crowded)


@pytest.mark.parametrize("copy_per_s", [None, 500.0], ids=["transport", "copy"])
def test_no_change_is_promised_to_help_a_hand_over_that_it_leaves_alone(
    copy_per_s: float | None,
) -> None:
    """Where half of what five workers make arrives, more workers, cores or smaller files are not
    offered.
    """
    found = facts(
        5,
        delivered=450.0,
        copy_per_s=copy_per_s,
        read=(2.0, 0.0),
        fetch_per_s=90.0,
        short_sides=(500,),
    )
    assert kind(found) == ("transport" if copy_per_s is None else "copy")
    assert given(found) == {
        "loading were free (the ceiling)": 1000.0,
        "every file came cold from storage": pytest.approx(90.0),
    }


def test_no_change_promises_more_than_copies_give() -> None:
    """With copies of 300 images/s nothing but free loading gets more, whatever it takes away."""
    free, *rates = given(facts(1, delivered=190.0, copy_per_s=300.0, read=(2.0, 0.0))).values()
    assert free == 1000.0 and max(rates) == pytest.approx(300.0)


def fits_up_to(most: int) -> Callable[[FeedSettings], str | None]:
    """Refuses more than so many workers."""
    return lambda settings: (
        f"{settings.num_workers} workers = 9 GB" if settings.num_workers > most else None
    )


def test_workers_that_do_not_fit_are_not_proposed() -> None:
    """Of the five that would feed the step three fit; neither a row nor the verdict asks for
    more.
    """
    found = dataclasses.replace(facts(1, delivered=190.0), fits=fits_up_to(3))
    assert found.most_workers == 3
    assert given(found)["loader.num_workers=3"] == pytest.approx(0.95 * 600.0)
    assert {change for change in given(found) if "worker" in change} == {
        "loader.num_workers=3",
        "1 more core, and a worker for each",
        ("2 more cores, and a worker for each"),
    }
    assert judged(found).change == {"loader.num_workers": 3}


def test_a_sane_number_of_workers_is_proposed() -> None:
    """Samples that wait a second each would take a thousand workers; four
    a core are worth a try.
    """
    found = facts(1, delivered=1.0, cores=16, read=(1000.0, 1.0))
    assert found.most_workers == 64
    assert "loader.num_workers=64" in given(found)


def test_a_form_without_workers_is_offered_none() -> None:
    """Arrays in memory have none to add, whatever is left to gain."""
    own = dataclasses.replace(samples.settings(0, batch_size=10), backend=ARRAYS)
    found = dataclasses.replace(facts(0, delivered=160.0), settings=own)
    assert kind(found) == "decode"
    assert not any("worker" in change for change in given(found))


def test_without_workers_the_model_speaks_for_reading_that_waits() -> None:
    """Real steps ran on images that were read before: 19 of a sample's 24 ms of reading are in none
    of them.
    """
    found = facts(0, delivered=200.0, waits=0.01, read=(20.0, 1.0))
    assert found.got == pytest.approx(1 / (1 / 1000 + 0.024)) and not found.measured
    assert kind(found) == "storage"
    assert facts(0, delivered=160.0).measured


def test_more_cores_hasten_a_step_that_runs_on_them() -> None:
    """Two cores, filled by a step of 10 ms: two more give twice the images; to a device of its own
    they give nothing.
    """
    crowded = facts(
        2,
        demand=200.0,
        delivered=None,
        cores=2,
        step_cpu_ms=10.0,
        on_cpu=True,
        decode=(0.5, 0.5),
        crop=(0.1, 0.1),
    )
    change = "2 more cores, and a worker for each"
    assert given(crowded)[change] == pytest.approx(2 * crowded.estimated)
    model = dataclasses.replace(crowded.model, step_cpu_s=0.0)
    device = dataclasses.replace(crowded, device="cuda", model=model)
    assert given(device)[change] == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("demand", "delivered", "class_"),
    [
        pytest.param(0.29, 0.29, "decode", id="even enough"),
        pytest.param(0.31, 0.0, "unknown", id="the step"),
        pytest.param(0.0, 0.31, "unknown", id="the step on the feed"),
        pytest.param(0.0, None, "decode", id="a feed that was not measured"),
    ],
)
def test_uneven_rates_tell_no_bottleneck(
    demand: float, delivered: float | None, class_: str
) -> None:
    """Each is known to so much of itself; where that is too
    little, no change is reckoned either.
    """
    known = facts(1, delivered=190.0, cores=1)
    about = lambda rate, off: Rate(rate, rate * (1 - off), rate * (1 + off))
    steps = None if delivered is None else about(190.0, delivered)
    found = measured(known, demand=about(1000.0, demand), delivered=steps)
    assert kind(found) == class_
    assert bool(given(found)) is (class_ != "unknown")


def test_without_real_steps_the_model_stands_in() -> None:
    """What steps get is then reckoned, and so is the ceiling."""
    found = facts(2, delivered=None)
    assert found.got == pytest.approx(400.0)
    assert found.ceiling == pytest.approx(2.5)


def test_no_change_promises_more_than_the_step_takes() -> None:
    """Real steps that beat the model do not lift a what-if above G."""
    assert max(given(facts(4, delivered=950.0)).values()) == pytest.approx(1000.0)


def test_no_change_makes_it_slower() -> None:
    """Where noise lets real steps be faster than steps on batches at hand, nothing is gained and
    nothing is lost.
    """
    rates = what_ifs(facts(4, demand=300.0, delivered=330.0), "balanced")
    assert min(rates.values()) >= 330.0


@pytest.mark.parametrize(
    ("found", "bottleneck", "disturbed"),
    [
        pytest.param(facts(1, delivered=990.0), "compute", "compute", id="1 % lost"),
        pytest.param(facts(1, delivered=950.0), "balanced", "balanced", id="5 % lost"),
        pytest.param(
            facts(1, delivered=990.0, on_cpu=True), "compute", OTHERS, id="1 %, same processors"
        ),
        pytest.param(
            facts(1, delivered=950.0, on_cpu=True), "balanced", OTHERS, id="5 %, same processors"
        ),
        pytest.param(
            facts(1, delivered=400.0, waits=0.01),
            "compute",
            "compute",
            id="slower steps that do not wait",
        ),
        pytest.param(facts(1), "workers", OTHERS, id="one worker for five"),
        pytest.param(
            facts(8, cores=2, delivered=400.0), "decode", OTHERS, id="processors full, decoding"
        ),
        pytest.param(
            facts(8, cores=2, delivered=400.0, decode=(0.5, 0.5), crop=(3.5, 3.5)),
            "augment",
            OTHERS,
            id="augmentation",
        ),
        pytest.param(
            facts(8, cores=2, delivered=400.0, decode=(0.5, 0.5), collate=(2.5, 2.5)),
            "collate",
            OTHERS,
            id="collate",
        ),
        pytest.param(
            facts(8, cores=2, delivered=400.0, decode=(0.5, 0.5), share=(2.5, 2.5)),
            "transport",
            OTHERS,
            id="shared memory",
        ),
        pytest.param(
            facts(8, cores=2, delivered=400.0, by_quota=True),
            "quota",
            OTHERS,
            id="a quota",
        ),
        pytest.param(
            facts(2, delivered=80.0, read=(20.0, 0.5)), "storage", "storage", id="reading waits"
        ),
        pytest.param(
            facts(8, cores=2, delivered=400.0, read=(3.0, 0.5), decode=(0.5, 0.4), crop=(0.5, 0.4)),
            "transport",
            OTHERS,
            id="reading that waits for a processor each time",
        ),
        pytest.param(
            facts(5, delivered=500.0), "transport", OTHERS, id="half of what workers make"
        ),
        pytest.param(
            facts(5, delivered=500.0, copy_per_s=550.0), "copy", "copy", id="copies fill the time"
        ),
        pytest.param(
            facts(5, delivered=500.0, copy_per_s=5000.0),
            "transport",
            OTHERS,
            id="copies are quick",
        ),
        pytest.param(facts(0, delivered=160.0), "workers", OTHERS, id="no workers"),
    ],
)
def test_the_bound_is_named(found: Figures, bottleneck: str, disturbed: str) -> None:
    """Each class by the figures that make it; other programs bound what lacks processors."""
    assert kind(found) == bottleneck
    beside = dataclasses.replace(found, others=1.5)
    told = judged(beside)
    assert (told.kind, told.shares.others) == (disturbed, 1.5)
    assert bool(given(beside)) is (disturbed != OTHERS)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_other_programs_bound_what_is_uneven(on_cpu: bool) -> None:
    """Rates that are too uneven to tell a bottleneck are theirs."""
    uneven = measured(facts(1, on_cpu=on_cpu), demand=Rate(1000.0, 100.0, 1900.0))
    assert kind(uneven) == "unknown"
    assert kind(dataclasses.replace(uneven, others=1.5)) == "neighbors"


@pytest.mark.parametrize(("cpu_ms", "bottleneck"), [(5.0, "decode"), (0.5, "storage")])
def test_a_data_set_that_names_no_stages(cpu_ms: float, bottleneck: str) -> None:
    """What works is decoding, what waits is storage."""
    totals = StageTotals(100, 0.5, {SAMPLE: StageCost(0.5, cpu_ms / 10)})
    cost = SampleCost(5e-3, cpu_ms / 1e3, 0.0)
    workers, cores = (2, 8.0) if bottleneck == "storage" else (8, 2.0)
    known = facts(workers, cores=cores, delivered=400.0)
    model = dataclasses.replace(known.model, cost=cost)
    found = dataclasses.replace(known, stages=totals, model=model)
    assert kind(found) == bottleneck
    assert not any("decoded" in change or "disk" in change for change in given(found))


def test_a_step_on_the_same_cores_leaves_no_room() -> None:
    """On a CPU the cores are full, and the step needs them too."""
    shared = facts(8, cores=2, delivered=190.0, demand=400.0, step_cpu_ms=5.0, on_cpu=True)
    found = judged(shared)
    assert found.kind == "decode" and not found.shares.has_room() and not found.change
