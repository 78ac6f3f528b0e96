"""Splits arguments between replicas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from replication._torch import SequenceKey
from replication.devices import DeviceLike, checked_names, to_device, usable_devices
from replication.tree import (
    Leaf,
    Path,
    Scattered,
    flatten,
    leaves_of,
    name_of,
    replace_leaves,
    unflatten,
)

__all__ = ["scatter", "scatter_kwargs"]

ScatteredArguments = tuple[tuple[tuple[Any, ...], ...], tuple[dict[str, Any], ...]]


def scatter(inputs: Any, devices: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Splits the tensors in ``inputs`` along ``dim``, one part per replica.

    Sizes are those of `torch.chunk`: 9 samples on 4 devices are parts of 3, 3 and 3, so that three
    replicas run. An empty batch goes to one replica. Containers keep their types and are new
    objects. 0-dim tensors and other objects go to every replica that has data.

    Entry i of a `Scattered` goes to device i. Tensors beside it are split as its entries are: by
    the lengths of entries that are tensors, or that have tensors under keys or in fields. Tensors
    in lists and tuples do not count, as there may be one for each sample.

    >>> scatter({"x": torch.arange(3), "train": True}, ["cpu"] * 2)
    [{'x': tensor([0, 1]), 'train': True}, {'x': tensor([2]), 'train': True}]

    Args:
        inputs: A tensor, or any nesting of containers: those of the standard library, dataclasses,
            and classes that are registered with torch's pytree.
        devices: Where the parts go.
        dim: The batch dimension of all tensors.

    Returns:
        One item for each replica that has data, at most ``len(devices)``.

    Raises:
        ValueError: Tensors differ in length along ``dim``, a tensor has no such dimension or
            cannot be split as a `Scattered` beside it, a container contains itself, or there are
            no (such) devices.
    """
    leaves, spec = flatten(inputs)
    splitter = Splitter(leaves, usable_devices(devices), dim)
    return [unflatten(spec, part) for part in splitter.parts()]


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
        devices: Where the parts go; None for one part, which stays where it is.
        dim: The batch dimension of all tensors.
        inputs_are_scattered: Takes each argument as a list of one entry per replica; see
            `DataParallel`.
        cpu_keywords: Keyword arguments that are split but stay where they are; see `DataParallel`.

    Returns:
        The positional arguments and the keyword arguments, one item for each replica that has
        data. Without anything to split there is one part: nothing says how to share the work.

    Raises:
        ValueError: As `scatter`; or an argument does not have one entry per replica.
        TypeError: ``inputs`` is no tuple or list, ``cpu_keywords`` is no list of names, or an
            argument that should be scattered is no list, tuple or `Scattered`.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            f"inputs must be a tuple of positional arguments (got {type(inputs).__name__})"
        )
    cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
    targets: Sequence[torch.device | None] = [None] if devices is None else usable_devices(devices)
    args, named = tuple(inputs), dict(kwargs or {})
    if inputs_are_scattered:
        replicas = _entries_expected((*args, *named.values()), len(targets))
        args = tuple(_as_scattered(f"argument {i}", x, replicas) for i, x in enumerate(args))
        named = {name: _as_scattered(name, x, replicas) for name, x in named.items()}
    if len(targets) == 1 and not any(isinstance(x, Scattered) for x in leaves_of((args, named))):
        args, named = moved((args, named), targets[0])
        return (args,), (named,)
    (positional, args_spec), (keyword, kwargs_spec) = flatten(args), flatten(named)
    leaves = [*positional, *keyword]
    splitter = Splitter(leaves, targets, dim, cpu_keywords, "argument ")
    parts = splitter.parts()
    if not any(isinstance(leaf.value, Scattered) or _is_batch(leaf.value) for leaf in leaves):
        parts = parts[:1]
    return (
        tuple(unflatten(args_spec, part[: len(positional)]) for part in parts),
        tuple(unflatten(kwargs_spec, part[len(positional) :]) for part in parts),
    )


def _entries_expected(arguments: Sequence[Any], replicas: int) -> int:
    """How many entries each argument must have: as many as there are replicas.

    A `Scattered` comes from replicas, and may be for fewer.
    """
    return min([replicas, *(len(x) for x in arguments if isinstance(x, Scattered))])


def _as_scattered(name: str, argument: Any, replicas: int) -> Scattered:
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
    return Scattered(argument)


class Splitter:
    """Splits the leaves of the arguments of one call.

    Args:
        leaves: All leaves of the arguments.
        devices: Where the parts go; None leaves a part where it is.
        dim: The batch dimension.
        stay: The names of arguments that are split but not moved.
        prefix: What error messages put before the index of an argument.
    """

    def __init__(
        self,
        leaves: list[Leaf],
        devices: Sequence[torch.device | None],
        dim: int,
        stay: Collection[str] = (),
        prefix: str = "",
    ) -> None:
        if not devices:
            raise ValueError("expected at least one device (got none)")
        self._leaves = leaves
        self._devices = devices
        self._dim = dim
        self._stay = stay
        self._prefix = prefix
        scattered = [leaf for leaf in leaves if isinstance(leaf.value, Scattered)]
        batch = [leaf for leaf in leaves if _is_batch(leaf.value)]
        #: The number of parts.
        self.count = len(devices)
        #: The lengths of the parts; several lists where Scattered arguments differ.
        self._splits: list[list[int]] = []
        if scattered:
            self.count = self._common_count(scattered)
            for leaf in scattered:
                sizes = _sizes_of(leaf.value, dim)
                if sizes is not None and sizes not in self._splits:
                    self._splits.append(sizes)
        elif batch and self.count > 1:
            # Arguments that stay may have a length of their own, unless there are no others.
            moving = [leaf for leaf in batch if not self._stays(leaf.path)]
            self._splits = [chunk_sizes(self._common_length(moving or batch), self.count)]
            self.count = len(self._splits[0])

    def parts(self) -> list[list[Any]]:
        """For each replica, its part of each leaf."""
        entries = [self._split(leaf) for leaf in self._leaves]
        return [[of_leaf[replica] for of_leaf in entries] for replica in range(self.count)]

    def _split(self, leaf: Leaf) -> list[Any]:
        """The parts of one leaf, each on its device."""
        if isinstance(leaf.value, Scattered):
            parts: Sequence[Any] = leaf.value
        elif _is_batch(leaf.value):
            parts = _split(leaf.value, self._sizes_for(leaf), self._dim)
        else:
            parts = [leaf.value] * self.count
        if self._stays(leaf.path):
            return list(parts)
        devices = self._devices[: self.count]
        return [moved(part, device) for part, device in zip(parts, devices, strict=True)]

    def _sizes_for(self, leaf: Leaf) -> list[int]:
        """The lengths of the parts of one tensor."""
        length = self._length(leaf)
        fitting = [sizes for sizes in self._splits if sum(sizes) == length]
        if len(fitting) == 1:
            return fitting[0]
        if self.count == 1 or (self._stays(leaf.path) and not fitting):
            return even_sizes(length, self.count)
        expected = " or ".join(map(str, fitting or self._splits))
        if fitting:
            why = f"a length of {length} fits several of them (got {expected})"
        elif expected:
            why = f"expected a length that is split into {expected} (got {length})"
        else:
            why = f"it holds no tensor that tells the sizes (got a length of {length})"
        raise ValueError(
            f"{self._where(leaf)} cannot be split as what is scattered already: {why}; to say "
            "which part is for which replica, pass it as Scattered(parts)"
        )

    def _stays(self, path: Path) -> bool:
        """Whether a path leads into a keyword argument that is not moved."""
        return (
            bool(path) and not isinstance(path[0], SequenceKey) and name_of(path[0]) in self._stay
        )

    def _where(self, leaf: Leaf) -> str:
        if not leaf.path:
            return "the input"
        return f"`{self._prefix if isinstance(leaf.path[0], SequenceKey) else ''}{leaf.path}`"

    def _common_count(self, scattered: list[Leaf]) -> int:
        """The number of entries of everything that is scattered."""
        first = scattered[0]
        count = len(first.value)
        for leaf in scattered:
            if len(leaf.value) != count:
                raise ValueError(
                    f"what is scattered must have one entry per replica (got {count} entries of "
                    f"{self._where(first)} and {len(leaf.value)} of {self._where(leaf)})"
                )
        if not 1 <= count <= len(self._devices):
            raise ValueError(
                f"{self._where(first)} must have one entry per replica (expected 1 to "
                f"{len(self._devices)}, got {count})"
            )
        return count

    def _common_length(self, batch: list[Leaf]) -> int:
        first = batch[0]
        length = self._length(first)
        for leaf in batch:
            if self._length(leaf) != length:
                raise ValueError(
                    "tensors must have the same length along the batch dimension "
                    f"{self._dim} (got shapes {tuple(first.value.shape)} of {self._where(first)} "
                    f"and {tuple(leaf.value.shape)} of {self._where(leaf)}). What every replica "
                    "needs whole belongs in a buffer of the module; parts that are for one "
                    "replica each are passed as Scattered(parts)."
                )
        return length

    def _length(self, leaf: Leaf) -> int:
        tensor: Tensor = leaf.value
        if not _has_dimension(tensor, self._dim):
            raise ValueError(
                f"{self._where(leaf)} must have a dimension {self._dim} to be split along "
                f"(got shape {tuple(tensor.shape)})"
            )
        return tensor.size(self._dim)


def _sizes_of(entries: Scattered, dim: int) -> list[int] | None:
    """The length of each entry; None if an entry has none, or several."""
    sizes = []
    for entry in entries:
        tensors = [
            leaf.value
            for leaf in flatten(entry)[0]
            if _is_batch(leaf.value) and not any(isinstance(key, SequenceKey) for key in leaf.path)
        ]
        lengths = {x.size(dim) if _has_dimension(x, dim) else None for x in tensors}
        length = lengths.pop() if len(lengths) == 1 else None
        if length is None:
            return None
        sizes.append(length)
    return sizes


def even_sizes(length: int, parts: int) -> list[int]:
    """The sizes of `torch.tensor_split`: as many as asked for, and as even as possible."""
    return [length // parts + (i < length % parts) for i in range(parts)]


def chunk_sizes(length: int, parts: int) -> list[int]:
    """The sizes of `torch.chunk`, which may be fewer than asked for."""
    part = max(1, -(-length // parts))
    return [min(part, length - start) for start in range(0, length, part)] or [0]


def _has_dimension(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _split(tensor: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    if tensor.is_sparse:  # torch has no views of it
        order = torch.arange(tensor.size(dim), device=tensor.device)
        return [tensor.index_select(dim, rows) for rows in order.split(sizes)]
    # Clones, not views: what one replica does to its part in place must change neither the parts
    # of the others nor the caller's tensor.
    return [part.clone() for part in torch.split(tensor, sizes, dim)]


def moved(tree: Any, device: torch.device | None) -> Any:
    """``tree`` with its tensors on ``device``; None leaves them where they are."""
    if device is None:
        return tree

    def on_device(leaf: Any) -> Any:
        return to_device(leaf, device) if isinstance(leaf, (Tensor, PackedSequence)) else leaf

    return replace_leaves(on_device, tree, {})
