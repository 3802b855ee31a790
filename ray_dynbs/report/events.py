"""A run told to a program: marked lines of JSON between those that are meant for people."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from ray_dynbs.core.decision import Decision
from ray_dynbs.report.cells import Row

MARK = "\x1e"
"""In front of a line that holds an event: the record separator of RFC 7464."""
RUN, EPOCH, TRIAL = "run", "epoch", "trial"


def tell(kind: str, **content: Any) -> None:
    """Print one event.

    Args:
        kind: :data:`RUN`, :data:`EPOCH` or :data:`TRIAL`.
        content: JSON-able; numbers that are not finite are kept as Python writes them.
    """
    # On a line of its own, whatever was printed without an end before it.
    sys.stdout.write(f"\n{MARK}{json.dumps({'kind': kind, **content})}\n")
    sys.stdout.flush()


def read_event(line: str) -> dict[str, Any] | None:
    """The event on a line; ``None`` where it is meant for people, or was broken off."""
    if not line.startswith(MARK):
        return None
    try:
        event: dict[str, Any] = json.loads(line[len(MARK) :])
    except ValueError:
        return None
    return event


class EpochEvents:
    """A view that tells every epoch as an event, to be shown elsewhere."""

    def __enter__(self) -> EpochEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def show(self, row: Row, notes: tuple[str, ...], decision: Decision | None) -> None:
        """An epoch has ended."""
        tell(EPOCH, row=dict(row), notes=list(notes), decision=decision and decision.to_record())


def end_with_listener() -> None:
    """Take the end of standard input as Ctrl-C: whoever follows the events is gone.

    Where an actor has started this process, it inherits that signals are held back, and lets them in again.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock Python wants at its end
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, name="ray-dynbs-listener", daemon=True).start()
