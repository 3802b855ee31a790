"""The one exception a user's mistake raises."""


class ConfigError(ValueError):
    """The user's input is wrong: one line that says which key, what was found and what is allowed."""
