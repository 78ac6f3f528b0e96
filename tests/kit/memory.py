"""What is freed, copied and pickled."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kit.deadlines import soon


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What is freed in the block was freed by its last reference, and so was in no cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freed(*references: Callable[[], Any]) -> bool:
    """Whether weakly referenced objects are gone, at the latest soon.

    A worker lets go of a call right *after* it has handed over its result, while the caller goes
    on already.
    """
    return soon(lambda: all(reference() is None for reference in references))


def pickled(thing: Any) -> Any:
    """A copy, as another process gets it."""
    return pickle.loads(pickle.dumps(thing))


copied_each_way = pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickled], ids=["copy", "deepcopy", "pickle"]
)
