"""The page of a run: one self-contained HTML file, legible on a desk and on a phone."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence

import yaml

from ray_dynbs.core.decision import Decision
from ray_dynbs.report.history import History
from ray_dynbs.report.panels import draw_svg, panels_of

MOST_SIZES = 12
CSS = """
:root { color-scheme: light; --ink: #1a1a1a; --soft: #5f6368; --line: #e0e0e0; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1200px; color: var(--ink); background: #fff;
  font: 16px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0 .8rem; overflow-wrap: anywhere; }
summary h2 { display: inline; }
h2 { font-size: 1.15rem; margin: 1.8rem 0 .6rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
.panels figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .4rem; }
.panels svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.text, th.text { text-align: left; min-width: 16rem; }
tr.change td { background: #eaf3fb; }
tr.start td { background: #fdf3e1; }
pre { background: #f7f7f7; padding: .8rem; border-radius: 8px; overflow-x: auto; font-size: .85rem; }
.note { color: var(--soft); font-size: .9rem; }
@media (max-width: 700px) {
  .summary tr:first-child { display: none; }
  .summary tr { display: block; margin-bottom: .8rem; }
  .summary td { display: flex; justify-content: space-between; gap: 1rem; }
  .summary td::before { content: attr(data-label); color: var(--soft); }
  .decisions tr { display: flex; flex-wrap: wrap; border-bottom: 1px solid var(--line); }
  .decisions th, .decisions td { flex: 1 1 0; padding: .2rem .3rem; border: 0; white-space: normal; }
  .decisions th.text { display: none; }
  .decisions td.text { flex-basis: 100%; min-width: 0; }
}
"""


def render_page(histories: Sequence[History]) -> str:
    """The page of one run, or of several side by side.

    Args:
        histories: The runs; the first one names the page.
    """
    title = " and ".join(history.name for history in histories)
    figures = "".join(f"<figure>{draw_svg(p, histories)}</figure>" for p in panels_of(histories))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _summary(histories),
        f'<h2>Over the samples seen</h2><div class="panels">{figures}</div>',
        *(_decisions(history) for history in histories),
        *(_config(history) for history in histories),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><style>{CSS}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _summary(histories: Sequence[History]) -> str:
    head = ("run", "epochs", "steps", "samples", "batch sizes", "best metric", "training time", "restarts")
    rows = []
    for history in histories:
        epochs = history.epochs
        best = _best(history)
        sizes = [size for size, _ in itertools.groupby(size for _, size in history.batch_sizes)]
        cells = (
            history.name,
            str(len(epochs)),
            f"{sum(row['steps'] for row in epochs):,}",
            f"{history.samples[-1]:,}",
            _walk(sizes),
            "-" if best is None else f"{history.metric} {best:.4f}",
            f"{sum(row['epoch_time_s'] for row in epochs):,.1f} s",
            _restarts(len(history.starts) - 1, history.num_lost),
        )
        labelled = zip(head, cells, strict=True)
        row = "".join(f'<td data-label="{label}">{html.escape(cell)}</td>' for label, cell in labelled)
        rows.append(f"<tr>{row}</tr>")
    header = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="scroll"><table class="summary"><tr>{header}</tr>{"".join(rows)}</table></div>'


def _walk(sizes: Sequence[int]) -> str:
    """Sizes one after the other, or where they lie if they are many."""
    if len(sizes) <= MOST_SIZES:
        return " → ".join(map(str, sizes))
    return f"{sizes[0]} … {sizes[-1]} ({min(sizes)} to {max(sizes)}, {len(sizes) - 1} changes)"


def _restarts(restarts: int, repeated: int) -> str:
    return f"{restarts} ({repeated} epoch{'' if repeated == 1 else 's'} repeated)" if restarts else "none"


def _best(history: History) -> float | None:
    values = [v for v in history.column("val_metric") if v is not None]
    if not values:
        return None
    return max(values) if history.config["metric"]["mode"] == "max" else min(values)


def _decisions(history: History) -> str:
    head = ("epochs done", "samples", "batch", "micro x k", "LR scale")
    rows, before = [], None
    for decision in history.decisions:
        rows.append(_decision_row(decision, before))
        before = decision
    header = "".join(f"<th>{name}</th>" for name in head) + '<th class="text">why</th>'
    return (
        f"<h2>Decisions of {html.escape(history.name)}</h2>"
        '<p class="note">Each line holds from there on. '
        "Blue: the batch changed. Yellow: a start or restart.</p>"
        f'<div class="scroll"><table class="decisions"><tr>{header}</tr>{"".join(rows)}</table></div>'
    )


def _decision_row(decision: Decision, before: Decision | None) -> str:
    plan = decision.plan
    changed = before is not None and plan.global_batch_size != before.plan.global_batch_size
    kind = "start" if decision.signal is None else "change" if changed else ""
    cells = (
        _epochs_done(decision),
        f"{decision.samples_seen:,}",
        str(plan.global_batch_size),
        f"{plan.micro_batch_size} x {plan.grad_accum_steps}",
        f"{decision.lr_scale:g}",
    )
    reasons = html.escape("; ".join(decision.reasons))
    return (
        f'<tr class="{kind}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + f'<td class="text">{reasons}</td></tr>'
    )


def _epochs_done(decision: Decision) -> str:
    if decision.signal is None:
        return "" if decision.version else "0"
    return f"{decision.signal.epochs_seen:.4g}"


def _config(history: History) -> str:
    text = html.escape(yaml.safe_dump(history.config, sort_keys=False, allow_unicode=True))
    title = f"Configuration of {html.escape(history.name)}"
    return f"<details><summary><h2>{title}</h2></summary><pre>{text}</pre></details>"
