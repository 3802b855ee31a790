"""The trainer that users put in place of Ray Train's: what is shown and written around a run."""

from __future__ import annotations

import sys
from typing import Any

from ray_dynbs.cluster.adopted import AdoptedTrainer
from ray_dynbs.report.live import make_view
from ray_dynbs.report.write import write_report


class TorchTrainer(AdoptedTrainer):
    """Ray Train's TorchTrainer for a loop that takes its batches and steps from :func:`ray_dynbs.prepare`.

    Shows every epoch while it trains, and writes the report beside Ray Train's checkpoints, into the folder
    ``ray_dynbs`` of the run.
    """

    __doc__ = f"{__doc__}\n{(AdoptedTrainer.__doc__ or '').partition(chr(10))[2]}"

    def fit(self) -> Any:
        """Train; what Ray Train's ``fit`` returns and raises."""
        print(f"ray_dynbs: decisions and report of this run: {self.record.uri}")
        view = make_view(self.settings.metric.name, None, print)
        self.on_epoch = view.show
        try:
            with view:
                return super().fit()
        finally:
            self._write_report()

    def _write_report(self) -> None:
        """The page beside the run; a run that has trained is not failed by its picture."""
        if not self.record.read_epochs():
            return
        try:
            write_report(self.record)
        except Exception as error:  # noqa: BLE001  # said, and the run's own record is complete
            print(f"ray_dynbs: the report was not written: {type(error).__name__}: {error}", file=sys.stderr)
