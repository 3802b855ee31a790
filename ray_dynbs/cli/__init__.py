"""The ``ray-dynbs`` command."""
