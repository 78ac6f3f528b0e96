"""Other people's packages, which few tests need."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch


def package(name: str, extra: str = "models") -> Any:
    """Imports a package, which takes seconds, or skips the test."""
    _import_torchvision()
    return pytest.importorskip(name, reason=f"pip install '.[{extra}]'")


@lru_cache
def _import_torchvision() -> None:
    """Imports it before the packages that use it, if it is there."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:  # of the torchvision for CUDA, which lacks operators beside a CPU torch
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
        import_module("torchvision")
