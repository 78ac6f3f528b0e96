"""`bn(x, mask=mask)`, alone, in replicas and in ranks: against the values without padding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from replication import DataParallel, ReplicasDiverged, ReplicationError
from replication._torch import COMPILES_COLLECTIVES
from syncbn import SynchronizedBatchNormNd, verify
from tests.kit import oracle
from tests.kit.devices import several
from tests.kit.padded import (
    EXACT,
    NAN,
    Masked,
    assert_same,
    expected,
    mask_of,
    padded,
    spread,
    stepped,
    valid,
)
from tests.kit.properties import pairwise
from tests.kit.ranks import needs_gloo, run_ranks
from tests.kit.shards import assert_reads_no_value, channels_last, eps_mode
from tests.kit.threads import outcome_of

#: What follows the channels in the shape of a batch, by its dimensions.
SHAPES = {0: (), 1: (6,), 2: (4, 3), 3: (2, 3, 2)}


class InCheckpoint(nn.Module):
    def __init__(self, net: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.net, x, mask, use_reentrant=self.use_reentrant)


def in_replicas(net: nn.Module, count: int = 3) -> nn.Module:
    return DataParallel(net, several(count))


def alone(net: nn.Module) -> nn.Module:
    return net


#: What runs a network.
RUNS = {"alone": alone, "in one replica": partial(in_replicas, count=1), "in three": in_replicas}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


# -- numbers -----------------------------------------------------------------------------------


@pairwise(
    dims=SHAPES,
    layout=[torch.clone, channels_last],
    mean=[0.0, 1e6],
    options=[{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}],
    run=RUNS.values(),
)
def test_padding_takes_no_part(dims, layout, mean, options, run):
    """What is padding is NaN, in x and in the gradient of y."""
    net = Masked(dims=dims, dtype=torch.float64, **options)
    x = layout(torch.randn(7, 3, *SHAPES[dims], dtype=torch.float64) * 2 + mean)
    mask, dy = mask_of(7, SHAPES[dims]), torch.randn_like(x)
    wanted = expected(net.bn, x, mask, dy)
    found = stepped(run(net), net.bn, padded(x, mask), mask, padded(dy, mask))
    # A deviation of 2 at a mean of 1e6 has 10 of 16 digits.
    assert_same(found, wanted, **(EXACT if not mean else {"rtol": 1e-9, "atol": 1e-8}))
    if run is alone:
        assert found[0].stride() == found[1].stride() == x.stride()


@each_run
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
def test_errors_are_at_most_twice_those_of_torchs_layer(run, mean):
    """Of the values without padding, in float32."""
    net, plain = Masked(), nn.BatchNorm1d(3)
    plain.load_state_dict(net.bn.state_dict())
    x, dy = torch.randn(2, 12, 3, 40) + torch.tensor([mean, 0.0]).view(2, 1, 1, 1)
    mask = mask_of(12, (40,))
    exact = expected(net.bn, x, mask, dy)
    leaf = valid(x, mask).float().requires_grad_()
    y = plain(leaf)
    y.backward(valid(dy, mask).float())
    theirs = [spread(y.detach(), mask), spread(leaf.grad, mask), plain.weight.grad]
    theirs += [plain.bias.grad, plain.running_mean, plain.running_var]
    found = stepped(run(net), net.bn, padded(x, mask), mask, dy)
    for own, other, want in zip(found, theirs, exact, strict=True):
        ulp = torch.finfo(torch.float32).eps * want.abs().max()
        assert (own - want).abs().max() <= 2 * (other - want).abs().max() + 2 * ulp


@each_run
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_parameters", [torch.float32, "of x"])
def test_half_precision_is_rounded_once(run, dtype, of_parameters):
    net = Masked(dtype=dtype if of_parameters == "of x" else of_parameters)
    x, dy = (torch.randn(7, 3, 6) * 3 + 10).to(dtype), torch.randn(7, 3, 6).to(dtype)
    mask = mask_of(7, (6,))
    wanted = expected(net.bn, x, mask, dy)
    found = stepped(run(net), net.bn, padded(x, mask), mask, padded(dy, mask))
    assert [t.dtype for t in found[:2]] == [dtype, dtype]
    if run is in_replicas and of_parameters == "of x":
        del found[2:], wanted[2:]  # the gradients of parameters are rounded in each replica
    eps = torch.finfo(dtype).eps
    assert_same(found, wanted, rtol=eps, atol=eps / 16)


@each_run
@pytest.mark.parametrize("track", [True, False])
def test_evaluation(run, track):
    """With running statistics, or those of what a shard has."""
    net = Masked(track_running_stats=track, dtype=torch.float64)
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    mask, dy = mask_of(7, (6,)), torch.randn_like(x)
    if track:
        net(x)
    net.eval()
    samples = [7] if track or run is not in_replicas else [3, 3, 1]
    wanted = []
    twin = copy.deepcopy(net)
    for shard, own, upstream in zip(*(t.split(samples) for t in (x, mask, dy)), strict=True):
        leaf = valid(shard, own).requires_grad_()
        y = twin.bn(leaf)
        y.backward(valid(upstream, own))
        wanted.append((spread(y.detach(), own), spread(leaf.grad, own)))
    ys, dxs = (torch.cat(parts) for parts in zip(*wanted, strict=True))
    gradients = [parameter.grad for parameter in twin.parameters()]
    found = stepped(run(net), net.bn, padded(x, mask), mask, padded(dy, mask))
    assert_same(found[:4], [ys, dxs, *gradients], **EXACT)
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=0)


@each_run
def test_any_derivative(run):
    net = Masked(2, dtype=torch.float64)
    model, mask = run(net), mask_of(7, (3,))
    x = torch.randn(7, 2, 3, dtype=torch.float64).requires_grad_()
    weight, bias = net.bn.weight, net.bn.bias

    def forward(x: Tensor, *parameters: Tensor) -> Tensor:
        return model(padded(x, mask), mask)

    assert gradcheck(forward, (x, weight, bias))
    assert gradgradcheck(forward, (x, weight, bias))


@each_run
def test_clamp_mode(run):
    """Which holds for statistics of several copies."""
    net = Masked(eps=0.5, dtype=torch.float64)
    x, mask = torch.randn(7, 3, 6, dtype=torch.float64), mask_of(7, (6,))
    x *= torch.tensor([0.01, 1.0, 3.0]).view(3, 1)
    dy, clamps = torch.randn_like(x), run is in_replicas
    parameters = net.bn.weight.detach(), net.bn.bias.detach()
    batch = [valid(x, mask)], [valid(dy, mask)]
    exact = oracle.batch_norm(*batch, *parameters, eps=0.5, clamps=clamps)
    with eps_mode("clamp"):
        y, dx, *_ = stepped(run(net), net.bn, padded(x, mask), mask, dy)
    assert_same(
        [valid(y, mask), valid(dx, mask)], [exact.outputs[0], exact.input_grads[0]], **EXACT
    )


@each_run
def test_nothing_counts(run):
    """The outputs and the gradients are zeros, and the running statistics stay."""
    net = Masked()
    before = copy.deepcopy([net.bn.running_mean, net.bn.running_var])
    x, mask = torch.full((6, 3, 4), NAN), torch.zeros(6, 4, dtype=torch.bool)
    for tensor in stepped(run(net), net.bn, x, mask, torch.randn(6, 3, 4))[:4]:
        assert not tensor.any()
    assert_same([net.bn.running_mean, net.bn.running_var], [t.double() for t in before])
    assert net.bn.num_batches_tracked == 1  # as after an empty batch of torch's layer


@each_run
def test_one_value_is_refused_as_torchs_layer_does(run):
    net, mask = Masked(), torch.zeros(6, 4, dtype=torch.bool)
    mask[5, 1] = True
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        run(net)(torch.randn(6, 3, 4), mask)


def test_any_number_of_dimensions_and_no_mask():
    layer = SynchronizedBatchNormNd(3).double()
    x = torch.randn(4, 3, 2, 2, 2, 2, dtype=torch.float64)
    y = layer(x, torch.ones(4, 2, 2, 2, 2, dtype=torch.bool))
    torch.testing.assert_close(y, layer(x, mask=None), **EXACT)


@each_run
def test_the_host_waits_for_no_value(run):
    """Reading one raises on the meta device: forward, backward and second derivatives."""
    net = Masked(momentum=None).to("meta")
    model = DataParallel(net, ["meta"] * 3) if run is in_replicas else net
    x = torch.randn(7, 3, 6, device="meta").requires_grad_()
    mask = torch.ones(7, 6, dtype=torch.bool, device="meta")
    assert_reads_no_value(partial(model, mask=mask), net.bn.weight, x, second=True)


# -- what is refused ---------------------------------------------------------------------------

GOOD = torch.ones(6, 4, dtype=torch.bool, device="cpu")
BAD = {
    "a list": (TypeError, "torch.bool, .* \\(got list\\)", [[True] * 4] * 6),
    "numbers": (TypeError, "\\(got Tensor of torch.float32\\); pass mask.bool", GOOD.float()),
    "lengths": (TypeError, "lengths\\[:, None\\]", torch.tensor([4] * 6)),
    "channels": (ValueError, "\\[6, 4\\] \\(got \\[6, 1, 4\\]", GOOD[:, None]),
    "one sample": (ValueError, "got \\[1, 4\\] for an input of \\[6, 3, 4\\]", GOOD[:1]),
    "elsewhere": (RuntimeError, "on cpu, as its input \\(got meta\\)", GOOD.to("meta")),
}


@pytest.mark.parametrize(("kind", "text", "mask"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_that_does_not_fit(kind, text, mask, training):
    net = Masked().train(training)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(kind, match=f"^SynchronizedBatchNorm1d takes a mask.*{text}"):
        net(torch.randn(6, 3, 4), mask)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


class Chosen(Masked):
    """The replicas of some numbers get another mask."""

    def __init__(self, others: dict[int, Any]) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        number = int(x.detach().flatten()[0])
        return super().forward(x, self.others.get(number, mask))


def numbered(*sizes: int) -> Tensor:
    """A batch whose values begin with the number of the replica."""
    parts = [torch.randn(size, 3, 4) for size in sizes]
    for number, part in enumerate(parts):
        part[0, 0, 0] = number
    return torch.cat(parts)


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_replica_whose_mask_does_not_fit_is_named(replica):
    net = Chosen({replica: GOOD[:2].float()})
    model = in_replicas(net)
    with pytest.raises(TypeError, match=r"takes a mask in torch\.bool") as caught:
        model(numbered(2, 2, 2), GOOD)
    assert caught.value.__notes__[0].startswith(f"in replica {replica} of 3")
    net.others = {}
    assert model(numbered(2, 2, 2), GOOD).isfinite().all()


def test_a_mask_in_some_replicas_only_is_named():
    net = Chosen({1: None})
    model = in_replicas(net)
    with pytest.raises(ReplicasDiverged, match=r"`bn`, call 1.*replicas 0, 2: .*, mask=True\) of"):
        model(numbered(2, 2, 2), GOOD)
    net.others = {}
    assert model(numbered(2, 2, 2), GOOD).isfinite().all()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_in_a_replica_is_refused_before_any_waiting(use_reentrant):
    model = in_replicas(InCheckpoint(Masked(), use_reentrant))
    y = model(torch.randn(6, 3, 4, requires_grad=True), GOOD)
    with pytest.raises(ReplicationError, match=r"`net.bn`.*cannot recompute a call with a mask"):
        y.sum().backward()


# -- other programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_on_one_device_counts_the_batch_once(use_reentrant):
    net = Masked().double()
    x, mask, dy = torch.randn(7, 3, 6).double(), mask_of(7, (6,)), torch.randn(7, 3, 6).double()
    wanted = expected(net.bn, x, mask, dy)
    found = stepped(InCheckpoint(net, use_reentrant), net.bn, padded(x, mask), mask, dy)
    assert_same(found, wanted, **EXACT)
    assert net.bn.num_batches_tracked == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_traced_layer_keeps_its_mask(training):
    net = Masked().double().train(training)
    traced = fx.symbolic_trace(net, concrete_args=None)
    leaf = next(node for node in traced.graph.nodes if node.target == "bn")
    assert list(leaf.kwargs) == ["mask"]
    x, mask = torch.randn(7, 3, 6).double(), mask_of(7, (6,))
    y = in_replicas(copy.deepcopy(traced))(padded(x, mask), mask)
    torch.testing.assert_close(y, net(x, mask), **EXACT)


def test_an_exported_evaluation():
    net = Masked().double()
    x, mask = torch.randn(7, 3, 6).double(), mask_of(7, (6,))
    net(x)
    length = torch.export.Dim("length", min=2, max=50)
    shapes = {"x": {2: length}, "mask": {1: length}}
    exported = torch.export.export(net.eval(), (x, mask), dynamic_shapes=shapes).module()
    for part in (slice(6), slice(3)):
        batch = padded(x, mask)[..., part], mask[:, part]
        torch.testing.assert_close(exported(*batch), net(*batch), **EXACT)


def test_a_compiled_step_is_one_graph_for_any_mask():
    net = Masked().double()
    graphs = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = torch.compile(net, fullgraph=True, backend=backend)
    for seed in range(4):
        twin = copy.deepcopy(net)
        x, dy = torch.randn(2, 7, 3, 6).double() + 50
        mask = mask_of(7, (6,), seed)
        found = stepped(model, net.bn, padded(x, mask), mask, dy)
        assert_same(found, stepped(twin, twin.bn, x, mask, dy), rtol=1e-11, atol=1e-11)
    assert len(graphs) == 1
    torch.compiler.reset()


def test_verify_proves_it():
    x, mask = torch.randn(7, 3, 6), mask_of(7, (6,))
    assert verify(Masked(), (x, mask), ["cpu"] * 3)


# -- ranks -------------------------------------------------------------------------------------

#: Lengths of the samples of each rank: uneven, no valid position, no sample.
LENGTHS = [[[6, 2, 5], [3]], [[6, 1], [0, 0], [4, 2, 2]], [[5, 5], [], [1]]]


def shards_of(lengths: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """The input, its mask and an upstream gradient of each rank, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    shards = []
    for own in lengths:
        x, dy = torch.randn(2, len(own), 3, 6, generator=generator).double() * 3 + 20
        shards.append([x, torch.arange(6) < torch.tensor(own).view(-1, 1), dy])
    return shards


def layer_of_ranks(**options: Any) -> Masked:
    torch.manual_seed(2)
    return Masked(dtype=torch.float64, **options)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda net: net,
    "in a checkpoint": InCheckpoint,
    "in a reentrant checkpoint": partial(InCheckpoint, use_reentrant=True),
}
if COMPILES_COLLECTIVES:  # from torch 2.13 on
    WRAPS["compiled"] = partial(torch.compile, fullgraph=True, backend="aot_eager")


def steps_of_rank(rank: int, lengths: Any) -> dict[str, list[Tensor]]:
    warnings.simplefilter("ignore")  # the compiler's own
    x, mask, dy = shards_of(lengths)[rank]
    found = {}
    for name, wrap in WRAPS.items():
        net = layer_of_ranks()
        found[name] = stepped(wrap(net), net.bn, padded(x, mask), mask, padded(dy, mask))
    torch.compiler.reset()
    return found


@needs_gloo
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_ranks_have_the_numbers_of_one_device(lengths):
    shards = shards_of(lengths)
    batch = [torch.cat(tensors) for tensors in zip(*shards, strict=True)]
    net = layer_of_ranks()
    y, dx, dweight, dbias, *buffers = expected(net.bn, *batch)
    ranks = run_ranks(len(lengths), steps_of_rank, lengths)
    for wrap in WRAPS:
        ys, dxs, dweights, dbiases, *all_buffers = zip(
            *(rank[wrap] for rank in ranks), strict=True
        )
        found = [torch.cat(ys), torch.cat(dxs), sum(dweights), sum(dbiases)]
        assert_same(found, [y, dx, dweight, dbias], rtol=1e-11, atol=1e-11)
        for wanted, on_ranks in zip(buffers, all_buffers, strict=True):
            assert_same(on_ranks, [wanted] * len(lengths), rtol=1e-11, atol=1e-11)


def second_derivatives_of_rank(rank: int) -> list[Tensor]:
    x, mask, dy = shards_of(LENGTHS[0])[rank]
    net, x, dy = layer_of_ranks(), x.requires_grad_(), dy.requires_grad_()
    (dx,) = torch.autograd.grad(net(padded(x, mask), mask), x, dy, create_graph=True)
    return list(torch.autograd.grad(dx.sin().sum(), [x, dy, net.bn.weight]))


@needs_gloo
def test_second_derivatives_of_ranks():
    batch = [torch.cat(tensors) for tensors in zip(*shards_of(LENGTHS[0]), strict=True)]
    x, mask, dy = batch
    leaves = [valid(x, mask).requires_grad_(), valid(dy, mask).requires_grad_()]
    weight = layer_of_ranks().bn.weight
    y = nn.functional.batch_norm(leaves[0], None, None, weight, None, True)
    (dx,) = torch.autograd.grad(y, leaves[0], leaves[1], create_graph=True)
    wanted = torch.autograd.grad(dx.sin().sum(), [*leaves, weight])
    dxs, ddys, dweights = zip(*run_ranks(2, second_derivatives_of_rank), strict=True)
    images = [valid(torch.cat(parts), mask) for parts in (dxs, ddys)]
    assert_same([*images, sum(dweights)], wanted, rtol=1e-10, atol=1e-10)


@needs_gloo
def test_a_mask_on_some_ranks_only_is_named_on_all():
    ranks = run_ranks(2, _first_refusal)
    for text in ranks:
        assert text.startswith("ReplicasDiverged: `SynchronizedBatchNorm1d`: the calls do not")
        assert "rank 1: `SynchronizedBatchNorm1d`, call 1: batch_norm(eps=1e-05, " in text
        assert "mask=True) of float32 [3]" in text


def _first_refusal(rank: int) -> str:
    error = outcome_of(lambda: Masked()(torch.randn(2, 3, 4), GOOD[:2] if rank else None)).error
    return f"{type(error).__name__}: {error}"


def _misfit(rank: int) -> str:
    """On every rank, each before it waits for the others."""
    error = outcome_of(lambda: Masked()(torch.randn(2, 3, 4), GOOD[: 1 + rank * 2])).error
    return f"{type(error).__name__}: {error}"


@needs_gloo
def test_masks_that_do_not_fit_are_refused_on_each_rank():
    for text in run_ranks(2, _misfit):
        assert text.startswith("ValueError: SynchronizedBatchNorm1d takes a mask of the input's")
