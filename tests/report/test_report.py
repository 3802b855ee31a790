"""The report shows the epochs that count, survives odd numbers, and renders in a real browser."""

from __future__ import annotations

import math
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboardX.proto import event_pb2

from ray_dynbs.cli.main import main
from ray_dynbs.config import Config
from ray_dynbs.core.journal import encode_line
from ray_dynbs.core.signal import Signal
from ray_dynbs.report.history import read_history
from ray_dynbs.report.page import render_page
from ray_dynbs.report.panels import draw_png, panels_of
from ray_dynbs.report.write import write_report
from ray_dynbs.storage.run_directory import CONFIG, DECISIONS, RunDirectory
from ray_dynbs.storage.tables import EPOCH_SCHEMA
from tests.browser import look_at, needs_a_browser


def make_run(folder: Path, name: str, *, epochs: int = 5, **changes: Any) -> RunDirectory:
    """A run directory as a run would leave it: restarted once, its second epoch trained twice."""
    config = Config.model_validate(
        {
            "name": name,
            "task": "ray_dynbs.tasks.digits",
            "epochs": epochs,
            "optimizer": {"name": "sgd", "lr": 0.1},
            "metric": {"name": "accuracy", "mode": "max"},
            "guards": [],
        }
    )
    run = RunDirectory.create(str(folder), name)
    run.write_text(CONFIG, yaml.safe_dump(config.model_dump()))
    manager = config.make_manager(2)
    decisions, rows = [manager.start(world_size=2)], []
    for epoch, incarnation in [(0, 0), (1, 0), *((e, 1) for e in range(1, epochs))]:
        row = dict.fromkeys(EPOCH_SCHEMA.names) | {
            "epoch": epoch,
            "incarnation": incarnation,
            "global_batch_size": manager.plan.global_batch_size,
            "micro_batch_size": manager.plan.micro_batch_size,
            "grad_accum_steps": 1,
            "world_size": 2,
            "steps": 10,
            "rows": 1000 + incarnation,
            "lr": 0.1,
            "lr_scale": 1.0,
            "train_loss": 2.0 / (epoch + 1),
            "val_loss": 1.0,
            "val_metric": 0.5 + 0.1 * epoch,
            "grad_norm": 1.0,
            "memory_fraction": 0.3,
            "samples_per_s": 20_000.0,
            "epoch_time_s": 0.5,
        }
        rows.append(row | changes)
        state = manager.state_dict()
        signal = Signal.measured(
            epoch=epoch, plan_version=manager.version, num_steps=10, num_finite_steps=10, grad_norm=0.05
        )
        decisions.append(manager.decide(signal))
        if (epoch, incarnation) == (1, 0):
            manager.load_state_dict(state)
            decisions.append(manager.start(world_size=1, incarnation=1))
    run.write_text(DECISIONS, "".join(encode_line(d) + "\n" for d in decisions))
    run.write_epochs(rows)
    return run


class _Text(HTMLParser):
    """All text of a page, and whether its tags are balanced."""

    VOID = ("meta", "link", "br", "use", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def text_of(page: str) -> str:
    parser = _Text()
    parser.feed(page)
    assert parser.open == []
    return " ".join(parser.words)


def test_only_the_epochs_that_count_are_shown(tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path, "one"))
    assert [row["epoch"] for row in history.epochs] == [0, 1, 2, 3, 4]
    assert [row["incarnation"] for row in history.epochs] == [0, 1, 1, 1, 1]
    assert history.samples == [1000, 2001, 3002, 4003, 5004]
    assert history.num_lost == 1
    assert len(history.starts) == 2


def test_the_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    paths = write_report(run)
    page = Path(paths[0]).read_text()
    text = text_of(page)
    for words in ("Global batch size", "Learning rate", "Loss", "Validation accuracy", "Gradient norm",
                  "Throughput", "Memory in use", "restart from version 1 with 1 ranks", "grad_norm_high",
                  "accuracy 0.9000", "32 → 64", "1 (1 epoch repeated)"):  # fmt: skip
        assert words in text, words
    for fetched in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert fetched.startswith(("#", "data:")), fetched
    assert Path(paths[1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "changes",
    [
        {"val_loss": None, "val_metric": None},
        {"train_loss": math.nan, "grad_norm": math.inf},
        {"train_loss": 0.0, "grad_norm": 0.0, "val_metric": -1.0},
        {"train_loss": -5.0, "samples_per_s": 1e12},
    ],
)
def test_odd_numbers_do_not_spoil_it(changes: dict[str, Any], tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path, "odd", **changes))
    assert "Global batch size" in text_of(render_page([history]))
    assert draw_png([history]).startswith(b"\x89PNG")


def test_the_event_file_holds_the_same_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    write_report(run)
    write_report(run)
    (events,) = (tmp_path / "one" / "tensorboard").iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    data, position = events.read_bytes(), 0
    while position < len(data):  # TFRecord: length, its checksum, payload, its checksum
        (length,) = struct.unpack_from("<Q", data, position)
        event = event_pb2.Event.FromString(data[position + 12 : position + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
        position += 16 + length
    history = read_history(run)
    sizes = list(zip(history.samples, history.column("global_batch_size"), strict=True))
    assert found["batch/global"] == sizes
    assert [value for _, value in found["metric/validation"]] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
    assert "gradient/noise_scale" not in found


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    config = yaml.safe_load(run.read_text(CONFIG))
    config["task_args"] = {"note": "<script>alert(1)</script>"}
    run.write_text(CONFIG, yaml.safe_dump(config))
    page = render_page([read_history(run)])
    assert "<script" not in page


def test_several_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path, "one"), make_run(tmp_path, "two", epochs=3)
    with pytest.raises(SystemExit) as exit_info:
        main(["report", one.uri, "--compare", two.uri])
    assert not exit_info.value.code
    page, picture = capsys.readouterr().out.splitlines()
    assert (Path(page).name, Path(picture).name) == ("compare.html", "compare.png")
    text = text_of(Path(page).read_text())
    assert "Decisions of one" in text
    assert "Decisions of two" in text
    assert len(panels_of([read_history(one), read_history(two)])) == 7


@pytest.mark.parametrize("kind", ["nothing", "empty"])
def test_what_is_no_run_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "empty":
        RunDirectory.create(str(tmp_path), kind).write_text(CONFIG, "name: empty")
    with pytest.raises(SystemExit) as exit_info:
        main(["report", str(tmp_path / kind)])
    assert exit_info.value.code == 2
    words = {"nothing": "not a run directory", "empty": "no epoch has been finished yet"}[kind]
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@needs_a_browser
@pytest.mark.parametrize("width", [1200, 400])
def test_a_real_browser_shows_it(width: int, tmp_path: Path) -> None:
    """No console error, every curve there, and nothing wider than the window."""
    page = write_report(make_run(tmp_path, "one"))[0]
    seen, log = look_at(page, tmp_path, width)
    assert seen == {"wide": False, "figures": 7, "curves": 7}
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
