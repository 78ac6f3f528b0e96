"""`SynchronizedBatchNorm1d`, `2d` and `3d`: batch normalization over the batch of all replicas."""

from __future__ import annotations

from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from replication import CallbackContext, Group, ReplicaAware, ReplicaGroup
from replication._torch import beside_selective_checkpoints, uncompiled
from replication.devices import is_int
from replication.errors import path_or_root
from replication.groups.base import Layouts
from syncbn.graph import (
    Denominator,
    GlobalMoments,
    LocalMoments,
    output_without_moments,
    synchronized_batch_norm,
)
from syncbn.joining import ShardInput, ShardOutput, is_small, replies_to
from syncbn.processes import merge_ranks
from syncbn.recomputation import RecordedCalls

_BatchNorm = nn.modules.batchnorm._BatchNorm

if TYPE_CHECKING:
    _Base = _BatchNorm
else:
    _Base = object

__all__ = [
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "set_sbn_eps_mode",
]

#: The buffers with which CSAIL's layers correct the bias of their running statistics.
CORRECTION = frozenset(("_tmp_running_mean", "_tmp_running_var", "_running_iter"))

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_eps_mode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Chooses how ``eps`` enters where statistics are synchronized, for the whole process.

    Args:
        mode: ``"plus"``, the default: the deviation is divided by ``sqrt(var + eps)``, as
            `torch.nn.BatchNorm2d` does. ``"clamp"``: by ``sqrt(max(var, eps))``, as the older
            toolkit did, to go on with what was trained with it. The two differ by a factor of up
            to ``sqrt(2)``, where ``var`` is as small as ``eps``. Evaluation, and training on one
            device, use ``sqrt(var + eps)`` in either mode; so did the older toolkit.

    Raises:
        ValueError: Another mode.
    """
    global _eps_mode
    if mode not in ("plus", "clamp"):
        raise ValueError(f"the eps mode is 'plus' or 'clamp' (got {mode!r})")
    _eps_mode = mode


def check_group_size(size: int | None) -> None:
    """Raises TypeError or ValueError on what is no size of a group."""
    if size is not None and not is_int(size):
        raise TypeError(f"group_size must be an int or None (got {size!r})")
    if size is not None and size < 1:
        raise ValueError(f"group_size must be at least 1 (got {size})")


class SynchronizedBatchNorm(ReplicaAware, _Base):
    """What the layers for 1, 2 and 3 dimensions have in common: everything but the name.

    In training the statistics are those of the layer's group (see `replication.ReplicaAware`): of
    all replicas made by a `replication.DataParallel`, or a patched one; or else of all processes,
    where `torch.distributed` is initialized. In evaluation, and where the layer is alone, it is
    the `torch.nn.BatchNorm` that it is derived from, bit for bit.

    A forward inside a backward, which is the recomputation of an activation checkpoint as a rule,
    does not update running statistics. In a replica it waits for nobody: it uses the moments of
    the batch again, which the copy has kept.
    """

    # Copy 0's are those of the original module.
    _has_lasting_buffers = True
    # Of a copy.
    _recorded_calls: RecordedCalls | None = None

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
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:  # as a keyword of torch's own constructor it is newer than torch 2.4
            self.register_parameter("bias", None)
        check_group_size(group_size)
        self.group_size = group_size
        self.process_group = process_group

    def extra_repr(self) -> str:
        """As `torch.nn.BatchNorm2d`, and the ``group_size`` if there is one."""
        text = super().extra_repr()  # type: ignore[no-untyped-call]
        return text if self.group_size is None else f"{text}, group_size={self.group_size}"

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        """Connects this copy with the others."""
        super().__data_parallel_replicate__(ctx, copy_id)
        if self._replica_group is not None:
            self._has_lasting_buffers = copy_id == 0
            self._recorded_calls = RecordedCalls(f"`{path_or_root(ctx.path)}`, replica {copy_id}")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in CORRECTION:  # they repeat the running statistics, with a weight
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return self._evaluated(input)
        group = self.group
        return super().forward(input) if group.size == 1 else self._synchronized(input, group)

    @uncompiled  # its nodes speak to each other beside the graph
    def _synchronized(self, input: Tensor, group: Group) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        weight, bias = self.weight, self.bias  # once: a parametrization computes them anew
        self._check_synchronized_input(input, weight, bias)
        denominator = Denominator(self.eps, clamps=_eps_mode == "clamp")
        if isinstance(group, ReplicaGroup) and is_small(input) and not group.recomputes:
            part = ShardInput(input, weight, bias, denominator)
            reply: ShardOutput = self._sent(group, part, input.dtype, requires_grad=True)
            if reply.y is None:
                return output_without_moments(reply.whole, input, weight, bias)
            return reply.y
        with beside_selective_checkpoints():
            y, whole = synchronized_batch_norm(
                input,
                weight,
                bias,
                denominator,
                partial(self._exchange, group, input.dtype),
            )
            # In replicas the first has done so in `_replies_to`.
            if not isinstance(group, ReplicaGroup) and not group.recomputes:
                self._update_running_statistics(whole)
        return y

    def _sent(
        self,
        group: ReplicaGroup,
        message: LocalMoments | ShardInput,
        dtype: torch.dtype,
        requires_grad: bool,
    ) -> Any:
        """The reply: a `GlobalMoments` to a `LocalMoments`, a `ShardOutput` to a `ShardInput`."""
        merge, layouts = partial(self._replies_to, group), self._layouts(dtype)
        return group.exchange(
            "batch_norm", message, merge, layouts=layouts, requires_grad=requires_grad
        )

    def _layouts(self, dtype: torch.dtype) -> Layouts:
        """What must be alike in all copies."""
        return ((dtype, (self.num_features,)),)

    def _replies_to(
        self, group: ReplicaGroup, messages: list[LocalMoments | ShardInput]
    ) -> list[GlobalMoments | ShardOutput]:
        """Called in the first copy, while the others wait: so it has Python for itself."""
        replies = replies_to(messages)
        if self._has_lasting_buffers and not group.recomputes:
            first = replies[0]
            whole = first if isinstance(first, GlobalMoments) else first.whole
            group.commit(partial(self._update_running_statistics, whole))
        return replies

    def _evaluated(self, input: Tensor) -> Tensor:
        is_shared = self._recorded_calls is not None and self._has_lasting_buffers
        if not (is_shared and self.track_running_stats and torch.is_grad_enabled()):
            return super().forward(input)
        # What a training forward writes into the original's statistics, before this one's backward
        # has used them, must not concern it.
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        mean, var = (
            None if b is None else b.clone() for b in (self.running_mean, self.running_var)
        )
        return nn.functional.batch_norm(
            input, mean, var, self.weight, self.bias, mean is None and var is None, eps=self.eps
        )

    def _exchange(self, group: Group, dtype: torch.dtype, shard: LocalMoments) -> GlobalMoments:
        """Merges the moments of all copies: among threads one of them does, processes do alike."""
        if not isinstance(group, ReplicaGroup):
            return merge_ranks(group, shard, self._layouts(dtype))
        assert self._recorded_calls is not None  # as it has the group
        if group.in_later_backward:
            return self._recorded_calls.recall(shard, dtype)
        whole: GlobalMoments = self._sent(group, shard, dtype, shard.moments.requires_grad)
        self._recorded_calls.keep(shard, whole)
        return whole

    def _check_synchronized_input(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        """Raises on what torch's kernels would refuse, before anyone waits for this replica."""
        name = type(self).__name__
        if input.size(1) != self.num_features:
            raise ValueError(
                f"{name} expected {self.num_features} channels in dimension 1 (got input size "
                f"{input.size()}); for such inputs num_features is {input.size(1)}"
            )
        if input.dtype not in _DTYPES:
            raise NotImplementedError(f"{name} is not implemented for inputs of {input.dtype}")
        momentum = self.momentum
        if not (momentum is None or isinstance(momentum, (Real, Tensor))) or (
            isinstance(momentum, Tensor) and momentum.requires_grad
        ):
            raise TypeError(f"momentum must be a number or None (got {momentum!r})")
        allowed = {input.dtype}
        if input.dtype in (torch.float16, torch.bfloat16):
            allowed.add(torch.float32)
        for key, tensor in (
            ("weight", weight),
            ("bias", bias),
            ("running_mean", self.running_mean),
            ("running_var", self.running_var),
        ):
            if tensor is None:
                continue
            if tensor.numel() != self.num_features:
                raise RuntimeError(
                    f"{key} should contain {self.num_features} elements not {tensor.numel()}"
                )
            if tensor.dtype not in allowed:
                raise RuntimeError(
                    f"{name} expected {key} in {' or '.join(map(str, allowed))} for inputs of "
                    f"{input.dtype} (got {tensor.dtype}); convert the layer or the input by .to()"
                )
            if tensor.device != input.device:
                raise RuntimeError(
                    f"{name} expected an input on {tensor.device}, where its {key} is "
                    f"(got {input.device})"
                )
        if self.eps <= 0:
            raise ValueError(
                f"batch_norm eps must be positive during training, but got {self.eps}"
            )

    @torch.no_grad()
    def _update_running_statistics(self, whole: GlobalMoments) -> None:
        """As `torch.nn.BatchNorm2d` does, in place; the running variance is the unbiased one."""
        if not self.track_running_stats or (whole.moments is None and whole.joint.total):
            return  # in the latter case with an error
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if whole.moments is None:
            return
        mean, var = whole.moments
        factor: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.momentum is None and self.num_batches_tracked is not None:
            # A cumulative average; a tensor spares the GPU a stop.
            factor = self.num_batches_tracked.to(mean).reciprocal()
        total = whole.joint.total
        if isinstance(total, Tensor):  # of which the host does not know whether it is above 1
            factor = factor * (total > 0).to(mean)
            total = total.clamp(min=2)
        var = var * (total / (total - 1))
        factor = factor.to(mean) if isinstance(factor, Tensor) else factor
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                # Unnoticed by autograd, as torch's kernels do it: a graph of a forward on a single
                # device may have saved the buffer, without a need for its value.
                running.data.copy_(torch.lerp(running.to(new), new, factor))


class SynchronizedBatchNormNd(SynchronizedBatchNorm, _BatchNorm):
    """What `syncbn.convert_model` makes of a `torch.nn.SyncBatchNorm`: for any dimensions.

    Not derived from that, of which DistributedDataParallel believes that it needs a GPU.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SynchronizedBatchNorm1d(SynchronizedBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` whose training statistics span all replicas of a forward.

    >>> layer = SynchronizedBatchNorm1d(4)
    >>> layer(torch.randn(8, 4)).shape
    torch.Size([8, 4])

    Shape:
        ``(N, C)`` or ``(N, C, L)``, output alike. Replicas may differ in N and L; N may be 0.

    Args:
        num_features: C.
        eps: Added to the variance (see `set_sbn_eps_mode`).
        momentum: Weight of the new value in running statistics; ``None`` for a plain average.
        affine: Whether it has ``weight`` and ``bias``.
        track_running_stats: Whether it keeps running statistics; without them the batch's own are
            used in evaluation too, those of each replica.
        device: Of parameters and buffers.
        dtype: Of parameters and buffers.
        bias: Whether it has a ``bias``, if ``affine``.
        process_group: Of `torch.distributed`: the processes to synchronize; by default all.
        group_size: If given, replicas, or processes, are synchronized in groups of this size (0 to
            group_size - 1, and so on; a last group may be smaller). Running statistics are then
            those of the first group of replicas; each process keeps those of its own group.

    Raises:
        TypeError: ``group_size`` is no int, or ``process_group`` none.
        ValueError: ``group_size`` is less than 1.

        And when it is called:

        ValueError: Wrong number of dimensions or channels; in training one value per channel on
            all replicas together, or ``eps`` is not above 0.
        RuntimeError: Parameters or buffers are on another device than the input, or of a dtype
            that does not go with its.
        NotImplementedError: The dtype of the input is not float16, bfloat16, float32 or float64.
        TypeError: ``momentum`` is no number.
        ReplicationError: The replicas, or processes, do not call it alike (see `replication`).
    """


class SynchronizedBatchNorm2d(SynchronizedBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose training statistics span all replicas of a forward.

    Arguments and errors are those of `SynchronizedBatchNorm1d`.

    Shape:
        ``(N, C, H, W)``, output alike. Replicas may differ in N, H and W.
    """


class SynchronizedBatchNorm3d(SynchronizedBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` whose training statistics span all replicas of a forward.

    Arguments and errors are those of `SynchronizedBatchNorm1d`.

    Shape:
        ``(N, C, D, H, W)``, output alike. Replicas may differ in N, D, H and W.
    """
