"""Anything that a caller may pass by mistake, and what may come of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from replication import Group
from tests.kit.threads import Outcome, outcome_of

#: What a caller can be told. A NotImplementedError is a RuntimeError.
REFUSALS = (TypeError, ValueError, IndexError, RuntimeError)

CPUS = ["cpu", "cpu"]
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


class NoLength:
    """Has items, but does not say how many."""

    def __getitem__(self, index: int) -> Any:
        raise IndexError("no items")


def of_values(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Any], Tensor]:
    return lambda shape: torch.full(shape, value).to(dtype)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

KINDS: dict[str, Callable[[Any], Tensor]] = {
    **{str(dtype): lambda shape, dtype=dtype: torch.randn(shape).to(dtype) for dtype in FLOATS},
    "complex": of_values(1.5, torch.complex64),
    "int": of_values(2, torch.int64),
    "bool": of_values(1, torch.bool),
    "nan": of_values(float("nan")),
    "inf": of_values(float("inf")),
    "sparse": lambda shape: torch.randn(shape).to_sparse(),
    "expanded": lambda shape: torch.ones(()).expand(shape),
    "leaf": lambda shape: torch.randn(shape).requires_grad_(),
}

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
kinds = st.sampled_from(list(KINDS))
tensors = st.builds(lambda kind, shape: KINDS[kind](shape), kinds, shapes)
meta = shapes.map(lambda shape: torch.empty(shape, device="meta"))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.sampled_from([int, torch.float32, object(), NoLength(), CPUS]),
    st.builds(nn.ReLU),  # new ones, as callbacks are registered with them
)
anything = st.one_of(
    scalars,
    tensors,
    meta,
    st.lists(st.one_of(scalars, tensors), max_size=3),
    st.lists(scalars, max_size=3).map(tuple),
    st.lists(scalars, max_size=2).map(iter),
    st.dictionaries(st.text(max_size=2), scalars, max_size=2),
)


def nested(
    leaves: st.SearchStrategy[Any],
    *kinds: Callable[[st.SearchStrategy[Any]], st.SearchStrategy[Any]],
    min_size: int = 0,
) -> st.SearchStrategy[Any]:
    """Lists, tuples and dicts of leaves in each other, and containers of further kinds."""

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, min_size=min_size, max_size=3)
        dicts = st.dictionaries(st.sampled_from("abc"), inner, min_size=min_size, max_size=3)
        return st.one_of(lists, lists.map(tuple), dicts, *(kind(inner) for kind in kinds))

    return st.recursive(leaves, containers, max_leaves=8)


def refused(error: BaseException | None) -> bool:
    """Whether a call was refused; fails where it failed by accident, or without a word."""
    if error is not None:
        assert isinstance(error, REFUSALS), repr(error)
        assert str(error).strip(), f"{type(error).__name__} has no text"
    return error is not None


def quietly(call: Callable[[], Any]) -> Outcome:
    """The outcome; of names that do not occur users are warned, which is no refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome_of(call)


def fingerprint(value: Any) -> Any:
    """What a call could have changed of its arguments."""
    if isinstance(value, Tensor):
        content = repr(value.detach())  # of a few values
        return type(value), value.shape, value.dtype, value.requires_grad, value._version, content
    if isinstance(value, nn.Module):
        state = {name: fingerprint(tensor) for name, tensor in value.state_dict().items()}
        return id(value), value.training, sorted(vars(value)), state
    if isinstance(value, (list, tuple)):
        return type(value), [fingerprint(item) for item in value]
    if isinstance(value, dict):
        return type(value), {key: fingerprint(item) for key, item in value.items()}
    return id(value)


#: Each with an argument that may be anything.
COLLECTIVES: dict[str, Callable[[Group, Any], Any]] = {
    "all_reduce": lambda group, value: group.all_reduce(value),
    "op": lambda group, value: group.all_reduce(X, value),
    "all_gather": lambda group, value: group.all_gather(value),
    "reduce_scatter": lambda group, value: group.reduce_scatter(value),
    "broadcast": lambda group, value: group.broadcast(value),
    "src": lambda group, value: group.broadcast(X, value),
    "split": lambda group, value: group.split(value).size,
}
