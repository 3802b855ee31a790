"""Training jobs on Ray that choose their own batch size while they run, and stay correct while they do."""

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

from ray_dynbs.core.errors import ConfigError
from ray_dynbs.core.manager import DynamicBatchSizeManager

if TYPE_CHECKING:
    from ray_dynbs.api.following import RunFailedError
    from ray_dynbs.api.remote import attach, connect, disconnect, train, tune
    from ray_dynbs.api.trainer import TorchTrainer
    from ray_dynbs.cluster.run import prepare

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DynamicBatchSizeManager",
    "RunFailedError",
    "TorchTrainer",
    "__version__",
    "attach",
    "connect",
    "disconnect",
    "prepare",
    "train",
    "tune",
]

_REMOTE = ("attach", "connect", "disconnect", "train", "tune")
_PLACES = {
    "RunFailedError": "ray_dynbs.api.following",
    "TorchTrainer": "ray_dynbs.api.trainer",
    "prepare": "ray_dynbs.cluster.run",
    **dict.fromkeys(_REMOTE, "ray_dynbs.api.remote"),
}


def __getattr__(name: str) -> Any:
    """What needs torch and Ray is imported when it is asked for: the manager needs neither."""
    if name in _PLACES:
        # In a notebook, importing Ray asks for a package that Ray's own widgets would need.
        logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
