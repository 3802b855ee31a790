"""The run's metrics: what is scraped from Ray's own endpoint is what is on record."""

from __future__ import annotations

import math
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig

from ray_dynbs.cluster import adopted, metrics
from ray_dynbs.cluster.coordinator import Coordinator, DecisionRequest, EpochRecord, start_coordinator
from ray_dynbs.cluster.data import prepare_data
from ray_dynbs.cluster.metrics import RunMetrics
from ray_dynbs.cluster.session import ray_session
from ray_dynbs.cluster.trainer import run_training
from ray_dynbs.config import Config
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.journal import decode_lines
from ray_dynbs.core.signal import Signal
from ray_dynbs.storage.run_directory import DECISIONS, RunDirectory
from ray_dynbs.storage.tables import EPOCH_SCHEMA
from ray_dynbs.tasks.loading import load_task
from ray_dynbs.tasks.sources import resolve_sources

SIZES = [16, 24, 24, 8]
CONFIG = Config.model_validate(
    {
        "name": "measured",
        "task": "tests.problem_task",
        "task_args": {"num_rows": 61, "validate": False, "sleep_s": 0.2},
        "epochs": 3,
        "precision": "fp64",
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": {"initial": 12, "min": 2, "max": 64, "decide_every": {"steps": 2}},
        "policy": {"name": "tests.problem_task.alternate", "sizes": SIZES},
        "guards": [],
        "lr": {"rule": "sqrt"},
        "cluster": {"num_workers": 1},
    }
)
Scraped = dict[str, list[float]]


class Instruments:
    """Gauges and counters in place of Ray's: what was set, in order, and what was counted."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.tags: set[str] = set()

    def gauge(self, name: str, said: str, keys: tuple[str, ...]) -> Any:
        def set_(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(keys)
            self.tags.add(tags["run"])
            self.values[name].append(value)

        return type("Gauge", (), {"set": staticmethod(set_)})

    def counter(self, name: str, said: str, keys: tuple[str, ...]) -> Any:
        def inc(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(keys)
            assert value > 0
            self.counts[" ".join([name, *[tags[key] for key in keys if key != "run"]])] += value

        return type("Counter", (), {"inc": staticmethod(inc)})

    @property
    def shown(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.values.items()}


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Instruments]:
    """New ones for every process there would be."""

    def renew() -> Instruments:
        new = Instruments()
        monkeypatch.setattr(metrics, "Gauge", new.gauge)
        monkeypatch.setattr(metrics, "Counter", new.counter)
        return new

    return renew


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path), "run")


def signal(version: int) -> Signal:
    return Signal.measured(
        epoch=version, plan_version=version, num_steps=3, num_finite_steps=3, grad_norm=1.0
    )


def record(epoch: int, **measured: float) -> EpochRecord:
    numbers = dict.fromkeys(EPOCH_SCHEMA.names, 1.0 + epoch) | {"val_loss": None, "val_metric": None}
    own = {"epoch": epoch, "incarnation": 0, "steps": 7, "rows": 61}
    return EpochRecord(numbers | own | measured)


def plan_shown(decision: Decision) -> dict[str, float]:
    plan = decision.plan
    return {
        "dynbs_next_global_batch_size": plan.global_batch_size,
        "dynbs_next_micro_batch_size": plan.micro_batch_size,
        "dynbs_next_grad_accum_steps": plan.grad_accum_steps,
        "dynbs_next_world_size": plan.world_size,
        "dynbs_next_lr_scale": decision.lr_scale,
    }


def outcomes(decisions: list[Decision]) -> Counter[str]:
    sizes = [decision.plan.global_batch_size for decision in decisions]
    kinds = {True: "grow", False: "shrink"}
    return Counter("hold" if a == b else kinds[b > a] for a, b in pairwise(sizes))


def test_decisions_and_epochs_are_shown_and_counted_once(run: RunDirectory, instruments: Any) -> None:
    found = instruments()
    coordinator = Coordinator(CONFIG, run, RunMetrics(run.name))
    started = coordinator.start("group", 2, 61, None)
    assert coordinator.start("group", 2, 61, None) == started
    assert found.shown == plan_shown(started.decision)
    assert found.counts == {}
    state = started.state
    for version in range(5):
        request = DecisionRequest(state, signal(version), (record(version),))
        reply = coordinator.decide(request)
        assert coordinator.decide(request) == reply
        state = reply.state
        row = {f"dynbs_{k}": v for k, v in record(version).row.items() if v is not None}
        assert found.shown == plan_shown(reply.decision) | row
    journal = decode_lines(run.read_text(DECISIONS))
    assert outcomes(journal) == {"grow": 3, "hold": 1, "shrink": 1}
    assert found.counts == {
        **{f"dynbs_decisions {kind}": number for kind, number in outcomes(journal).items()},
        "dynbs_epochs": 5,
        "dynbs_trained_steps": 5 * 7,
        "dynbs_trained_rows": 5 * 61,
    }
    assert found.tags == {"run"}


def test_another_process_shows_what_is_on_record_and_counts_what_is_new(
    run: RunDirectory, instruments: Any
) -> None:
    instruments()
    first = Coordinator(CONFIG, run, RunMetrics(run.name))
    state = first.start("a", 2, 61, None).state
    request = DecisionRequest(state, signal(0), (record(0),))
    reply = first.decide(request)
    found = instruments()
    second = Coordinator(CONFIG, run, RunMetrics(run.name))
    assert found.shown.items() >= plan_shown(reply.decision).items()
    assert found.shown["dynbs_epoch"] == 0
    assert second.decide(request) == reply
    assert found.counts == {}
    restarted = second.start("b", 3, 61, reply.state)
    assert found.shown["dynbs_next_world_size"] == 3
    assert found.counts == {"dynbs_restarts": 1}
    last = DecisionRequest(restarted.state, signal(1), (record(0), record(1)))
    second.decide(last)
    assert found.shown["dynbs_epoch"] == 1
    assert found.counts == {
        "dynbs_restarts": 1,
        "dynbs_decisions grow": 1,
        "dynbs_epochs": 1,
        "dynbs_trained_steps": 7,
        "dynbs_trained_rows": 61,
    }


def test_a_number_that_is_missing_takes_the_old_one_away(instruments: Any) -> None:
    found = instruments()
    shown = RunMetrics("run")
    shown.finished(record(0, val_loss=0.5, train_loss=2.0).row, counts=True)
    shown.refresh()
    assert found.values["dynbs_val_loss"] == [0.5, 0.5]
    shown.finished(record(1, train_loss=math.inf).row, counts=True)
    shown.refresh()
    assert math.isnan(found.values["dynbs_val_loss"][2])
    assert found.values["dynbs_train_loss"] == [2.0, 2.0, math.inf]
    assert len(found.values["dynbs_val_loss"]) == 3  # set once: from then on there is none
    shown.finished(record(2, val_loss=0.25).row, counts=True)
    shown.refresh()
    assert found.values["dynbs_val_loss"][3:] == [0.25, 0.25]
    assert found.values["dynbs_epoch"] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("broken", ["Gauge", "set"])
def test_a_run_goes_on_without_metrics(
    broken: str, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    calls = []

    class Broken:
        def __init__(self, name: str, *given: Any) -> None:
            self.name = name
            if broken == "Gauge":
                raise RuntimeError("no exporter")

        def set(self, value: float, tags: dict[str, str]) -> None:
            calls.append(self.name)
            if self.name == "dynbs_next_world_size":
                raise RuntimeError("no such gauge")

    monkeypatch.setattr(metrics, "Gauge", Broken)
    shown = RunMetrics(run.name)
    measured = Coordinator(CONFIG, run, shown)
    plain = Coordinator(CONFIG, RunDirectory.create(str(tmp_path), "plain"))
    started = measured.start("a", 2, 61, None)
    assert started == plain.start("a", 2, 61, None)
    told = len(calls)
    shown.refresh()  # half a plan is not kept up
    assert (told, len(calls)) == ((0, 0) if broken == "Gauge" else (4, 4))
    request = DecisionRequest(started.state, signal(0), (record(0),))
    assert measured.decide(request) == plain.decide(request)
    shown.refresh()
    assert [entry.getMessage() for entry in caplog.records] == ["the run's metrics are incomplete"]


def test_no_counter_has_the_name_of_a_gauge(instruments: Any) -> None:
    """Ray would take the count for the gauge's value."""
    found = instruments()
    shown = RunMetrics("Läufe 1")
    shown.finished(record(0, val_loss=1.0, val_metric=1.0).row, counts=True)
    gauges, counters = set(found.values), {name.split()[0] for name in found.counts}
    assert gauges == {f"dynbs_{name}" for name in EPOCH_SCHEMA.names}
    assert len(counters) == 3
    assert not gauges & counters
    assert found.tags == {r"L\xe4ufe 1"}  # Ray takes ASCII only


def test_an_adopted_loop_is_tagged_with_its_run_config_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(settings: Any, record: RunDirectory, name: str) -> None:
        raise InterruptedError(name, record.name)

    monkeypatch.setattr(adopted, "start_coordinator", stop)
    trainer = adopted.AdoptedTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="mine", storage_path=str(tmp_path)),
    )
    with pytest.raises(InterruptedError) as caught:
        trainer.fit()
    assert caught.value.args == ("mine", "ray_dynbs")


# -- on a cluster, through Ray's exporter ----------------------------------------------------------


@pytest.fixture(scope="module")
def reporting_cluster() -> Iterator[None]:
    """A private cluster that reports every second."""
    pytest.importorskip("prometheus_client", reason="Ray exports with the packages of ray[default] alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        with ray_session("local"):
            yield


def scrape(run: str) -> Scraped:
    """The run's samples on every node, one value for each series."""
    from prometheus_client.parser import text_string_to_metric_families

    found: Scraped = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_dynbs_") and sample.labels.get("run") == run:
                    name = " ".join([sample.name, *filter(None, [sample.labels.get("outcome")])])
                    found.setdefault(name.removeprefix("ray_"), []).append(sample.value)
    return found


def settled(run: str, good: Callable[[Scraped], bool], most_s: float = 20) -> Scraped:
    """The first good scrape that a second one repeats: one alone may fall into the middle of a report."""
    end, before = time.monotonic() + most_s, {}
    while time.monotonic() < end:
        now = scrape(run)
        if now == before and good(now):
            return now
        before = now
        time.sleep(0.1)
    raise AssertionError(f"no such scrape; the last one: {before}")


def check_against_the_record(found: Scraped, directory: RunDirectory) -> int:
    """Exactly one row, its counts, and the journal's line that the counts lead to; returns the epoch."""
    rows, journal = directory.read_epochs(), decode_lines(directory.read_text(DECISIONS))
    (epoch,) = found["dynbs_epoch"]
    done = rows[: int(epoch) + 1]
    row = {f"dynbs_{name}": [value] for name, value in done[-1].items() if value is not None}
    counts = {
        "dynbs_epochs_total": [len(done)],
        "dynbs_trained_steps_total": [sum(row["steps"] for row in done)],
        "dynbs_trained_rows_total": [sum(row["rows"] for row in done)],
    }
    made = sum(values[0] for name, values in found.items() if name.startswith("dynbs_decisions_total"))
    decisions = journal[: int(made) + 1]  # the first is the start
    counts |= {f"dynbs_decisions_total {kind}": [n] for kind, n in outcomes(decisions).items()}
    plan = {name: [value] for name, value in plan_shown(decisions[-1]).items()}
    assert found == row | counts | plan
    return int(epoch)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_scrape_is_a_row_of_the_record(reporting_cluster: None, tmp_path: Path) -> None:
    directory = RunDirectory.create(str(tmp_path), CONFIG.name)
    scrapes = []

    def on_epoch(row: dict[str, Any], *_: Any) -> None:
        scrapes.append(settled("measured", lambda found: found.get("dynbs_epoch", [-1])[0] >= row["epoch"]))

    data = prepare_data(resolve_sources(CONFIG, load_task(CONFIG.task)), CONFIG.data.columns)
    run_training(CONFIG, directory, data, on_epoch)
    seen = [check_against_the_record(found, directory) for found in scrapes]
    assert seen[-1] == CONFIG.epochs - 1
    assert len(set(seen)) >= 2
    assert len(scrapes[-1]) > len(EPOCH_SCHEMA.names)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_gauges_outlive_the_actor_s_death_and_not_the_run(reporting_cluster: None, run: RunDirectory) -> None:
    actor = start_coordinator(CONFIG, run, "a run's name")
    state = ray.get(actor.start.remote("g", 2, 61, None)).state
    first = ray.get(actor.decide.remote(DecisionRequest(state, signal(0), (record(0, val_loss=0.1),))))

    def shows(epoch: int, **others: list[float]) -> Callable[[Scraped], bool]:
        expected = {"dynbs_epoch": [epoch], **{f"dynbs_{name}": value for name, value in others.items()}}
        return lambda found: found.items() >= expected.items()

    before = settled("a run's name", shows(0, val_loss=[0.1], epochs_total=[1]))
    time.sleep(4)  # longer than Ray remembers a gauge that nobody sets
    assert scrape("a run's name") == before
    ray.kill(actor, no_restart=False)
    ray.get(actor.progress.remote(0), timeout=60)
    assert settled("a run's name", shows(0, val_loss=[0.1])) == before
    again = DecisionRequest(first.state, signal(1), (record(0), record(1)))
    ray.get(actor.decide.remote(again))
    after = settled("a run's name", shows(1, epochs_total=[1, 1]))
    assert "dynbs_val_loss" not in after
    assert after["dynbs_decisions_total grow"] == [1, 1]
    ray.kill(actor)
    ended = settled("a run's name", lambda found: "dynbs_epoch" not in found)
    assert ended == {name: values for name, values in after.items() if name.split()[0].endswith("_total")}
