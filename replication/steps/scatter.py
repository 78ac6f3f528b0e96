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


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0) -> list[Any]:
    """Splits the tensors in ``inputs`` along ``dim``, one part per replica.

    The sizes of the parts are as in `torch.chunk`: 9 samples on 4 devices give parts of 3, 3 and
    3, so that three replicas run. An empty batch goes to one replica. Containers keep their types
    and are new objects. 0-dim tensors and other objects go to every replica that has data.

    Entry i of a `Scattered` goes to device i. Tensors beside it are split to match: the size of
    part i is the length of entry i, if that is a tensor or has tensors under keys or in fields.
    Tensors in lists and tuples do not count, because a list may hold one tensor for each sample.

    >>> import torch
    >>> from replication import scatter
    >>> scatter({"x": torch.arange(3), "train": True}, ["cpu"] * 2)
    [{'x': tensor([0, 1]), 'train': True}, {'x': tensor([2]), 'train': True}]

    Args:
        inputs: A tensor, or any nesting of containers: containers of the standard library,
            dataclasses, and classes that are registered with torch's pytree.
        target_gpus: The devices of the parts, of any type.
        dim: The batch dimension of all tensors.

    Returns:
        One item for each replica that has data, at most ``len(target_gpus)``.

    Raises:
        ValueError: Tensors differ in length along ``dim``, a tensor has no such dimension or does
            not fit a `Scattered` beside it, a container contains itself, ``target_gpus`` is empty,
            or a device does not exist.
    """
    leaves, spec = flatten(inputs)
    splitter = Splitter(leaves, usable_devices(target_gpus), dim)
    return [unflatten(spec, part) for part in splitter.parts()]


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_gpus: Sequence[DeviceLike] | None,
    dim: int = 0,
    *,
    inputs_are_scattered: bool = False,
    cpu_keywords: Collection[str] = (),
) -> ScatteredArguments:
    """Splits positional and keyword arguments as `scatter` does, into equally many parts.

    >>> import torch
    >>> from replication import scatter_kwargs
    >>> scatter_kwargs((torch.arange(3),), {"train": True}, ["cpu"] * 2)
    (((tensor([0, 1]),), (tensor([2]),)), ({'train': True}, {'train': True}))

    Args:
        inputs: Positional arguments.
        kwargs: Keyword arguments.
        target_gpus: The devices of the parts. None gives one part, which is not moved.
        dim: The batch dimension of all tensors.
        inputs_are_scattered: Whether each argument is a list with one entry per replica; see
            `DataParallel`.
        cpu_keywords: Keyword arguments that are split but not moved; see `DataParallel`.

    Returns:
        The positional arguments and the keyword arguments, one item for each replica that has
        data. If there is nothing to split, there is one part.

    Raises:
        ValueError: As `scatter`, or an argument does not have one entry per replica.
        TypeError: ``inputs`` is not a tuple or list, ``cpu_keywords`` is not a list of names, or
            an argument that should be scattered is not a list, tuple or `Scattered`.
    """
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(
            f"inputs must be a tuple of positional arguments (got {type(inputs).__name__})"
        )
    cpu_keywords = checked_names("cpu_keywords", cpu_keywords)
    targets: Sequence[torch.device | None] = (
        [None] if target_gpus is None else usable_devices(target_gpus)
    )
    args, named = tuple(inputs), dict(kwargs or {})
    if inputs_are_scattered:
        arguments = (*args, *named.values())
        # A Scattered from a smaller batch may have fewer entries.
        count = min([len(targets), *(len(x) for x in arguments if isinstance(x, Scattered))])
        args = tuple(_as_scattered(f"argument {i}", x, count) for i, x in enumerate(args))
        named = {name: _as_scattered(name, x, count) for name, x in named.items()}
    if len(targets) == 1 and not any(isinstance(x, Scattered) for x in leaves_of((args, named))):
        args, named = moved((args, named), targets[0])
        return (args,), (named,)
    positional, args_spec = flatten(args)
    keyword, kwargs_spec = flatten(named) if named else ([], None)
    splitter = Splitter([*positional, *keyword], targets, dim, cpu_keywords, "argument ")
    parts = splitter.parts() if splitter.has_batch else splitter.parts()[:1]
    end = len(positional)
    return (
        tuple([unflatten(args_spec, part[:end]) for part in parts]),
        tuple([unflatten(kwargs_spec, part[end:]) if kwargs_spec else {} for part in parts]),
    )


def _as_scattered(name: str, argument: Any, count: int) -> Scattered:
    if not isinstance(argument, (list, tuple)):
        raise TypeError(
            f"with inputs_are_scattered, {name} must be a list, tuple or Scattered of one "
            f"entry per replica (expected {count} entries, got {type(argument).__name__})"
        )
    if len(argument) != count:
        raise ValueError(
            f"with inputs_are_scattered, {name} must have one entry per replica (expected "
            f"{count}, got {len(argument)}); only a Scattered may have fewer"
        )
    return Scattered(argument)


class Splitter:
    """Splits the leaves of the arguments of one call.

    Args:
        leaves: All leaves of the arguments.
        devices: The devices of the parts. None leaves a part where it is.
        dim: The batch dimension.
        stay: The names of arguments that are split but not moved.
        prefix: The text before the index of an argument in error messages.
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
        self.has_batch = bool(scattered or batch)
        self._count = len(devices)
        #: The sizes of the parts, in several ways if `Scattered` arguments differ.
        self._splits: list[list[int]] = []
        if scattered:
            self._count = self._common_count(scattered)
            for leaf in scattered:
                sizes = _sizes_of(leaf.value, dim)
                if sizes is not None and sizes not in self._splits:
                    self._splits.append(sizes)
        elif batch and self._count > 1:
            # Arguments that stay may have another length, unless there are no other arguments.
            moving = [leaf for leaf in batch if not self._stays(leaf.path)]
            self._splits = [chunk_sizes(self._common_length(moving or batch), self._count)]
            self._count = len(self._splits[0])

    def parts(self) -> list[list[Any]]:
        """Returns, for each replica, its part of each leaf."""
        parts_of_leaves = [self._split(leaf) for leaf in self._leaves]
        return [[parts[replica] for parts in parts_of_leaves] for replica in range(self._count)]

    def _split(self, leaf: Leaf) -> Sequence[Any]:
        """Returns the parts of one leaf, each on its device."""
        devices = [None] * self._count if self._stays(leaf.path) else self._devices
        if isinstance(leaf.value, Scattered):
            parts: Sequence[Any] = leaf.value
        elif _is_batch(leaf.value):
            return _split(leaf.value, self._sizes_for(leaf), self._dim, devices)
        else:
            parts = [leaf.value] * self._count
        return list(map(moved, parts, devices))

    def _sizes_for(self, leaf: Leaf) -> list[int]:
        """Returns the sizes of the parts of one tensor."""
        length = self._length(leaf)
        fitting = [sizes for sizes in self._splits if sum(sizes) == length]
        if len(fitting) == 1:
            return fitting[0]
        if self._count == 1 or (self._stays(leaf.path) and not fitting):
            return even_sizes(length, self._count)
        expected = " or ".join(map(str, fitting or self._splits))
        if fitting:
            why = f"a length of {length} fits several of them (got {expected})"
        elif expected:
            why = f"expected a length that is split into {expected} (got {length})"
        else:
            why = f"no tensor in it tells the sizes of the parts (got a length of {length})"
        raise ValueError(
            f"{self._title(leaf)} cannot be split like the Scattered beside it: {why}; pass "
            "Scattered(parts) to say which part is for which replica"
        )

    def _stays(self, path: Path) -> bool:
        """Returns whether a path leads into a keyword argument that is not moved."""
        if not self._stay or not path or isinstance(path[0], SequenceKey):
            return False
        return name_of(path[0]) in self._stay

    def _title(self, leaf: Leaf) -> str:
        if not leaf.path:
            return "the input"
        return f"`{self._prefix if isinstance(leaf.path[0], SequenceKey) else ''}{leaf.path}`"

    def _common_count(self, scattered: list[Leaf]) -> int:
        """Returns the number of entries of every `Scattered`."""
        first = scattered[0]
        count = len(first.value)
        for leaf in scattered:
            if len(leaf.value) != count:
                raise ValueError(
                    "every Scattered must have one entry per replica (got "
                    f"{count} entries of {self._title(first)} and {len(leaf.value)} of "
                    f"{self._title(leaf)})"
                )
        if not 1 <= count <= len(self._devices):
            raise ValueError(
                f"{self._title(first)} must have one entry per replica (expected 1 to "
                f"{len(self._devices)}, got {count})"
            )
        return count

    def _common_length(self, batch: list[Leaf]) -> int:
        first = batch[0]
        length = self._length(first)
        for leaf in batch[1:]:
            if self._length(leaf) != length:
                raise ValueError(
                    "tensors must have the same length along the batch dimension "
                    f"{self._dim} (got shapes {tuple(first.value.shape)} of {self._title(first)} "
                    f"and {tuple(leaf.value.shape)} of {self._title(leaf)}); register a tensor "
                    "that every replica needs unsplit as a buffer of the module, or pass "
                    "Scattered(parts) with one part per replica"
                )
        return length

    def _length(self, leaf: Leaf) -> int:
        length = _length_of(leaf.value, self._dim)
        if length is None:
            raise ValueError(
                f"{self._title(leaf)} must have a dimension {self._dim} to be split along "
                f"(got shape {tuple(leaf.value.shape)})"
            )
        return length


def _sizes_of(entries: Scattered, dim: int) -> list[int] | None:
    """Returns the length of each entry. None if an entry has no length, or several."""
    sizes = []
    for entry in entries:
        lengths = {
            _length_of(leaf.value, dim)
            for leaf in flatten(entry)[0]
            if _is_batch(leaf.value) and not any(isinstance(key, SequenceKey) for key in leaf.path)
        }
        length = lengths.pop() if len(lengths) == 1 else None
        if length is None:
            return None
        sizes.append(length)
    return sizes


def _length_of(tensor: Tensor, dim: int) -> int | None:
    return tensor.size(dim) if -tensor.dim() <= dim < tensor.dim() else None


def even_sizes(length: int, parts: int) -> list[int]:
    """Returns the sizes of `torch.tensor_split`, which are as even as possible."""
    return [length // parts + (i < length % parts) for i in range(parts)]


def chunk_sizes(length: int, parts: int) -> list[int]:
    """Returns the sizes of `torch.chunk`, which may be fewer than ``parts``."""
    part = max(1, -(-length // parts))
    return [min(part, length - start) for start in range(0, length, part)] or [0]


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _split(
    tensor: Tensor, sizes: list[int], dim: int, devices: Sequence[torch.device | None]
) -> list[Tensor]:
    """Returns the parts of a tensor, each on its device."""
    if tensor.is_sparse:  # torch has no views of sparse tensors
        order = torch.arange(tensor.size(dim), device=tensor.device)
        parts = [tensor.index_select(dim, rows) for rows in order.split(sizes)]
        return list(map(moved, parts, devices))
    return [
        _separate(part, device)
        for part, device in zip(tensor.split(sizes, dim), devices, strict=False)
    ]


def _separate(view: Tensor, device: torch.device | None) -> Tensor:
    """Returns a copy of a part on its device.

    A part that stays is copied as well: an in-place change by one replica must change neither the
    parts of the others nor the caller's tensor. A part that leaves is copied once. Through a clone
    it would come from pageable memory, also if the batch is in pinned memory.
    """
    copy: Tensor = moved(view, device)
    return view.clone() if copy is view else copy


def moved(tree: Any, device: torch.device | None) -> Any:
    """Returns ``tree`` with its tensors on ``device``. None leaves them where they are."""
    if device is None:
        return tree
    if isinstance(tree, Tensor):
        return to_device(tree, device)

    def on_device(leaf: Any) -> Any:
        return to_device(leaf, device) if isinstance(leaf, (Tensor, PackedSequence)) else leaf

    return replace_leaves(on_device, tree, {})
