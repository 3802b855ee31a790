"""What a run did, as a page and a picture. Reads run directories only: no torch, no Ray."""

from ray_dynbs.report.write import write_report

__all__ = ["write_report"]
