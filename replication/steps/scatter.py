"""Splits arguments between replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from replication._torch import SequenceKey
from replication.checks import checked_names
from replication.containers import Scattered
from replication.devices import DeviceLike, parse_devices, to_device
from replication.tree import Leaf, flatten, leaves_of, replace_leaves

__all__ = ["scatter", "scatter_kwargs"]

#: One device per part. None leaves a part where it is.
Devices = Sequence[torch.device | None]


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Splits the tensors in ``inputs`` along ``dim``, one part per replica.

    The parts have the sizes that `torch.chunk` gives: 9 samples on 4 devices are split into parts
    of 3, 3 and 3, so that three replicas run. An empty batch goes to one replica. All tensors must
    have the same length along ``dim``, except for 0-dim tensors, which go to every replica that
    has data, just like other objects. Containers keep their types and are new objects.

    A tensor with exactly one entry per device, beside a batch of another length, is split into
    these entries. transformers' ``Trainer`` passes the number of items this way.

    Entry i of a `Scattered` goes to device i. The first `Scattered` of tensors decides how the
    tensors beside it are split: the size of part i is the length of entry i.

    >>> import torch
    >>> from replication import scatter
    >>> scatter({"x": torch.arange(3), "train": True}, ["cpu"] * 2)
    [{'x': tensor([0, 1]), 'train': True}, {'x': tensor([2]), 'train': True}]

    Args:
        inputs: A tensor, or any nesting of containers: of the standard library, dataclasses, and
            classes that are registered with torch's pytree.
        target_gpus: The devices of the parts, of any type.

    Returns:
        One item for each replica that has data, at most ``len(target_gpus)``.

    Raises:
        ValueError: Tensors differ in length, or do not fit the `Scattered` beside them.
    """
    leaves, rebuild = flatten(inputs)
    parts = split_leaves(leaves, parse_devices(target_gpus), dim)
    return list(map(rebuild, parts))


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike] | None,
    dim: int = 0,
    *,
    inputs_are_scattered: bool = False,
    cpu_keywords: Collection[str] = (),
) -> tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]:
    """Splits positional and keyword arguments like `scatter`, into equally many parts.

    If ``target_gpus`` is None, there is one part, which is not moved. `DataParallel` explains the
    options.

    >>> import torch
    >>> from replication import scatter_kwargs
    >>> scatter_kwargs((torch.arange(3),), {"train": True}, ["cpu"] * 2)
    (((tensor([0, 1]),), (tensor([2]),)), ({'train': True}, {'train': True}))

    Returns:
        Positional and keyword arguments, one item per replica with data, but at least one.

    Raises:
        ValueError: Arguments can't be split (see `scatter`), or an argument that should be
            scattered does not have one entry per replica.
        TypeError: An argument that should be scattered is not a list, tuple or `Scattered`.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"inputs must be a tuple of arguments (got {type(inputs).__name__})")
    cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
    targets: Devices = [None] if target_gpus is None else parse_devices(target_gpus)
    args, named = tuple(inputs), dict(kwargs or {})
    if inputs_are_scattered:
        scattered = [x for x in (*args, *named.values()) if isinstance(x, Scattered)]
        # A Scattered from a smaller batch may have fewer entries.
        count = min([len(targets), *map(len, scattered)])
        args = tuple(_as_scattered(f"args[{i}]", x, count) for i, x in enumerate(args))
        named = {name: _as_scattered(name, x, count) for name, x in named.items()}
    # On one device arguments are moved, and not split.
    if len(targets) == 1 and not any(isinstance(x, Scattered) for x in leaves_of((args, named))):
        moving = {name: value for name, value in named.items() if name not in cpu_keywords}
        args, moving = moved((args, moving), targets[0])
        return (args,), ({**named, **moving},)
    positional, rebuild_args = flatten(args)
    keyword, rebuild_kwargs = flatten(named)
    leaves, first = positional + keyword, len(positional)
    if not any(isinstance(leaf.value, Scattered) or _is_batch(leaf) for leaf in leaves):
        targets = targets[:1]  # one call without a batch, where `scatter` makes one per device
    staying = [i for i, leaf in enumerate(keyword, first) if leaf.path[0].key in cpu_keywords]
    parts = split_leaves(leaves, targets, dim, staying)
    return (
        tuple([rebuild_args(part[:first]) for part in parts]),
        tuple([rebuild_kwargs(part[first:]) for part in parts]),
    )


def _as_scattered(name: str, argument: Any, count: int) -> Scattered:
    is_list = isinstance(argument, (list, tuple))
    if not is_list or len(argument) != count:
        got = len(argument) if is_list else type(argument).__name__
        raise (ValueError if is_list else TypeError)(
            f"with inputs_are_scattered, `{name}` must be a list, tuple or Scattered with one "
            f"entry per replica (expected {count}, got {got}); only a Scattered may have fewer"
        )
    return Scattered(argument)


class Split(NamedTuple):
    """How the tensors of a batch are split. `_plan` decides it, and `_parts_of` applies it."""

    #: The number of replicas with data.
    replicas: int
    #: Whether tensors are cut. If not, there are none, or each goes whole to the only replica.
    cuts: bool = False
    #: The length of each part. None if the `Scattered` that decides does not tell.
    lengths: tuple[int, ...] | None = None
    #: The argument that decides.
    title: str = ""


def split_leaves(
    leaves: list[Leaf], devices: Devices, dim: int, staying: Collection[int] = ()
) -> list[list[Any]]:
    """Returns, for each replica that has data, its part of each leaf, on its device.

    The leaves whose indices are in ``staying`` are split but not moved.
    """
    if not devices:
        raise ValueError("expected at least one device (got none)")
    split = _plan(leaves, len(devices), dim)
    nowhere, used = [None] * split.replicas, devices[: split.replicas]
    columns = [
        _parts_of(leaf, split, dim, nowhere if i in staying else used, len(devices))
        for i, leaf in enumerate(leaves)
    ]
    return [[column[replica] for column in columns] for replica in range(split.replicas)]


def _plan(leaves: list[Leaf], devices: int, dim: int) -> Split:
    if scattered := [leaf for leaf in leaves if isinstance(leaf.value, Scattered)]:
        counts = [len(leaf.value) for leaf in scattered]
        if len(set(counts)) > 1 or not 1 <= counts[0] <= devices:
            got = " and ".join(f"{len(leaf.value)} in {_title(leaf)}" for leaf in scattered)
            raise ValueError(
                f"every Scattered must have one entry per replica, 1 to {devices} (got {got}); "
                "make sure that it came from a DataParallel with the same device_ids"
            )
        if counts[0] == 1:
            return Split(1)
        splits = [
            Split(counts[0], True, _lengths(leaf.value, dim), _title(leaf)) for leaf in scattered
        ]
        return next((split for split in splits if split.lengths is not None), splits[0])
    batches = list(filter(_is_batch, leaves))
    if not batches or devices == 1:
        return Split(devices)
    # A tensor of this length may have an entry per device, and the batch another length.
    batch = next((leaf for leaf in batches if _length(leaf, dim) != devices), batches[0])
    length = _length(batch, dim)
    part = max(1, -(-length // devices))  # just as in `torch.chunk`
    parts = tuple([min(part, length - start) for start in range(0, length, part)]) or (0,)
    return Split(len(parts), True, parts, _title(batch))


def _parts_of(leaf: Leaf, split: Split, dim: int, devices: Devices, all_devices: int) -> list[Any]:
    if isinstance(leaf.value, Scattered):
        return list(map(moved, leaf.value, devices))
    if not _is_batch(leaf):
        return [moved(leaf.value, device) for device in devices]
    views = _views(leaf, split, dim, all_devices) if split.cuts else [leaf.value]
    # A part that stays is copied as well: an in-place change by one replica must change neither
    # the other parts nor the caller's tensor. A part that leaves is copied once: through a clone
    # it would come from pageable memory, even if the batch is in pinned memory.
    copies = list(map(moved, views, devices))
    return [copy.clone() if copy is v else copy for copy, v in zip(copies, views, strict=True)]


def _views(leaf: Leaf, split: Split, dim: int, all_devices: int) -> Sequence[Tensor]:
    """Cuts a tensor like the batch, or into its entries per device."""
    length, tensor = _length(leaf, dim), leaf.value
    if split.lengths is not None:
        if sum(split.lengths) == length:
            return tensor.split(split.lengths, dim)  # type: ignore[no-any-return]
        if length == all_devices:  # just as in torch, entries of devices without data are dropped
            return tensor.split(1, dim)[: split.replicas]  # type: ignore[no-any-return]
        have = f"has length {sum(split.lengths)}"
    else:
        have = "does not tell its lengths"
    raise ValueError(
        f"{_title(leaf)} has length {length} in dimension {dim}, but the batch ({split.title}) "
        f"{have}, so it can't be split the same way; if every replica needs all of it, register "
        "it as a buffer of the model; to choose the parts yourself, pass both as Scattered([...])"
    )


def _title(leaf: Leaf) -> str:
    if not leaf.path:
        return "the input"
    name = str(leaf.path)
    if isinstance(leaf.path[0], SequenceKey):
        index, dot, inside = name.partition(".")
        name = f"args[{index}]{dot}{inside}"
    return f"`{name}`"


def _is_batch(leaf: Leaf) -> bool:
    return isinstance(leaf.value, Tensor) and leaf.value.dim() > 0


def _length(leaf: Leaf, dim: int) -> int:
    tensor: Tensor = leaf.value
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"{_title(leaf)} must have a dimension {dim} (got shape {tuple(tensor.shape)})"
        )
    return tensor.size(dim)


def _lengths(entries: Scattered, dim: int) -> tuple[int, ...] | None:
    """Returns the length of each entry, or None if some entry is no tensor with ``dim``."""
    if all(isinstance(entry, Tensor) and -entry.dim() <= dim < entry.dim() for entry in entries):
        return tuple(entry.size(dim) for entry in entries)
    return None


def moved(tree: Any, device: torch.device | None) -> Any:
    """Returns ``tree`` with its tensors on ``device``. None leaves them where they are."""
    if device is None:
        return tree

    def on_device(leaf: Any) -> Any:
        return to_device(leaf, device) if isinstance(leaf, (Tensor, PackedSequence)) else leaf

    return replace_leaves(on_device, tree)
