"""Training jobs on Ray that choose their own batch size while they run, and stay correct while they do."""

from typing import TYPE_CHECKING, Any

from ray_dynbs.core.manager import DynamicBatchSizeManager

if TYPE_CHECKING:
    from ray_dynbs.api.trainer import TorchTrainer
    from ray_dynbs.cluster.run import prepare

__version__ = "0.1.0"

__all__ = ["DynamicBatchSizeManager", "TorchTrainer", "__version__", "prepare"]


def __getattr__(name: str) -> Any:
    """What needs torch and Ray is imported when it is asked for: the manager needs neither."""
    if name == "TorchTrainer":
        from ray_dynbs.api.trainer import TorchTrainer

        return TorchTrainer
    if name == "prepare":
        from ray_dynbs.cluster.run import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
