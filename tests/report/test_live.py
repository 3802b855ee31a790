"""The live view: what it shows at any width and height, on a terminal, in a notebook, in a file."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from ray_dynbs.core.decision import Decision
from ray_dynbs.core.plan import BatchPlan
from ray_dynbs.report.lines import EpochLines
from ray_dynbs.report.live import RunTable, TerminalTable, make_view


def row(epoch: int, size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "incarnation": 0,
        "global_batch_size": size,
        "micro_batch_size": size // 4,
        "grad_accum_steps": 2,
        "lr": 0.05,
        "train_loss": 1.5,
        "val_metric": 0.875,
        "samples_per_s": 12345.0,
        "memory_fraction": 0.11,
        "noise_scale": None,
        "epoch_time_s": 8.0,
        **more,
    }


def decision(size: int, reason: str = "grad_norm 0.38 < 0.5: grow") -> Decision:
    return Decision(
        incarnation=0,
        version=1,
        epoch=0,
        step=1,
        samples_seen=1,
        plan=BatchPlan.fit(size, 2),
        lr_scale=1.0,
        micro_ceiling=None,
        num_rows=None,
        reasons=(reason,),
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def text(table: RunTable, width: int, height: int | None = None) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table.render(width, height))
    return console.export_text()


def filled(epochs: int, total: int | None = 12, **more: Any) -> tuple[RunTable, Clock]:
    clock = Clock()
    table = RunTable("accuracy", total, clock)
    for epoch in range(epochs):
        clock.now += 30.0 if epoch == 0 else 10.0
        table.add(row(epoch, **more), (), decision(64))
    return table, clock


def test_a_wide_screen_shows_everything() -> None:
    table, clock = filled(3)
    clock.now += 4.0
    shown = text(table, 130)
    assert re.search(r"epoch +batch +micro x k +lr +loss +accuracy +samples/s +mem +next", shown)
    assert re.search(r"3 +32 +8 x 2 +0\.05 +1\.5000 +0\.8750 +12,345 +11% +64: grad_norm 0\.38", shown)
    # Nine epochs of ten seconds, four of which have passed.
    assert "epoch 3 of 12, 0:54, about 1:26 left" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 99, 120, 200])
def test_no_line_is_wider_than_the_screen_and_the_size_is_always_there(width: int) -> None:
    shown = text(filled(3)[0], width, 20)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert len(re.findall(r"^ +[123] +32 ", shown, re.MULTILINE)) == 3
    assert ("micro x k" in shown) == (width >= 100)


def test_a_low_screen_shows_the_newest_epochs_the_end_shows_all() -> None:
    table, _ = filled(30, 30)
    assert len(text(table, 120, 24).splitlines()) <= 24
    assert re.search(r"^ +30 ", text(table, 120, 24), re.MULTILINE)
    assert not re.search(r"^ +1 +32", text(table, 120, 24), re.MULTILINE)
    assert re.search(r"^ +1 +32", text(table, 120), re.MULTILINE)


def test_the_noise_scale_has_a_column_once_it_is_measured() -> None:
    assert "noise" not in text(filled(2)[0], 140)
    assert re.search(r"noise.*\n.* 512 ", text(filled(2, noise_scale=512.4)[0], 140))


def test_the_first_estimate_is_the_first_epochs_own_time_without_the_start() -> None:
    assert "about 1:28 left" in text(filled(1)[0], 120)
    assert "workers are starting" in text(RunTable("loss", 5, Clock()), 120)
    assert "3 epochs, 0:50" in text(filled(3, None)[0], 120)


def test_restarts_notes_and_missing_answers_are_said() -> None:
    table = RunTable("loss", 5, Clock())
    table.add(row(0), (), decision(32))
    table.add(row(1, incarnation=1, val_metric=None), ("rows have changed",), None)
    shown = text(table, 140)
    assert "note: the workers were restarted; going on with epoch 2" in shown
    assert "note: rows have changed" in shown
    assert "32: the coordinator did not answer" in shown
    assert "val loss" in shown


def test_a_terminal_is_redrawn_and_keeps_the_whole_table() -> None:
    console = Console(force_terminal=True, width=120, height=16, file=io.StringIO())
    with TerminalTable(RunTable("loss", 20), console) as view:
        for epoch in range(20):
            view.show(row(epoch), (), decision(32, "hold"))
    last = console.file.getvalue().rsplit("epoch", 2)[-2]  # type: ignore[attr-defined]
    assert len(re.findall(r"\x1b\[2K|\x1b\[1A", console.file.getvalue())) > 0  # type: ignore[attr-defined]
    assert all(re.search(rf"\b{epoch} ", last) for epoch in (1, 10, 20))


def test_without_a_terminal_there_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    view = make_view("loss", 3, lines.append)
    assert isinstance(view, EpochLines)
    with view:
        view.show(row(0), (), decision(64))
    assert lines[0].split()[:2] == ["epoch", "batch"]
    assert lines[1].endswith("64: grad_norm 0.38 < 0.5: grow")
    assert capsys.readouterr().out == ""


@pytest.mark.timeout(180)
def test_a_notebook_shows_one_table_that_is_replaced() -> None:
    """A real kernel: the cell's output is one display, updated in place."""
    nbformat = pytest.importorskip(
        "nbformat", reason="needs nbclient and ipykernel: pip install -e '.[test]'"
    )
    nbclient = pytest.importorskip("nbclient")
    code = (
        "import threading\n"
        "from ray_dynbs.report.live import make_view, NotebookTable\n"
        "from tests.report.test_live import row, decision\n"
        "view = make_view('loss', 3, print)\n"
        "assert isinstance(view, NotebookTable)\n"
        "with view:\n"
        "    for epoch in range(3):\n"
        "        thread = threading.Thread(target=view.show, args=(row(epoch), (), decision(64)))\n"
        "        thread.start(); thread.join()\n"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"]
    page = outputs[0].data["text/html"]
    assert page.startswith("<pre")
    assert "64" in page
    assert "epoch 3 of 3" in page
