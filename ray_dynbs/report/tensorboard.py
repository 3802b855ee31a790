"""The same curves as TensorBoard event files, over samples seen."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ray_dynbs.report.history import History
from ray_dynbs.storage.run_directory import RunDirectory

FOLDER = "tensorboard"
TAGS = {
    "global_batch_size": "batch/global",
    "micro_batch_size": "batch/micro",
    "grad_accum_steps": "batch/grad_accum_steps",
    "lr": "lr/applied",
    "lr_scale": "lr/scale",
    "train_loss": "loss/train",
    "val_loss": "loss/validation",
    "val_metric": "metric/validation",
    "grad_norm": "gradient/norm",
    "noise_scale": "gradient/noise_scale",
    "memory_fraction": "system/memory_fraction",
    "samples_per_s": "system/samples_per_s",
}


def write_events(run: RunDirectory, history: History) -> None:
    """Replace the run's event file.

    Args:
        run: Its directory.
        history: What to write.
    """
    from tensorboardX import SummaryWriter  # comes with Ray Train

    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(logdir=folder)
        for column, tag in TAGS.items():
            for samples, value in history.curve(column):
                writer.add_scalar(tag, value, global_step=samples)
        writer.close()
        (events,) = Path(folder).iterdir()
        # One name for all times: a report written again replaces the events instead of doubling them.
        run.write_bytes(f"{FOLDER}/events.out.tfevents.0.ray_dynbs", events.read_bytes())
