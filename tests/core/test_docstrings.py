"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ray_dynbs.core

MODULES = sorted(
    module.name for module in pkgutil.walk_packages(ray_dynbs.core.__path__, prefix="ray_dynbs.core.")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    examples = sum(
        len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name))
    )
    assert examples > 10
