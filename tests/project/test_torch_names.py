"""All names of torch that the packages use are in the oldest torch that they support.

A list of those names: what is not on it has to be looked up in that torch, and added. It knows
nothing of what tensors and other objects have, nor of arguments of functions.

The steps of a forward have the names and the arguments of torch's own.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather

import replication
import syncbn

#: In torch 2.6, each tried there; what is used where it is there only, behind a question, is not.
NAMES = (Path(__file__).parent.parent / "torch_names.txt").read_text().split()

#: In newer ones, or older ones, and asked for.
ASKED_FOR = {
    "torch.utils._pytree.tree_is_leaf",
    "torch.utils._pytree._is_leaf",
}

SOURCES = [
    path
    for package in (replication, syncbn)
    for path in sorted(Path(package.__file__).parent.rglob("*.py"))
]


def names_in(source: str) -> Iterator[str]:
    """The full names of torch in a module: what it imports, and attributes of that."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch = [a for a in node.names if a.name.split(".")[0] == "torch"]
            known.update({a.asname or "torch": a.name if a.asname else "torch" for a in of_torch})
            yield from (a.name for a in of_torch)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    yield from known.values()

    def full(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = full(node.value)
            return owner and f"{owner}.{node.attr}"
        return None

    yield from filter(None, (full(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)))


def is_there(name: str) -> bool:
    path = name.split(".")
    value: Any = torch
    for depth, part in enumerate(path[1:], 2):
        module = ".".join(path[:depth])
        with suppress(ImportError):
            importlib.import_module(module)
        # A function may have the name of the module it is in.
        if module not in sys.modules and not hasattr(value, part):
            return False
        value = sys.modules[module] if module in sys.modules else getattr(value, part)
    return True


def test_packages_use_only_names_of_the_oldest_supported_torch():
    """The list is sorted, and all names on it are used."""
    used = {name for path in SOURCES for name in names_in(path.read_text())}
    assert sorted(used - ASKED_FOR) == NAMES


def test_names_are_in_this_torch():
    assert [name for name in NAMES if not is_there(name)] == []
    assert not is_there("torch.nn.functional.synchronized_batch_norm")


# -- names of arguments ------------------------------------------------------------------------

STEPS = ("replicate", "scatter", "parallel_apply", "gather")


@pytest.mark.parametrize(
    ("ours", "of_torch"),
    [
        *[(getattr(replication, name), getattr(nn.parallel, name)) for name in STEPS],
        *[(getattr(replication.DataParallel, n), getattr(nn.DataParallel, n)) for n in STEPS],
        (replication.scatter_kwargs, scatter_gather.scatter_kwargs),
        (replication.data_parallel, nn.parallel.data_parallel),
        (replication.DataParallel, nn.DataParallel),
    ],
)
def test_arguments_have_the_names_and_the_order_of_torch(ours, of_torch):
    names = list(inspect.signature(of_torch).parameters)
    assert list(inspect.signature(ours).parameters)[: len(names)] == names
