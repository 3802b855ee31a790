"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No time limit per example: the machines are shared. Under CI hypothesis' own profile holds, which has
# none either and draws the same examples every time.
settings.register_profile("here", deadline=None)
if not os.environ.get("CI"):
    settings.load_profile("here")
