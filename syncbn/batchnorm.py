"""`SynchronizedBatchNorm1d`, `2d` and `3d`: the layers, and what each call computes with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from replication import CallbackContext, Group, ReplicaAware, ReplicaGroup
from replication.extending import (
    HOOKS,
    dispatch_modes,
    has_other_derivatives,
    has_other_processes,
    lost_derivatives,
    name_in_graph,
    uncompiled,
    unseen_by_checkpoints,
)
from syncbn.arguments import check_group_size, checked_arguments, named, padding_of
from syncbn.by_textbook import normalized_by_textbook
from syncbn.channels import HALF, accumulation_dtype, in_dtype, with_usual_strides
from syncbn.kernels import kernels_for
from syncbn.ranks import normalized_in_rank
from syncbn.replicas import PastCall, normalized_in_replica
from syncbn.statistics import Arguments, CountBatch, Moments, RunningStatistics
from syncbn.textbook import add_in_graph, batch_norm, exact_batch_norm, without

_BatchNorm = nn.modules.batchnorm._BatchNorm

__all__ = [
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "SynchronizedBatchNormNd",
    "set_sbn_eps_mode",
]

#: The buffers with which CSAIL's layers correct the bias of their running statistics.
CORRECTION = frozenset(("_tmp_running_mean", "_tmp_running_var", "_running_iter"))

_eps_mode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Sets how synchronized statistics use ``eps``, for the whole process.

    >>> from syncbn import set_sbn_eps_mode
    >>> set_sbn_eps_mode("clamp")  # before the first step
    >>> set_sbn_eps_mode("plus")

    Args:
        mode: ``"plus"``, the default, divides by ``sqrt(var + eps)``, as `torch.nn.BatchNorm2d`
            does. ``"clamp"`` divides by ``sqrt(max(var, eps))``, as the older toolkit did, for
            models that it trained: outputs are larger by a factor of up to ``sqrt(2)``.
            Evaluation, and training on one device, use ``sqrt(var + eps)`` in both modes.

    Raises:
        ValueError: ``mode`` is neither ``"plus"`` nor ``"clamp"``.
    """
    global _eps_mode
    if mode not in ("plus", "clamp"):
        raise ValueError(f"the eps mode is 'plus' or 'clamp' (got {mode!r})")
    _eps_mode = mode


class SynchronizedBatchNorm(ReplicaAware, _BatchNorm):
    """The base class of the layers for 1, 2 and 3 dimensions.

    In training, the statistics span the layer's group (see `replication.ReplicaAware`). In
    evaluation, and in a group of one, it matches its torch base class bit for bit. A forward
    inside a backward, normally the recomputation of a checkpoint, updates no running statistics.
    In a replica it reuses the recorded moments of the batch and waits for no other replica.

    What a call computes with, from the first line that fits:

    ================================================  =========================================
    traced by `torch.fx`                              nothing yet: it becomes a leaf
    evaluation                                        torch's layer
    evaluation with a mask, no running statistics     the reference, for the shard
    compiled, alone                                   torch's layer; with a mask the reference
    compiled, between ranks                           the reference, with its sum in the graph
    compiled, in replicas, or where torch or options  as uncompiled, out of the graph
    don't let the sum into the graph
    alone                                             torch's layer; with a mask the reference
    with a mask, in clamp mode, or without kernels    the reference, `syncbn.by_textbook`
    in replicas                                       a fast path, `syncbn.replicas`
    between ranks                                     a fast path, `syncbn.ranks`
    ================================================  =========================================

    The reference is the reference implementation, `syncbn.textbook`.
    """

    #: Whether the buffers belong to the original module. On replicas, only copy 0 shares them.
    _has_original_buffers = True
    #: On a replica, its calls in this forward.
    _past_calls: list[PastCall] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        process_group: Any = None,
        group_size: int | None = None,
    ) -> None:
        if not (device is None or isinstance(device, (str, int, torch.device))):
            raise TypeError(
                f"device must be a torch.device, str, int or None (got {type(device).__name__}); "
                "unlike torch.nn.SyncBatchNorm, pass a group by name: process_group="
            )
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # torch 2.6 has no such argument
            self.register_parameter("bias", None)
        check_group_size(group_size)
        self.group_size = group_size
        self.process_group = process_group

    def extra_repr(self) -> str:
        """Describes the layer as torch does, with the ``group_size`` if there is one."""
        text = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.group_size is None else f"{text}, group_size={self.group_size}"

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Connects this copy with the others."""
        super().__data_parallel_replicate__(ctx, copy_id)
        # `self._past_calls = ...` would be slow on a module.
        vars(self)["_has_original_buffers"] = copy_id == 0
        vars(self)["_past_calls"] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in CORRECTION:  # redundant with the running statistics
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _normalize(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalizes ``input``, ``(N, C, ...)``.

        Args:
            input: The shard of this replica or process.
            mask: ``(N, ...)`` in bool, true where a value counts. The others take no part in
                statistics and gradients, and may be NaN. Their outputs and gradients are 0.
        """
        if isinstance(input, Proxy):
            return self._traced(input, mask)
        padding = None if mask is None else padding_of(self, input, mask)
        if not self.training:
            # A training forward may update the original's buffers before the backward of this one.
            is_shared = self._past_calls is not None and self._has_original_buffers
            copies_buffers = is_shared and torch.is_grad_enabled()
            if padding is None:
                return self._alone(input, copies_buffers)
            return self._evaluated_without(padding, input, copies_buffers)
        compiles = torch.compiler.is_dynamo_compiling()
        return (self._trained_in_graph if compiles else self._trained)(input, padding)

    #: A derived class may take other arguments, as for types of `torch.nn.Module`.
    forward: Callable[..., Tensor] = _normalize

    def _traced(self, input: Any, mask: Any) -> Any:
        """Records this layer in a graph of `torch.fx`, as a leaf like the layers of torch."""
        tracer, path = input.tracer, input.tracer.path_of_module(self)
        is_ours = getattr(self.forward, "__func__", None) is SynchronizedBatchNorm.forward
        options = {} if mask is None else {"mask": mask}
        if is_ours and not any(vars(self)[name] for name in HOOKS):
            return tracer.create_proxy("call_module", path, (input,), options)
        # What a derived class and hooks do is traced. A call of the layer, or of the forward of a
        # derived class, would do it again.
        layer = tracer.create_proxy("get_attr", path, (), {})
        return tracer.create_proxy("call_method", "_normalize", (layer, input), options)

    def _alone(self, input: Tensor, copies_buffers: bool = False) -> Tensor:
        """Normalizes as torch's layer does, and half precision with buffers of float32 as well."""
        mean, var = self._buffers.get("running_mean"), self._buffers.get("running_var")
        if mean is None or var is None or not (copies_buffers or input.dtype in HALF):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        parameters: list[Any] = [self.weight, self.bias]
        if input.dtype in HALF:  # parameters in half precision beside such buffers, as of FSDP2
            parameters = [p if p is None else in_dtype(p, mean.dtype) for p in parameters]
        if copies_buffers:
            mean, var = mean.clone(), var.clone()
        if self.training and not self.track_running_stats:
            mean = var = None  # even a momentum of 0 makes them NaN, if a statistic is infinite
        momentum = float(self._count_batch().momentum) if self.training else 0.0
        args = *parameters, self.training, momentum, self.eps
        return nn.functional.batch_norm(input, mean, var, *args)

    def _evaluated_without(
        self, padding: Tensor, input: Tensor, copies_buffers: bool = False
    ) -> Tensor:
        """Normalizes what is no padding with the running statistics, or its own without them."""
        if self._buffers.get("running_mean") is None:
            return self._by_textbook_alone(input, padding)[0]
        # Padding is left out before as well, because the gradient of the weight is a sum over all
        # positions.
        return without(self._alone(without(input, padding), copies_buffers), padding)

    def _by_textbook_alone(self, input: Tensor, padding: Tensor) -> tuple[Tensor, Moments]:
        return exact_batch_norm(*checked_arguments(self, input), lambda sums: sums, padding)

    def _trained_in_graph(self, input: Tensor, padding: Tensor | None) -> Tensor:
        """Trains as `torch.compile` can see it, or breaks its graph."""
        if not self._is_in_replica():
            # `_BatchNorm.forward`, not `super()`: a class that is also derived from a library's
            # batch norm must get the normalization alone, on one device as well.
            if not has_other_processes(self.process_group):
                if padding is None:
                    return self._alone(input)
                y, moments = self._by_textbook_alone(input, padding)
                self._count_batch().update(moments)
                return y
            name, tag = name_in_graph(self.process_group), self.running_mean
            fits_graph = self.group_size is None and self.track_running_stats
            if fits_graph and name is not None and tag is not None:
                arguments = checked_arguments(self, input, _eps_mode == "clamp")
                y, moments = batch_norm(*arguments, partial(add_in_graph, name, tag[:1]), padding)
                self._count_batch().update(moments)
                return y
        return self._trained_out_of_graph(input, padding)

    def _trained(self, input: Tensor, padding: Tensor | None) -> Tensor:
        group = self.group
        if group.size == 1 and padding is None:
            if self.process_group is not None:
                checked_arguments(self, input)
            return self._alone(input)
        clamps = group.size > 1 and _eps_mode == "clamp"
        arguments = checked_arguments(self, input, clamps)
        if group.size > 1 and has_other_derivatives((input, arguments.weight, arguments.bias)):
            raise lost_derivatives(named(self))
        is_counted = self._has_original_buffers and not group.recomputes
        count_batch = self._count_batch if is_counted else RunningStatistics
        if not dispatch_modes():
            return _synchronized(arguments, group, self._past_calls, count_batch, padding)
        with unseen_by_checkpoints():
            return _synchronized(arguments, group, self._past_calls, count_batch, padding)

    # Uncompiled as a whole, because `torch.compile` would compile `self.group` for each layer.
    _trained_out_of_graph = uncompiled(_trained)

    def _count_batch(self) -> RunningStatistics:
        """Counts a batch, and returns the buffers to update with its moments."""
        if not self.track_running_stats:
            return RunningStatistics()
        momentum: Any = float(self.momentum or 0.0)  # of a cumulative average, see below
        buffers = self._buffers  # attributes that torch looks up in Python
        mean = buffers.get("running_mean")
        batches = buffers.get("num_batches_tracked")
        if batches is not None:
            batches.add_(1)
            if self.momentum is None:
                # A cumulative average. As a tensor, it does not make the host wait for a GPU.
                # Divided from a number on the CPU, it takes one launch.
                dtype = accumulation_dtype(torch.float32 if mean is None else mean.dtype)
                momentum = torch.ones((), dtype=dtype, device="cpu") / batches
        return RunningStatistics(mean, buffers.get("running_var"), momentum)


def _synchronized(
    arguments: Arguments,
    group: Group,
    past_calls: list[PastCall] | None,
    count_batch: CountBatch,
    padding: Tensor | None,
) -> Tensor:
    """Normalizes a shard with the moments of the whole batch, by the reference or a fast path."""
    original = arguments.x
    x = original if type(original) is Tensor else original.as_subclass(Tensor)
    if 1 in x.shape:
        x = with_usual_strides(x)
    if x is not original:
        arguments = arguments._replace(x=x)
    if padding is not None and type(padding) is not Tensor:
        padding = padding.as_subclass(Tensor)
    kind = "cpu" if x.is_cpu else x.device.type  # the same, in less time
    kernels: Any = None if arguments.epsilon.clamps else kernels_for(kind)
    if kernels is None or padding is not None:
        y = normalized_by_textbook(arguments, group, count_batch, padding)
    elif type(group) is ReplicaGroup:  # `isinstance` of an abstract class takes calls in Python
        y = normalized_in_replica(arguments, group, kernels, past_calls, count_batch)  # type: ignore[arg-type]
    else:
        y = normalized_in_rank(arguments, group, kernels, count_batch)  # type: ignore[arg-type]
    # A subclass decides what its operations return, such as MONAI's MetaTensor with its metadata.
    return y if type(original) is Tensor else y.view_as(original)


class SynchronizedBatchNormNd(SynchronizedBatchNorm):
    """The counterpart of `torch.nn.SyncBatchNorm`, for inputs of any number of dimensions.

    It takes the arguments of `SynchronizedBatchNorm1d`. It is not derived from torch's class,
    which DistributedDataParallel refuses without a GPU.

    >>> import torch
    >>> from syncbn import SynchronizedBatchNormNd
    >>> layer = SynchronizedBatchNormNd(4)
    >>> layer(torch.randn(8, 4)).shape, layer(torch.randn(2, 4, 6, 6)).shape
    (torch.Size([8, 4]), torch.Size([2, 4, 6, 6]))

    Shape:
        Input and output: ``(N, C, ...)``. Replicas may differ in all but C.
        ``mask``: ``(N, ...)``.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronizedBatchNorm1d(SynchronizedBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose training statistics span all replicas, or all processes.

    It computes ``y = (x - mean) / sqrt(var + eps) * weight + bias`` (Ioffe & Szegedy,
    https://arxiv.org/abs/1502.03167, algorithm 1), where ``mean`` and the biased ``var`` of each
    channel are those of the whole batch: of the shards of all replicas of a forward, or of all
    processes of `torch.distributed`. ``running_var`` is updated with the unbiased variance. Half
    precision is computed in float32, and y has the dtype of x.

    >>> import torch
    >>> from syncbn import SynchronizedBatchNorm1d
    >>> layer = SynchronizedBatchNorm1d(4)
    >>> layer(torch.randn(8, 4)).shape
    torch.Size([8, 4])

    With a mask, what is padding takes no part:

    >>> x, mask = torch.randn(2, 4, 5), torch.arange(5) < torch.tensor([[5], [2]])  # of lengths
    >>> layer(x, mask=mask)[1, :, 2:].any()
    tensor(False)

    Shape:
        Input and output: ``(N, C)`` or ``(N, C, L)``. Replicas may differ in N and L. N may be 0.
        ``mask``: ``(N,)`` or ``(N, L)`` in bool, true where a value counts, as in Keras and Flax
        and unlike torch's ``key_padding_mask``. Statistics and gradients are those of the values
        that count, which a sample or a replica need not have. All others may be NaN. Their outputs
        and gradients are 0. In evaluation as well.

    Args:
        num_features: The number of channels, C.
        eps: Added to the variance (see `set_sbn_eps_mode`).
        momentum: Weight of the new value in running statistics; ``None`` for a cumulative average.
        affine: Whether the layer has ``weight`` and ``bias``.
        track_running_stats: Whether the layer keeps running statistics. Without them, each replica
            also uses the statistics of its shard in evaluation.
        device: The device of parameters and buffers.
        dtype: The dtype of parameters and buffers.
        bias: Whether the layer has a ``bias`` if ``affine``.
        process_group: The group of `torch.distributed`, or the `DeviceMesh` of one dimension,
            whose processes are synchronized; by default all.
        group_size: If given, the copies are synchronized in consecutive groups of this size. The
            last group may be smaller. Running statistics follow the group of the first replica.

    Raises:
        TypeError: An argument, or in a call ``momentum``, has the wrong type.
        ValueError: ``group_size`` is less than 1. In a call: as `torch.nn.BatchNorm1d`, or the
            mask has another size.
        RuntimeError: In a call: device or dtype of parameters or buffers do not match the input.
        NotImplementedError: In a call: the input is not in float16, bfloat16, float32 or float64.
        ReplicationError: In a call: the calls of the replicas or processes do not match. In a
            backward: an activation checkpoint in a replica contains a call with a mask.
    """


class SynchronizedBatchNorm2d(SynchronizedBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose training statistics span all replicas, or all processes.

    It computes, takes and raises what `SynchronizedBatchNorm1d` describes.

    >>> import torch
    >>> from syncbn import SynchronizedBatchNorm2d
    >>> SynchronizedBatchNorm2d(4)(torch.randn(8, 4, 6, 6)).shape
    torch.Size([8, 4, 6, 6])

    Shape:
        Input and output: ``(N, C, H, W)``. Replicas may differ in N, H and W. ``mask``:
        ``(N, H, W)``.
    """


class SynchronizedBatchNorm3d(SynchronizedBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose training statistics span all replicas, or all processes.

    It computes, takes and raises what `SynchronizedBatchNorm1d` describes.

    >>> import torch
    >>> from syncbn import SynchronizedBatchNorm3d
    >>> SynchronizedBatchNorm3d(4)(torch.randn(2, 4, 6, 6, 6)).shape
    torch.Size([2, 4, 6, 6, 6])

    Shape:
        Input and output: ``(N, C, D, H, W)``. Replicas may differ in N, D, H and W. ``mask``:
        ``(N, D, H, W)``.
    """
