"""Training jobs on Ray that choose their own batch size while they run, and stay correct while they do."""

from ray_dynbs.core.manager import DynamicBatchSizeManager

__version__ = "0.1.0"

__all__ = ["DynamicBatchSizeManager", "__version__"]
