"""Ready-made training tasks, and how a task is found."""
