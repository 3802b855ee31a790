"""A run or a search on a connected cluster, in progress or ended: its status, its words, its end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from ray_dynbs.api.results import Record, RunRecord, SearchRecord
from ray_dynbs.cluster.remote import Watch, find_driver
from ray_dynbs.config import Config
from ray_dynbs.config.search import Candidates
from ray_dynbs.core.decision import Decision
from ray_dynbs.core.errors import ConfigError
from ray_dynbs.report.events import EPOCH, MARK, RUN, TRIAL, read_event
from ray_dynbs.report.live import make_view
from ray_dynbs.report.trials import make_trial_view

STATUS = {0: "finished", 1: "failed", 2: "failed", 130: "stopped"}
"""What an exit code of the driver means."""


class RunFailedError(RuntimeError):
    """A run or a search has failed; the message is its first cause."""


class _Remote(Record):
    """Something in progress on the cluster, or ended there."""

    def __init__(self, name: str, uri: str | None) -> None:
        self.name, self._uri = name, uri
        self._watch = Watch(find_driver(name))
        self._said: list[str] = []
        self._unseen: list[Mapping[str, Any]] = []

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped``, ``failed``; ``ended`` where nobody knows how any more."""
        self._take(self._watch.poll())
        if self._watch.code is not None:
            return STATUS.get(self._watch.code, "failed")
        if self._watch.alive:
            return "running"
        return "finished" if self._uri is not None and self._is_complete() else "ended"

    @property
    def uri(self) -> str:
        """Its directory, on the cluster or in a bucket.

        Raises:
            ConfigError: it has not got as far as to make one.
        """
        if self._uri is None:
            self._take(self._watch.poll())
        if self._uri is None:
            raise ConfigError(f"{self.name}: has no directory yet; allowed: wait(), or a little patience")
        return self._uri

    def stop(self) -> None:
        """End it as by Ctrl-C; what is saved can be resumed."""
        self._watch.stop()

    def wait(self) -> Self:
        """Show what happens until it ends.

        Raises:
            ConfigError: its input was wrong.
            RunFailedError: it failed.
            KeyboardInterrupt: watching was interrupted; it goes on.
        """
        try:
            with self._view() as view:
                if not self._watch.alive:
                    self._show_record(view)
                for event in self._unseen:  # taken in while nobody looked
                    self._show(event, view)
                self._unseen.clear()
                while self._watch.alive and self._watch.code is None:
                    self._take(self._watch.poll(), view)
        except KeyboardInterrupt:
            print(
                f"{self.name} goes on on the cluster: ray_dynbs.attach({self.name!r}) watches it again, "
                f"ray_dynbs.attach({self.name!r}, wait=False).stop() ends it"
            )
            raise
        if self._watch.was_lost and self.status != "finished":
            raise RunFailedError(f"{self.name}: its driver is gone; train(..., resume=True) goes on with it")
        self._watch.dismiss()
        self._raise_failure()
        return self

    @abstractmethod
    def _view(self) -> Any:
        """What shows it while it goes on."""

    @abstractmethod
    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        """Show one event."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether the record is that of something that came to its end."""

    @abstractmethod
    def _show_record(self, view: Any) -> None:
        """Show what is on record of something that nobody remembers."""

    def _take(self, lines: list[str], view: Any = None) -> None:
        """Sort what the driver has said: events to the view, words to the reader."""
        for line in lines:
            event = read_event(line)
            if event is None:
                if line.strip() and not line.startswith(MARK):
                    self._said.append(line)
                    if view is not None:
                        print(line)
            elif event["kind"] == RUN:
                self._uri = event["uri"]
            elif view is not None:
                self._show(event, view)
            else:
                self._unseen.append(event)

    def _raise_failure(self) -> None:
        code = self._watch.code
        if code in (0, 130, None):
            return
        errors = [line for line in self._said if line.startswith("error")]
        cause = errors[0].partition(": ")[2] if errors else f"the driver ended with exit code {code}"
        if code == 2:
            raise ConfigError(cause)
        raise RunFailedError(cause)


class RemoteRun(_Remote, RunRecord):
    """A run on the cluster, in progress or ended."""

    def __init__(self, name: str, config: Config, uri: str | None = None) -> None:
        super().__init__(name, uri)
        self._config = config

    def __repr__(self) -> str:
        return f"<run {self.name}: {self.status}; {self._uri or 'no directory yet'}>"

    def _view(self) -> Any:
        return make_view(self._config.metric.name, self._config.epochs, print)

    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        if event["kind"] == EPOCH:
            decision = event["decision"] and Decision.from_record(event["decision"])
            view.show(event["row"], tuple(event["notes"]), decision)

    def _is_complete(self) -> bool:
        return max(self.epochs["epoch"].to_pylist(), default=-1) + 1 >= self._config.epochs

    def _show_record(self, view: Any) -> None:
        made = {(d.incarnation, d.epoch): d for d in self.decisions if d.signal is not None}
        for row in self.epochs.to_pylist():
            view.show(row, (), made.get((row["incarnation"], row["epoch"])))


class RemoteSearch(_Remote, SearchRecord):
    """A search on the cluster, in progress or ended."""

    def __init__(self, name: str, candidates: Candidates, uri: str | None = None) -> None:
        super().__init__(name, uri)
        self._candidates = candidates

    def __repr__(self) -> str:
        return f"<search {self.name}: {self.status}; {self._uri or 'no directory yet'}>"

    def _view(self) -> Any:
        metric, target = self._candidates.base.metric, self._candidates.search.target
        return make_trial_view(metric.name, metric.mode, target.cost if target else None, print)

    def _show(self, event: Mapping[str, Any], view: Any) -> None:
        if event["kind"] == TRIAL:
            view.show(event["row"])

    def _is_complete(self) -> bool:
        return self.best is not None

    def _show_record(self, view: Any) -> None:
        for row in self.trials.to_pylist():
            view.show(row)
