"""Exit codes of every command."""

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
