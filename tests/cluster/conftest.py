"""One private local cluster per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_dynbs.cluster.session import ray_session


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_session("local"):
        yield
