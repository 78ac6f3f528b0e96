"""The autograd graph of a synchronized layer: one node for all replicas of a call.

    replica i:  moments of x_i ──┐                                          ┌──▶ y_i, filled by i
    replica j:  moments of x_j ──┼─▶ Normalize(x_i, x_j, .., weights, ..) ──┼──▶ y_j, filled by j
                                 │       made by the last to arrive         │
                                 └──────────────────────────────────────────┘

Passes over a shard run in the thread of its replica: the moments before the exchange, normalizing
after it, into the output that the node already has. So nothing of the size of the input is
computed while the others wait.

Backward, the engine calls the node once: one reduction per shard, sums added in replica order, one
pass per shard. No thread waits in it. A queue or a barrier there would deadlock, because the
engine runs all nodes of the CPU on one thread. Between processes each rank has a node for its own
shard, with one collective in backward if its input needs a gradient.

Saved for backward: each x_i, and vectors of length C. The node keeps nothing else, so that several
backwards of one graph, of any kind, may run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from replication._torch import has_other_derivatives, is_batched, sees_saved_tensors
from replication.devices import Streams, current_streams, use_streams
from syncbn.channels import empty_output, in_float64, per_channel, reduced_dims
from syncbn.kernels import Statistics
from syncbn.merge import Denominator, Message, Shard

#: The reply to a replica: values per channel, statistics of the whole batch, and the output. The
#: statistics are None if the output is complete. Both are None for fewer than 2 values.
Reply = tuple[int | Tensor, Statistics | None, Tensor | None]

#: For each shard its gradient of x, weight and bias, where it has one.
Gradients = tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]

#: Stands for a weight that is 0, where a total is divided by the weight by which a kernel
#: multiplies again. The gradient of the output times this vanishes.
_NEXT_TO_ZERO = 1e-20


def synchronized_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    denominator: Denominator,
    exchange: Callable[[Message], Reply],
    joins: bool = False,
) -> Tensor:
    """Normalizes a shard ``(N, C, ...)``, maybe empty, with the moments of the whole batch.

    ``exchange`` sends this replica's message and returns the reply. ``joins`` tells whether the
    shard may be computed together with others. The output has the layout of ``x``.
    """
    parameters = x if weight is None else weight, x if bias is None else bias
    if has_other_derivatives((x, *parameters)):
        raise NotImplementedError(
            "torch.func transforms and forward-mode derivatives do not reach the other copies of "
            "a synchronized layer, so they would be lost; compute them on one device"
        )
    shard = Shard(x, weight, bias, denominator)
    if weight is not None and weight.dtype != shard.dtype:
        weight = weight.to(shard.dtype)
    if bias is not None and bias.dtype != shard.dtype:
        bias = bias.to(shard.dtype)
    if joins:
        message: Message = (shard, x, None, weight, bias)
    else:
        shard.measure(x)
        message = (shard, x, empty_output(x), weight, bias)
    total, stats, output = exchange(message)
    if output is None:
        return _output_below_two_values(total, x, weight, bias)
    if stats is not None and shard.values:
        with torch.no_grad():
            shard.kernels.normalize(x, stats, weight, bias, output)
    return output


def _output_below_two_values(
    total: int | Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Returns the empty output for a batch without values; one value per channel is an error."""
    if total:
        raise ValueError(  # torch's own words, which programs may look for
            f"Expected more than 1 value per channel when training, got input size {x.size()} on "
            f"this replica and {total} value per channel in all of its group; take a larger "
            "batch, or call the layer in eval()"
        )
    # No replica has data. torch defines the result.
    return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)


class Hold(Function):
    """Saves the input of a replica in its own thread, for the joint node.

    Hooks on saved tensors belong to a thread: an activation checkpoint must see what its replica
    saves. The second argument only makes the result require gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


def held(message: Message) -> Message:
    """Returns the message with an input whose node saves it, if this replica has hooks."""
    shard, x, y, weight, bias = message
    if y is None or not shard.records_graph or not sees_saved_tensors():
        return message
    anchor = next((t for t in (weight, bias) if t is not None and t.requires_grad), None)
    z: Tensor = Hold.apply(x, anchor)  # type: ignore[no-untyped-call]
    return shard, z, y, weight, bias


def _holder(x: Tensor) -> Any:
    """Returns the node by which `held` saves the input of a replica, or None."""
    node = x.grad_fn
    return node if type(node) is Hold._backward_cls else None


class Ranks(Protocol):
    """The sums of a backward over all ranks (see `syncbn.processes`)."""

    def summed(self, sums: Tensor) -> Tensor:
        """Adds what all ranks send. Differentiable."""

    def zeros_like_sums(self, sums: Tensor) -> Tensor:
        """Returns zeros that have the derivatives of sums over all ranks. No call."""


class Batch(NamedTuple):
    """What the node of a call knows."""

    shards: Sequence[Shard]
    #: Whether weight, bias, denominator and kernels of all shards are the same.
    are_alike: bool = False
    ranks: Ranks | None = None
    #: For each shard the node that saves its input, if the joint node does not. Not an attribute
    #: of the shard: a replica records shards, and a checkpoint that it kept may refer to it.
    holders: Sequence[Any] = ()
    #: The forward's streams on the devices of all replicas, if there are several.
    streams: Streams | None = None


def connect(batch: Batch, messages: Sequence[Message]) -> list[Tensor]:
    """Returns the outputs of all replicas, connected with their inputs and parameters.

    A replica that records no graph keeps its own output, and its input counts as a constant.
    """
    shards, *columns = zip(*messages, strict=True)
    outputs = list(columns.pop(1))
    if not torch.is_grad_enabled():
        return outputs
    tensors = [
        tensor if shard.records_graph else None
        for column in columns
        for shard, tensor in zip(shards, column, strict=True)
    ]
    recording = [i for i, shard in enumerate(shards) if shard.records_graph]
    batch = batch._replace(
        holders=list(map(_holder, columns[0])),
        streams=current_streams([shard.device for shard in shards]),
    )
    made = _normalize(batch, [outputs[i] for i in recording], *tensors)
    for i, output in zip(recording, made, strict=True):
        outputs[i] = output
    return outputs


class Normalize(Function):
    """Its inputs are x of all replicas, then weights, then biases; its outputs their y."""

    @staticmethod
    def forward(
        ctx: Any, batch: Batch, outputs: list[Tensor], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batch = batch
        n = len(batch.shards)
        xs = [x if h is None else None for h, x in zip(batch.holders, tensors, strict=False)]
        ctx.save_for_backward(*xs, *tensors[n : 2 * n])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        batch: Batch = ctx.batch
        n = len(batch.shards)
        given = iter(of_outputs)
        dys = [next(given) if shard.records_graph else None for shard in batch.shards]
        saved = ctx.saved_tensors
        if batch.ranks is None and not any(dy is not None for dy in dys):
            return (None,) * (2 + 3 * n)  # called by the engine without any gradient
        xs, weights = list(saved[:n]), saved[n:]
        for i, holder in enumerate(batch.holders):
            if holder is not None:
                (xs[i],) = holder.saved_tensors
        is_exact = torch.is_grad_enabled() or any(dy is not None and is_batched(dy) for dy in dys)
        streams = batch.streams or {}
        for dy in dys:
            # It may come from another stream. torch cannot tell this of batched gradients.
            if dy is not None and dy.device in streams and not is_batched(dy):
                dy.record_stream(streams[dy.device])
        with use_streams(streams):
            compute = differentiable_gradients if is_exact else gradients
            dxs, *of_parameters = compute(batch, dys, xs, weights)
            needs = ctx.needs_input_grad[2 + n :]
            for k, grads in enumerate(of_parameters):
                wanted = needs[k * n : (k + 1) * n]
                if batch.are_alike and any(wanted):  # add here, in the accumulation dtype
                    total, taker = added(grads), wanted.index(True)
                    grads[:] = [None] * n
                    if total is not None:
                        grads[taker] = total.to(batch.shards[taker].device)
                grads[:] = [g if w else None for g, w in zip(grads, wanted, strict=True)]
        return None, None, *dxs, *of_parameters[0], *of_parameters[1]


# Without the calls in Python that `Function.apply` makes. Not for a `torch.func` transform.
_normalize: Callable[..., Any] = super(Function, Normalize).apply


def gradients(
    batch: Batch,
    dys: Sequence[Tensor | None],
    xs: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> Gradients:
    """Computes the gradients of all shards by the kernels of their devices."""
    shards = batch.shards
    first = shards[0]
    sums: list[Tensor | None] = [
        None if dy is None or x is None else _reduced(shard, dy, x)
        for shard, dy, x in zip(shards, dys, xs, strict=True)
    ]
    if batch.are_alike:
        total = added(sums)
        assert total is not None  # as an output has a gradient
        total = total.to(first.device)
        sums = [total, *[None] * (len(shards) - 1)]
        totals = [_sloped(total, first)] * len(shards)
    else:
        # Sums cannot be added where weights or kernels differ, but the derivatives with respect to
        # mean and variance of the batch can.
        weights = list(map(_without_zeros, weights))
        factors = [
            s.kernels.derivative_factors(in_float64(s.stats.inverse))
            * (1 if w is None else in_float64(w))
            for s, w in zip(shards, weights, strict=True)
        ]
        derivative = added(
            [
                None if own is None else _sloped(in_float64(own) * factor, shard)
                for shard, own, factor in zip(shards, sums, factors, strict=True)
            ]
        )
        if derivative is None:
            derivative = torch.zeros_like(factors[0])
        if batch.ranks is not None and first.needs_dx:
            derivative = batch.ranks.summed(derivative)
        totals = [derivative.to(factor.device) / factor for factor in factors]
    dxs: list[Tensor | None] = [None] * len(shards)
    rows: dict[tuple[int, int], Tensor] = {}
    for i, (shard, dy, x, weight) in enumerate(zip(shards, dys, xs, weights, strict=True)):
        if x is None or not shard.needs_dx:
            continue
        if not shard.values:
            dxs[i] = torch.empty_like(x)
            continue
        key = id(shard.stats), id(totals[i])  # usually one per device
        if key not in rows:
            total = totals[i].to(shard.device, shard.dtype)
            rows[key] = shard.kernels.rows(total, shard.stats, weight)
        dxs[i] = shard.kernels.input_gradient(dy, x, shard.stats, weight, rows[key])
    dweights = [
        None if own is None else shard.kernels.weight_gradient(own, shard.stats)
        for shard, own in zip(shards, sums, strict=True)
    ]
    return dxs, dweights, [None if own is None else own[0] for own in sums]


def _reduced(shard: Shard, dy: Tensor, x: Tensor) -> Tensor:
    if shard.values:
        return shard.kernels.reduce(dy, x, shard.stats)
    return shard.stats.mean.new_zeros(2, len(shard.stats.mean))


def _sloped(sums: Tensor, shard: Shard) -> Tensor:
    """Returns sums over ``dy`` without the part of a clamped variance, which has no derivative."""
    if not shard.denominator.clamps:
        return sums
    _, var = shard.moments_of(shard.stats)
    slope = shard.denominator.slope(var).to(sums)
    return sums * torch.stack((torch.ones_like(slope), slope))


def _without_zeros(weight: Tensor | None) -> Tensor | None:
    return (
        None if weight is None else weight.masked_fill(weight.abs() < _NEXT_TO_ZERO, _NEXT_TO_ZERO)
    )


def added(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Returns the sum of all that are not None, in order, on the device of the first."""
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    present = [tensor.to(present[0].device) for tensor in present]
    if len(present) > 3:  # two kernels for any number
        return torch.stack(present).sum(0)
    return reduce(torch.add, present)


def differentiable_gradients(
    batch: Batch,
    dys: Sequence[Tensor | None],
    xs: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> Gradients:
    """Computes the gradients of all shards by differentiable operations.

    Mean and variance of the batch have the values of the forward, and derivatives with respect to
    every x. Vectors are in float64, on one device.
    """
    shards = batch.shards
    first = shards[0]
    mean, var = first.moments_of(first.stats)
    n, home = first.stats.total, mean.device
    # Inputs are centered by a value of their own precision, before they are summed.
    center = mean.to(first.dtype)
    off = mean - center.to(mean)
    centered = [None if x is None else x - per_channel(center, x) for x in xs]
    sums = added(
        [
            in_float64(torch.stack((x.sum(dims := reduced_dims(x)), x.square().sum(dims))))
            for shard, x in zip(shards, centered, strict=True)
            if x is not None and shard.needs_dx
        ]
    )
    if sums is not None:
        # Zeros, which have the derivatives of the sums.
        sums = sums - sums.detach() if batch.ranks is None else batch.ranks.zeros_like_sums(sums)
        drift, square = (sums.to(home) / n).unbind()
        var = var + off.square() + square
        off = off + drift
        var = var - off.square()
    dweights: list[Tensor | None] = []
    dbiases: list[Tensor | None] = []
    derivatives: list[Tensor | None] = []
    scales: list[Tensor] = []
    for i, (shard, dy, weight) in enumerate(zip(shards, dys, weights, strict=True)):
        inverse = shard.denominator.of(var).rsqrt()
        scales.append(inverse if weight is None else inverse * in_float64(weight).to(home))
        x = centered[i]
        if x is not None:
            x = centered[i] = x - per_channel(off, x)
        if dy is None or x is None:
            for of_shards in (dweights, dbiases, derivatives):
                of_shards.append(None)
            continue
        dims = reduced_dims(x)
        dy = dy.to(x.dtype)
        dbias, along_x = (in_float64(s).to(home) for s in (dy.sum(dims), (dy * x).sum(dims)))
        dvar = along_x * scales[i] * inverse.square() * shard.denominator.slope(var) / -2
        derivatives.append(torch.stack((-dbias * scales[i], dvar)))
        dweights.append((along_x * inverse).to(shard.device, shard.dtype))
        dbiases.append(dbias.to(shard.device, shard.dtype))
    derivative = added(derivatives)
    if derivative is None:
        derivative = torch.zeros_like(torch.stack((mean, mean)))
    if batch.ranks is not None and first.needs_dx:
        derivative = batch.ranks.summed(derivative)
    shift, slope = (derivative / n).unbind()
    dxs: list[Tensor | None] = [None] * len(shards)
    for i, (shard, dy, x, scale) in enumerate(zip(shards, dys, centered, scales, strict=True)):
        if x is not None and shard.needs_dx:
            dx = per_channel(shift, x) + per_channel(2 * slope, x) * x
            if dy is not None:
                dx = dx + dy * per_channel(scale, x)
            dxs[i] = dx.to(xs[i].dtype)  # type: ignore[union-attr]
    return dxs, dweights, dbiases
