"""The driver's look at a run: every finished epoch, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ray

from ray_dynbs.core.decision import Decision

POLL_S = 0.5
OnEpoch = Callable[[dict[str, Any], tuple[str, ...], "Decision | None"], None]
"""Called with a row of ``epochs.parquet``, what there is to say about it, and the decision at its end."""


class Follower:
    """Polls the coordinator from a thread, from now on, while the block lasts.

    Args:
        coordinator: Handle of the actor.
        on_epoch: Called for each epoch that ends, from that thread.
    """

    def __init__(self, coordinator: Any, on_epoch: OnEpoch | None) -> None:
        self._coordinator, self._on_epoch = coordinator, on_epoch
        self._seen = len(ray.get(coordinator.progress.remote(0)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ray-dynbs-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._poll()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._poll()

    def _poll(self) -> None:
        try:
            news = ray.get(self._coordinator.progress.remote(self._seen), timeout=5)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return  # it is restarting, or the run is ending; the record is in the run directory
        for record, decision in news:
            self._seen += 1
            if self._on_epoch is not None:
                self._on_epoch(record.row, record.notes, decision)
