"""Splits arguments between replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from replication.checks import checked_names
from replication.devices import DeviceLike, to_device, usable_devices
from replication.scattered import Scattered
from replication.structure import Leaf, flatten

__all__ = ["scatter", "scatter_kwargs"]

ScatteredArguments = tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]


def scatter(inputs: Any, devices: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Splits the tensors in ``inputs`` along ``dim``, one part per replica.

    Sizes are those of `torch.chunk`: 9 samples on 4 devices are parts of 3, 3 and 3, so that three
    replicas run. An empty batch goes to one. Containers keep their types, and are new objects.
    0-dim tensors and other objects go to every replica that has data. Of what is `Scattered`
    already, entry i goes to device i, and tensors beside it are split by its sizes: those of its
    tensors, or of its lists, whichever add up to the batch; if it has no tensors and its lists do
    not, as said above.

    >>> scatter({"x": torch.arange(3), "train": True}, ["cpu"] * 2)
    [{'x': tensor([0, 1]), 'train': True}, {'x': tensor([2]), 'train': True}]

    Args:
        inputs: A tensor, or any nesting of containers: those of the standard library, dataclasses,
            and what is registered with torch's pytree.
        devices: Where the parts go.
        dim: The batch dimension of all tensors.

    Returns:
        One item for each replica that has data, at most ``len(devices)``.

    Raises:
        ValueError: Tensors differ in length along ``dim``, a tensor has no such dimension, lengths
            do not fit what is scattered already, or there are no (such) devices.
    """
    leaves, structure = flatten(inputs)
    count, parts = _split_leaves(leaves, usable_devices(devices), dim)
    return [structure.around([part[i] for part in parts]) for i in range(count)]


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    devices: Sequence[DeviceLike] | None,
    dim: int = 0,
    *,
    inputs_are_scattered: bool = False,
    cpu_keywords: Collection[str] = (),
) -> ScatteredArguments:
    """Splits positional and keyword arguments as `scatter` does, into equally many parts.

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments.
        devices: Where the parts go; None for one part, which is left where it is.
        dim: The batch dimension of all tensors.
        inputs_are_scattered: Takes each argument as a list of one entry per replica; see
            `DataParallel`.
        cpu_keywords: Keyword arguments that are split but stay where they are; see `DataParallel`.

    Returns:
        The positional arguments and the keyword arguments, one item for each replica that has
        data. Without anything to split there is one part: nothing says how to share the work.

    Raises:
        ValueError: As `scatter`; or an argument has not one entry per replica.
        TypeError: ``inputs`` is no tuple or list, ``cpu_keywords`` is no list of names, or an
            argument that should be scattered is no list, tuple or `Scattered`.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            f"inputs must be a tuple of positional arguments (got {type(inputs).__name__})"
        )
    cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
    targets: Sequence[torch.device | None] = [None] if devices is None else usable_devices(devices)
    arguments = tuple(inputs), dict(kwargs or {})
    if inputs_are_scattered:
        arguments = _taken_apart(*arguments, len(targets))
    found, structure = flatten(arguments)
    if len(targets) == 1 and not any(isinstance(leaf.value, Scattered) for leaf in found):
        args, named = arguments if targets[0] is None else moved(arguments, targets[0])
        return (args,), (named,)
    stay = [leaf.path[0] == "1" and leaf.path[1] in cpu_keywords for leaf in found]
    leaves = [Leaf(_as_arguments_are_named(leaf.path), leaf.value) for leaf in found]
    count, parts = _split_leaves(leaves, targets, dim, stay)
    if not any(isinstance(leaf.value, Scattered) or _is_batch(leaf.value) for leaf in leaves):
        count = 1
    scattered = [structure.around([part[i] for part in parts]) for i in range(count)]
    return tuple(args for args, _ in scattered), tuple(kw for _, kw in scattered)


def _as_arguments_are_named(path: tuple[str, ...]) -> tuple[str, ...]:
    """``("0", "2", "x")`` leads into positional argument 2, ``("1", "name", "x")`` into `name`."""
    return (f"argument {path[1]}", *path[2:]) if path[0] == "0" else path[1:]


def _taken_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes a `Scattered` of each argument, which must have one entry per replica."""
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]
    for _, argument in named:
        if isinstance(argument, Scattered):  # made by replicas: it may be for fewer
            replicas = min(replicas, len(argument))
    for name, argument in named:
        if not isinstance(argument, (list, tuple)):
            raise TypeError(
                f"with inputs_are_scattered, {name} must be a list, tuple or Scattered of one "
                f"entry per replica (expected {replicas} entries, got {type(argument).__name__})"
            )
        if len(argument) != replicas:
            raise ValueError(
                f"with inputs_are_scattered, {name} must have one entry per replica (expected "
                f"{replicas}, got {len(argument)}); only a Scattered may have fewer"
            )
    return tuple(map(Scattered, args)), {name: Scattered(arg) for name, arg in kwargs.items()}


def _split_leaves(
    leaves: list[Leaf],
    devices: Sequence[torch.device | None],
    dim: int,
    stay: list[bool] | None = None,
) -> tuple[int, list[list[Any]]]:
    """The number of parts, and the parts of each leaf. What is to ``stay`` is not moved."""
    if not devices:
        raise ValueError("expected at least one device (got none)")
    stay = stay or [False] * len(leaves)
    plan = _plan(leaves, len(devices), dim, stay)
    parts = []
    for leaf, stays in zip(leaves, stay, strict=True):
        targets = [None if stays else device for device in devices[: plan.parts]]
        if isinstance(leaf.value, Scattered):
            entries = list(leaf.value)
        elif _is_batch(leaf.value):
            entries = _split(leaf.value, plan.sizes_of(leaf, dim, stays), dim)
        else:
            entries = [leaf.value] * plan.parts
        parts.append(
            [moved(entry, device) for entry, device in zip(entries, targets, strict=True)]
        )
    return plan.parts, parts


class Split(NamedTuple):
    """The lengths of the parts, as something that is split already says them."""

    #: Those of its tensors, if they agree.
    of_tensors: list[int] | None
    #: Those of its lists, or tuples.
    of_lists: list[int] | None = None

    def fitting(self, length: int) -> list[list[int]]:
        """Those that a batch of a length can be split into; two that differ are a doubt."""
        return [s for s in (self.of_lists, self.of_tensors) if s and sum(s) == length]


class Plan(NamedTuple):
    """How a batch is split."""

    parts: int
    #: Several, where more than one thing is scattered already.
    splits: list[Split]

    def sizes_of(self, leaf: Leaf, dim: int, stays: bool) -> list[int]:
        """The lengths of the parts of one tensor."""
        length = _length(leaf, dim)
        fitting = _distinct(sizes for split in self.splits for sizes in split.fitting(length))
        if len(fitting) == 1:
            return fitting[0]
        if self.parts == 1 or (stays and not fitting):
            return even_sizes(length, self.parts)
        known = _distinct(s for split in self.splits for s in (split.of_tensors, split.of_lists))
        splits = " or ".join(map(str, fitting or known))
        raise ValueError(
            f"{_where(leaf)} cannot be split as what is scattered already: "
            + (
                f"its length of {length} fits several splits (got {splits})"
                if fitting
                else f"expected a length that is split into {splits} (got {length})"
            )
            + "; to say which part is whose, pass it as Scattered(parts), too"
        )


def _distinct(splits: Iterable[list[int] | None]) -> list[list[int]]:
    found: list[list[int]] = []
    for sizes in splits:
        if sizes and sizes not in found:
            found.append(sizes)
    return found


def even_sizes(length: int, parts: int) -> list[int]:
    """The sizes of `torch.tensor_split`: as many as asked for, and as even as can be."""
    return [length // parts + (i < length % parts) for i in range(parts)]


def chunk_sizes(length: int, parts: int) -> list[int]:
    """The sizes of `torch.chunk`, which may be fewer than asked for."""
    part = max(1, -(-length // parts))
    return [min(part, length - start) for start in range(0, length, part)] or [0]


def _plan(leaves: list[Leaf], replicas: int, dim: int, stay: list[bool]) -> Plan:
    scattered = [leaf for leaf in leaves if isinstance(leaf.value, Scattered)]
    batch = [leaf for leaf in leaves if _is_batch(leaf.value)]
    moving = [leaf for leaf, stays in zip(leaves, stay, strict=True) if not stays]
    leading = [leaf for leaf in moving if _is_batch(leaf.value)] or batch
    if scattered:
        parts = _common_count(scattered, replicas)
        splits = [_split_of(leaf.value, dim) for leaf in scattered]
        if leading and not any(split.of_tensors for split in splits):
            length = _common_length(leading, dim)
            if not any(split.fitting(length) for split in splits):
                splits = [Split(_as_usual(length, parts))]
        return Plan(parts, splits)
    if not batch or replicas == 1:  # nothing to split, whatever the lengths
        return Plan(replicas, [])
    sizes = chunk_sizes(_common_length(leading, dim), replicas)
    return Plan(len(sizes), [Split(sizes)])


def _as_usual(length: int, parts: int) -> list[int]:
    """As `torch.chunk` splits; or, if that gives fewer parts, as evenly as can be."""
    chunks = chunk_sizes(length, parts)
    return chunks if len(chunks) == parts else even_sizes(length, parts)


def _common_length(batch: list[Leaf], dim: int) -> int:
    first = batch[0]
    length = _length(first, dim)
    for leaf in batch:
        if _length(leaf, dim) != length:
            raise ValueError(
                f"tensors must have the same length along the batch dimension {dim} (got shapes "
                f"{tuple(first.value.shape)} of {_where(first)} and {tuple(leaf.value.shape)} of "
                f"{_where(leaf)}). What every replica needs whole belongs in a buffer of the "
                "module; parts that are for one replica each are passed as Scattered(parts)."
            )
    return length


def _length(leaf: Leaf, dim: int) -> int:
    tensor: Tensor = leaf.value
    if not _has_dimension(tensor, dim):
        raise ValueError(
            f"{_where(leaf)} must have a dimension {dim} to be split along "
            f"(got shape {tuple(tensor.shape)})"
        )
    return tensor.size(dim)


def _common_count(scattered: list[Leaf], replicas: int) -> int:
    """The number of entries of everything that is scattered."""
    first = scattered[0]
    count = len(first.value)
    for leaf in scattered:
        if len(leaf.value) != count:
            raise ValueError(
                "what is scattered must have one entry per replica (got "
                f"{count} entries of {_where(first)} and {len(leaf.value)} of {_where(leaf)})"
            )
    if not 1 <= count <= replicas:
        raise ValueError(
            f"{_where(first)} must have one entry per replica (expected 1 to {replicas}, "
            f"got {count})"
        )
    return count


def _split_of(entries: Scattered, dim: int) -> Split:
    lengths = [_length_of(entry, dim) for entry in entries]
    known = [length for length in lengths if length is not None]
    of_tensors = known if len(known) == len(entries) else None
    # A namedtuple is no list of samples; nor are a tensor and a dict, say: they are of one batch.
    lists = [e for e in entries if isinstance(e, (list, tuple)) and not hasattr(e, "_fields")]
    items = [item for entry in lists for item in entry if item is not None]
    kinds = {Tensor if isinstance(item, Tensor) else type(item) for item in items}
    if len(lists) < len(entries) or (of_tensors and len(kinds) > 1):
        return Split(of_tensors)
    return Split(of_tensors, [len(entry) for entry in lists])


def _length_of(entry: Any, dim: int) -> int | None:
    """The length of the batch in an entry, if its tensors agree on one."""
    tensors = [leaf.value for leaf in flatten(entry)[0] if _is_batch(leaf.value)]
    lengths = {t.size(dim) if _has_dimension(t, dim) else None for t in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def _has_dimension(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _where(leaf: Leaf) -> str:
    return f"`{leaf}`" if leaf.path else "the input"


def _split(tensor: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    if tensor.is_sparse:  # torch has no views of it
        order = torch.arange(tensor.size(dim), device=tensor.device)
        return [tensor.index_select(dim, rows) for rows in order.split(sizes)]
    # Neither views nor the tensor itself: what one replica does to its part in place would concern
    # the parts of the others, and the caller's tensor.
    return [part.clone() for part in torch.split(tensor, sizes, dim)]


def moved(tree: Any, device: torch.device | None) -> Any:
    """``tree`` with its tensors on ``device``; None leaves them where they are."""
    if device is None:
        return tree
    if isinstance(tree, (Tensor, PackedSequence)):
        return to_device(tree, device)
    leaves, structure = flatten(tree)
    if len(leaves) == 1 and leaves[0].value is tree:
        return tree
    return structure.around([moved(leaf.value, device) for leaf in leaves])
