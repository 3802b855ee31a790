"""The configuration: YAML as typed models, every key known, every error one line."""

from ray_dynbs.config.load import load_config
from ray_dynbs.config.schema import Config

__all__ = ["Config", "load_config"]
