"""Batches and arguments that batch normalization cannot take: torch's layer is the measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from replication import ProcessGroup
from syncbn import SynchronizedBatchNorm1d
from tests.kit.junk import (
    COLLECTIVES,
    FLOATS,
    KINDS,
    NoLength,
    X,
    anything,
    fingerprint,
    kinds,
    refused,
    shapes,
)
from tests.kit.layers import LAYERS
from tests.kit.properties import examples
from tests.kit.ranks import run_ranks
from tests.kit.shards import run_sharded
from tests.kit.threads import outcome_of

layers = st.fixed_dictionaries(
    {
        "affine": st.booleans(),
        "track_running_stats": st.booleans(),
        "dtype": st.sampled_from(FLOATS),
    }
)
#: Mostly of as many channels as the layers have.
batches = st.one_of(
    st.tuples(st.integers(0, 4), st.just(3), *[st.integers(0, 3)] * extra) for extra in range(5)
).flatmap(lambda shape: st.one_of(st.just(shape), st.just(shape), shapes))


def pair(dims: int, options: dict[str, Any], training: bool) -> tuple[nn.Module, nn.Module]:
    """torch's layer and ours, in a network."""
    plain, synchronized = LAYERS[dims]
    return plain(3, **options).train(training), nn.Sequential(
        synchronized(3, **options).train(training)
    )


def assert_like(actual: Tensor, expected: Tensor) -> None:
    half = expected.dtype in (torch.float16, torch.bfloat16)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


@examples(1.2)
@given(st.sampled_from([1, 2, 3]), layers, kinds, batches, st.booleans())
def test_replicas_accept_and_refuse_the_same_input_as_torchs_layer(
    dims, options, kind, shape, training
):
    plain, net = pair(dims, options, training)
    x = KINDS[kind](shape)
    before = fingerprint(x)
    # Two replicas that see the same batch have its statistics.
    torchs = outcome_of(lambda: plain(torch.cat([x, x]) if x.dim() and training else x))
    ours = outcome_of(lambda: run_sharded(net, [x, x]))
    assert fingerprint(x) == before
    if not refused(ours.error):
        assert torchs.error is None
        y = torchs.value if training else torch.cat([torchs.value] * 2)
        assert_like(torch.cat(ours.value), y)
        return
    if training and x.dim() > 1 and x.size(1) != 3 and not isinstance(torchs.error, ValueError):
        # torch's layer says so in other words, or takes them, without values or parameters.
        assert "expected 3 channels" in str(ours.error)
    elif torchs.error is None:
        assert not x.numel()  # because torch does not look at the dtype of nothing
    else:
        # Where several things are wrong torch names one, and the replicas another.
        several = kind == "sparse" and isinstance(torchs.error, RuntimeError)
        assert isinstance(ours.error, RuntimeError if several else type(torchs.error))
        if "D input" in str(torchs.error):  # the number of dimensions, in torch's words
            assert str(ours.error) == str(torchs.error)
    assert ours.error.__notes__[0].endswith("of 2 on cpu, module `0`")


@examples(0.6)
@given(layers, kinds, batches, st.sampled_from([0, 1]))
def test_a_shard_that_is_refused_is_named_and_the_next_step_is_right(
    options, kind, shape, replica
):
    _, net = pair(1, options, training=True)
    bad = KINDS[kind](shape)
    error = outcome_of(lambda: run_sharded(net, [bad, bad])).error
    assume(error is not None and "more than 1 value" not in str(error))
    plain, net = pair(1, options, training=True)
    good = X.to(options["dtype"])
    mixed = outcome_of(lambda: run_sharded(net, [good, bad] if replica else [bad, good])).error
    assert (type(mixed), str(mixed)) == (type(error), str(error))
    assert mixed.__notes__ == [f"in replica {replica} of 2 on cpu, module `0`"]
    assert_like(torch.cat(run_sharded(net, good.split([2, 4]))), plain(good))
    for name, buffer in plain.named_buffers():
        assert_like(net.state_dict()[f"0.{name}"], buffer)


@pytest.mark.parametrize("value", [None, "abc", [[1.0, 2.0, 3.0]], 3, {"x": 1}], ids=repr)
def test_what_is_no_tensor_is_refused_as_torchs_layer_does(value):
    plain, net = pair(1, {}, training=True)
    expected = outcome_of(lambda: plain(value)).error
    error = outcome_of(lambda: run_sharded(net, [X, value])).error
    assert (type(error), str(error)) == (type(expected), str(expected))
    assert error.__notes__ == ["in replica 1 of 2 on cpu, module `0`"]


looked_at = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 takes more")


@pytest.mark.parametrize(
    "argument",
    [
        "num_features",
        pytest.param("eps", marks=looked_at),
        pytest.param("momentum", marks=looked_at),
        "affine",
        "track_running_stats",
        "dtype",
    ],
)
@examples(0.2)
@given(value=anything)
def test_layer_takes_the_arguments_of_torchs_layer(argument, value):
    """What it refuses when it is made or when it runs, and in evaluation, as torch's."""
    options = {"num_features": 3, argument: value}
    plain = outcome_of(lambda: nn.BatchNorm1d(**options))
    ours = outcome_of(lambda: SynchronizedBatchNorm1d(**options))
    assert type(ours.error) is type(plain.error)
    if plain.error is None:
        expected = outcome_of(lambda: plain.value(X))
        for shards in ([X], [X[:2], X[2:]]):
            actual = outcome_of(lambda shards=shards: run_sharded(ours.value, shards))
            assert (actual.error is None) is (expected.error is None)
            if expected.error is None:
                assert_like(torch.cat(actual.value), expected.value)


# -- processes ---------------------------------------------------------------------------------


def refusals(rank: int) -> list[str]:
    """Returns the errors of bad input in rank 1, while rank 0 does not wait, and a later sum."""
    texts = []
    if rank == 1:
        bad = [None, "x", -1, [X], NoLength(), X.to_sparse()]
        for name in COLLECTIVES:
            for value in bad:
                outcome = outcome_of(lambda n=name, v=value: COLLECTIVES[n](ProcessGroup(), v))
                texts.append(f"{name}: {type(outcome.error).__name__}: {outcome.error}")
    total = ProcessGroup().all_reduce(torch.ones(1))
    return [*texts, str(total.item())]


@pytest.mark.slow
def test_rank_refuses_bad_input_before_waiting():
    (total,), (*texts, same) = run_ranks(2, refusals)
    assert total == same == "2.0"
    for text in texts:
        _, kind, words = text.split(": ", 2)
        assert kind in ("TypeError", "ValueError"), text
        assert "`ProcessGroup`, rank 1: " in words, text


# -- examples ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"affine": False, "track_running_stats": False}], ids=str)
def test_float8_is_not_implemented_as_in_torchs_layer(options):
    x = X.to(torch.float8_e4m3fn)
    error = outcome_of(lambda: run_sharded(SynchronizedBatchNorm1d(3, **options), [x, x])).error
    assert isinstance(error, NotImplementedError)
