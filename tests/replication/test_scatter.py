"""Splitting arguments between replicas, and joining their outputs."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from replication import Scattered, gather, scatter, scatter_kwargs

CPUS = ["cpu"] * 2
X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: scatter(X, CPUS, 2), r"must have a dimension 2 .*\(got shape \(4, 2\)\)"),
        (lambda: scatter(X, CPUS, -3), r"must have a dimension -3 .*\(got shape \(4, 2\)\)"),
        (
            lambda: scatter((X, X[:3]), CPUS),
            r"`args\[1\]` has length 3 in dimension 0, but the batch \(`args\[0\]`\) has length 4",
        ),
        (lambda: scatter((X[:1], X[:3]), CPUS), r"length 3 .*`args\[0\]`\) has length 1, so"),
        # Of names alone the sizes are unknown, so the two rows could both be of one replica.
        (
            lambda: scatter((Scattered([["a", "b"], []]), X[:2]), CPUS),
            r"length 2 in dimension 0, but the batch \(`args\[0\]`\) does not tell its lengths",
        ),
        (lambda: scatter(X, []), r"at least one device \(got none\)"),
        (lambda: gather([], "cpu"), "at least one replica"),
        (
            lambda: gather([{"x": X.sum()}, {"x": X}], "cpu"),
            r"outputs `x` along dimension 0 \(got shapes \(\) and \(4, 2\)\); .*except_keywords",
        ),
    ],
)
def test_bad_input_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


# -- scatter -----------------------------------------------------------------------------------


@given(samples=st.integers(0, 20), replicas=st.integers(1, 6), dim=st.sampled_from([0, 1, -1]))
def test_parts_equal_chunk(samples, replicas, dim):
    shape = [2, 2]
    shape[dim] = samples
    x = torch.arange(2.0 * samples).view(shape)
    parts = scatter(x, ["cpu"] * replicas, dim)
    expected = x.chunk(replicas, dim) if samples else [x]
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_parts_are_copies_however_many_there_are(length):
    x = torch.zeros(length, 1)
    for part in scatter(x, ["cpu"] * 4):
        part.add_(1)
    assert not x.any()


@pytest.mark.parametrize(("samples", "sizes"), [(1, [1]), (5, [2, 2, 1]), (9, [3, 3, 3])])
@pytest.mark.parametrize("is_first", [False, True])
def test_tensor_as_long_as_the_devices_has_an_entry_per_replica(samples, sizes, is_first):
    """Just as torch splits it, and drops the entries of replicas without data."""
    batch, entries = torch.zeros(samples, 2), torch.arange(4)[:, None]
    parts = scatter((entries, batch) if is_first else (batch, entries), ["cpu"] * 4)
    pairs = [part if is_first else part[::-1] for part in parts]
    assert [(entry.tolist(), len(shard)) for entry, shard in pairs] == [
        ([[i]], size) for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_onto_one_device_tensors_of_different_lengths_go_whole(device):
    x, y, n = torch.zeros(4, 1), torch.zeros(3, 2), torch.tensor(1)
    ((first, second, third),) = scatter((x, y, n), [device])
    assert [t.shape for t in (first, second, third)] == [(4, 1), (3, 2), ()]
    assert {t.device.type for t in (first, second, third)} == {device}


def test_scalar_tensor_goes_whole_to_every_device():
    parts = scatter([torch.zeros(2, 1), torch.tensor(3.0)], ["cpu", torch.device("meta")])
    assert [(len(part[0]), part[0].device.type) for part in parts] == [(1, "cpu"), (1, "meta")]
    assert [(part[1].dim(), part[1].device.type) for part in parts] == [(0, "cpu"), (0, "meta")]


def test_parts_of_a_tensor_with_a_graph_may_be_changed_in_place():
    x = torch.ones(4, requires_grad=True)
    parts = scatter(x * 2, ["cpu"] * 2)
    for part in parts:
        part.mul_(3).add_(1)
    sum(part.sum() for part in parts).backward()
    assert x.grad.tolist() == [6] * 4


# -- scatter_kwargs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs", [(), (1, "a"), (torch.tensor(2.0),)], ids=["none", "objects", "scalar"]
)
def test_arguments_without_a_batch_go_to_one_replica(inputs):
    scattered, kwargs = scatter_kwargs(inputs, {"flag": True}, ["cpu"] * 3)
    assert scattered == (inputs,)
    assert kwargs == ({"flag": True},)


def test_without_devices_arguments_stay_where_they_are():
    x = torch.zeros(2, device="meta")
    ((given,),), (named,) = scatter_kwargs((x,), {"y": [x]}, None)
    assert given is x
    assert named["y"][0] is x


def test_each_replica_has_its_own_keyword_arguments():
    _, kwargs = scatter_kwargs((torch.zeros(2),), {"flag": True}, ["cpu"] * 2)
    kwargs[0]["flag"] = False
    assert kwargs[1]["flag"]


# -- gather ------------------------------------------------------------------------------------


def test_a_name_is_a_whole_key_at_any_depth():
    output = {"score": torch.zeros(1), "scores": {"a": torch.zeros(1)}}
    for name, kept in ("scor", [False] * 2), ("score", [True, False]), ("scores", [False, True]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            joined = gather([output] * 2, "cpu", except_keywords=[name])
        entries = joined["score"], joined["scores"]["a"]
        assert [isinstance(entry, Scattered) for entry in entries] == kept
        assert [str(w.message).partition(",")[0] for w in caught] == (
            [] if any(kept) else ["except_keywords names 'scor'"]
        )
    with pytest.warns(UserWarning, match="names 'x', which the output lacks; it has none"):
        gather([torch.zeros(1)] * 2, "cpu", except_keywords=["x"])


def test_scalars_become_a_vector():
    assert gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1, 2]


def test_minus_one_means_the_cpu_as_in_torch():
    assert gather([torch.zeros(1)], -1).device.type == "cpu"


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_leave_are_copied_from_the_batch_itself(dim):
    """A clone of pinned memory is not pinned, and its copy to an accelerator is slower."""
    batch = torch.randn(4, 4)
    sources = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                sources.append(args[0].untyped_storage().data_ptr())
            assert function is not torch.ops.aten.clone.default
            return function(*args, **(kwargs or {}))

    with Recorder():
        parts = scatter(batch, ["meta"] * 2, dim)
    assert [part.device.type for part in parts] == ["meta"] * 2
    assert sources == [batch.untyped_storage().data_ptr()] * 2
