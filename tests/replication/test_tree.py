"""Containers of all kinds as arguments and outputs, and as attributes of modules."""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree

from replication import DataParallel, Scattered, gather, replicate, scatter, scatter_kwargs
from replication.tree import leaves_of, replace_leaves
from tests.kit.memory import freed, no_garbage_collection

CPUS = ["cpu", "cpu"]
X = torch.arange(6.0).view(3, 2)


def seen(value: Any, devices: int) -> list[Any]:
    """What each replica is given for an argument that stands beside a batch of two samples."""
    inputs, _ = scatter_kwargs((value, torch.zeros(2)), None, ["cpu"] * devices)
    assert len(inputs) == devices
    return [args[0] for args in inputs]


# -- objects that travel as they are -----------------------------------------------------------


def registered(kind: Any) -> Any:
    """Registers a class that has ``parts`` with torch's pytree, without names for them."""
    _pytree.register_pytree_node(kind, lambda x: (list(x.parts), None), lambda xs, _: kind(*xs))
    return kind


@registered
class Plain:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts


@registered
class WithTensor(Plain):
    """A class whose objects may hold a tensor or none."""


class Attrs:
    """Looks like a class of the attrs library."""

    __attrs_attrs__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Frozen(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclass
class Linked:
    """Refers to itself, as nodes of a configuration do."""

    name: str
    parent: Any = None


class Own(list):
    pass


def linked() -> Linked:
    child = Linked("child")
    child.parent = Linked("parent", [child])
    return child


def plain_cycle() -> Plain:
    plain = Plain()
    plain.parts = (plain, 1)
    return plain


def own_cycle() -> Own:
    own = Own()
    own.append(own)
    return own


WHOLE: dict[str, Callable[[], Any]] = {
    "registered without names": lambda: Plain(1, "a", None),
    "registered, with further children": lambda: Plain([1, {"a": 2}], Plain()),
    "registered and empty": Plain,
    "registered and in a cycle": plain_cycle,
    "dataclasses in a cycle": linked,
    "a derived list in a cycle": own_cycle,
    "derived and empty": Own,
    "UserDict": lambda: UserDict(a=1),
    "UserList": lambda: UserList([1]),
    "attrs": lambda: Attrs(X),
    "Mapping": lambda: Frozen(x=X),
    "generator": lambda: (i for i in range(3)),
    "set": lambda: {1, 2},
    "a class": lambda: Linked,
    "torch.Size": lambda: X.size(),
    "tuple made in C": lambda: sys.version_info,
    "mock of a list": lambda: mock.Mock(spec=list),
    "module that is a dataclass": lambda: DataModule(nn.Parameter(X)),
}


@dataclass(eq=False)
class DataModule(nn.Module):
    weight: nn.Parameter

    def __new__(cls, *args: Any) -> Any:
        module = super().__new__(cls)
        nn.Module.__init__(module)
        return module


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("devices", [1, 2])
def test_object_that_holds_nothing_to_split_goes_to_all_replicas_as_it_is(make, devices):
    value = make()
    assert all(given is value for given in seen(value, devices))


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("devices", [1, 2])
def test_object_that_holds_nothing_to_join_is_returned_as_it_is(make, devices):
    values = [make() for _ in range(devices)]
    inputs = [Scattered(values)]
    output = DataParallel(nn.Identity(), ["cpu"] * devices)(*inputs)
    found = [output] if devices == 1 else output
    assert all(one is other for one, other in zip(found, values, strict=True))


# -- containers that are split and joined ------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


class NamedPair(Pair):
    """Derived from a namedtuple, with another attribute."""


class Row(tuple):
    pass


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Tensor
    n: int = 1


@dataclass
class WithInitVar:
    x: Tensor
    factor: InitVar[int]
    scaled: Any = field(init=False, default=None)

    def __post_init__(self, factor: int) -> None:
        self.scaled = self.x * factor


@dataclass
class WithoutField:
    x: Tensor
    late: Any = field(init=False)


class Encoding(UserDict):
    """As tokenizers return it."""

    def __init__(self, data: Any, encodings: Any) -> None:
        super().__init__(data)
        self.encodings = encodings


class Mirror(dict):
    """A dict whose items are attributes as well, as EasyDict has it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)


class AttrDict(dict):
    """A dict whose keys are its attributes, as a common recipe has it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Registry(dict):
    """Refuses to be filled."""

    def __init__(self, items: Any) -> None:
        dict.update(self, items)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise KeyError("is registered already")


def mirror(x: Tensor) -> Mirror:
    made = Mirror()
    made.x, made.n = x, 1
    return made


def pair_with_note(x: Tensor) -> NamedPair:
    made = NamedPair(x, 1)
    made.note = "kept"
    return made


#: How a container is made around a tensor, and how the tensor is found in it. These are opened in
#: attributes of modules as well.
BUILTIN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda x: [x], lambda v: v[0]),
    "tuple": (lambda x: (1, x), lambda v: v[1]),
    "Counter": (lambda x: Counter({"x": x}), lambda v: v["x"]),
    "OrderedDict": (lambda x: OrderedDict(x=x), lambda v: v["x"]),
    "defaultdict": (lambda x: defaultdict(int, x=x), lambda v: v["x"]),
    "dict of keys that are no str": (lambda x: {None: 1, (1, 2): x}, lambda v: v[1, 2]),
    "keys that look the same": (lambda x: {1: None, "1": x}, lambda v: v["1"]),
    "keys with dots": (lambda x: {"a.b": x, "a": {"b": x}}, lambda v: v["a"]["b"]),
    "derived from a tuple": (lambda x: Row([1, x]), lambda v: v[1]),
    "derived from a namedtuple": (pair_with_note, lambda v: v.left),
    "attributes that mirror items": (mirror, lambda v: v.x),
    "keys that are attributes": (lambda x: AttrDict(x=x), lambda v: v.x),
    "dict that refuses items": (lambda x: Registry({"x": x}), lambda v: v["x"]),
    "return_types": (lambda x: torch.return_types.max((x, x)), lambda v: v.indices),
    "around empty ones": (lambda x: [[], {}, (), deque(), x, None], lambda v: v[4]),
    "deep": (lambda x: [{"deep": (None, [x])}], lambda v: v[0]["deep"][1][0]),
}

SPLIT = {
    **BUILTIN,
    "deque": (lambda x: deque([x], maxlen=3), lambda v: v[0]),
    "registered": (lambda x: Plain(1, x), lambda v: v.parts[1]),
    "registered around registered": (lambda x: Plain(Plain(x)), lambda v: v.parts[0].parts[0]),
    "frozen dataclass with slots": (FrozenSlots, lambda v: v.x),
    "dataclass with InitVar": (lambda x: WithInitVar(x, 2), lambda v: v.scaled / 2),
    "dataclass without a field": (WithoutField, lambda v: v.x),
    "UserDict": (lambda x: Encoding({"x": x}, ["e"]), lambda v: v["x"]),
    "UserList": (lambda x: UserList([x]), lambda v: v[0]),
}


@pytest.mark.parametrize(("wrap", "unwrap"), SPLIT.values(), ids=SPLIT.keys())
def test_container_is_split_and_joined_again(wrap, unwrap):
    value = wrap(X)
    parts = scatter(value, CPUS)
    assert [type(part) for part in parts] == [type(value)] * 2
    assert [unwrap(part).tolist() for part in parts] == [X[:2].tolist(), X[2:].tolist()]
    joined = gather(parts, "cpu")
    assert type(joined) is type(value)
    assert torch.equal(unwrap(joined), X)
    assert torch.equal(unwrap(value), X)
    assert all(part is not value for part in parts)


@pytest.mark.parametrize(("wrap", "unwrap"), SPLIT.values(), ids=SPLIT.keys())
def test_container_moves_to_the_only_device(wrap, unwrap):
    value = wrap(X)
    (given,) = scatter_kwargs((value,), None, ["meta"])[0][0]
    assert type(given) is type(value)
    assert unwrap(given).device.type == "meta"
    assert torch.equal(unwrap(value), X)
    assert scatter_kwargs((value,), None, ["cpu"])[0][0][0] is value


def test_parts_keep_what_is_beside_the_items():
    first, _ = scatter(deque([X], maxlen=3), CPUS)
    assert first.maxlen == 3
    assert scatter(defaultdict(list, x=X), CPUS)[0]["new"] == []
    assert scatter(pair_with_note(X), CPUS)[0].note == "kept"
    assert scatter(Encoding({"x": X}, ["e"]), CPUS)[1].encodings == ["e"]
    assert not hasattr(scatter(WithoutField(X), CPUS)[0], "late")
    ordered = OrderedDict(a=X, b=X)
    ordered.move_to_end("a")
    assert list(scatter(ordered, CPUS)[0]) == ["b", "a"]


def test_attributes_that_mirror_items_are_the_parts_own():
    for part in (*scatter(mirror(X), CPUS), *scatter(AttrDict(x=X), CPUS)):
        assert part["x"] is part.x
    part.y = X
    assert part["y"] is X


@pytest.mark.parametrize(
    "kind", [OrderedDict, partial(defaultdict, int)], ids=["Ordered", "default"]
)
def test_keys_of_replicas_are_matched_in_any_order(kind):
    parts = [kind(a=X, b=X + 1), kind(b=X + 1, a=X)]
    joined = gather(parts, "cpu")
    assert type(joined) is type(parts[0])
    assert torch.equal(joined["a"], torch.cat([X, X]))
    assert torch.equal(joined["b"], torch.cat([X, X]) + 1)


def test_namedtuples_are_opened_without_tensors_as_well():
    assert gather([Pair(1, "a"), Pair(2, "b")], "cpu") == Pair([1, 2], ["a", "b"])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "make",
    [WithTensor, lambda x: UserDict(x=x), lambda x: Linked("n", x)],
    ids=["WithTensor", "UserDict", "Linked"],
)
def test_container_that_holds_a_tensor_in_one_replica_only_is_opened_in_all(make, first):
    outputs = [make(X), make(None)]
    joined = gather(outputs if first == 0 else outputs[::-1], "cpu")
    assert type(joined) is type(outputs[0])
    (entries,) = [v for v in _values(joined) if isinstance(v, list) and v not in (["n", "n"],)]
    assert torch.equal(entries[first], X)
    assert entries[1 - first] is None


def _values(value: Any) -> list[Any]:
    if isinstance(value, WithTensor):
        return list(value.parts)
    if isinstance(value, UserDict):
        return list(value.values())
    return list(vars(value).values())


def test_the_replica_that_differs_is_named_with_the_path():
    with pytest.raises(
        ValueError, match=r"replica 0: Tensor, replica 2: list of length 1 at `a.0`"
    ):
        gather([{"a": [X]}, {"a": [X]}, {"a": [[X]]}], "cpu")
    for one, other, named in (
        ({"x": X}, UserDict(x=X), "dict with x, replica 1: UserDict"),
        ([X], (X,), "list of length 1, replica 1: tuple"),
        ([X], Own([X]), "list of length 1, replica 1: Own"),
        (Plain(X), WithTensor(X), "Plain of length 1, replica 1: WithTensor"),
    ):
        with pytest.raises(ValueError, match=f"replica 0: {named}"):
            gather([one, other], "cpu")
    with pytest.raises(
        ValueError, match=r"replica 2: list of length 2 at `a`\); to keep one list"
    ):
        gather([{"a": [X]}, {"a": [X]}, {"a": [X, X]}], "cpu")
    with pytest.raises(ValueError, match=r"dict with a, b, replica 1: dict with a\)"):
        gather([{"a": X, "b": X}, {"a": X}], "cpu")


class Keyed(OrderedDict):
    """A dict that is registered without names."""


_pytree.register_pytree_node(
    Keyed,
    lambda x: (list(x.values()), list(x)),
    lambda xs, names: Keyed(zip(names, xs, strict=True)),
)


def test_items_of_a_registered_dict_have_the_names_of_its_keys():
    output = Keyed(score=X, hidden=X)
    joined = gather([output, output], "cpu", except_keywords=["hidden"])
    assert isinstance(joined["hidden"], Scattered) and torch.is_tensor(joined["score"])
    with pytest.warns(UserWarning, match="it has `score`, `hidden`$"):
        gather([output, output], "cpu", except_keywords=["other"])


class Sized(Plain):
    """Registered with a context that outputs must share."""


_pytree.register_pytree_node(
    Sized, lambda x: (list(x.parts[1:]), x.parts[0]), lambda xs, size: Sized(size, *xs)
)


def test_registered_classes_of_different_contexts_are_different_structures():
    assert gather([Sized(2, X), Sized(2, X)], "cpu").parts[0] == 2
    with pytest.raises(ValueError, match=r"replica 0: Sized of length 1, replica 1: Sized"):
        gather([Sized(2, X), Sized(3, X)], "cpu")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: scatter([x, {"x": x}], CPUS),
        lambda x: scatter_kwargs(([1],), {"x": Scattered([x, [x]])}, CPUS),
        lambda x: scatter_kwargs(([x],), {"x": x}, ["meta"]),
        lambda x: gather([[x, {"x": x}]] * 2, "cpu"),
        lambda x: replicate(Holder(value=[x, {"x": x}]), ["meta"]),
    ],
    ids=["scatter", "scatter_kwargs", "one device", "gather", "replicate"],
)
def test_tensors_are_freed_with_their_last_reference(call):
    x = torch.ones(2, 2)
    gone = weakref.ref(x)
    with no_garbage_collection():
        result = call(x)
        del x, result
        assert freed(gone)


# -- plain attributes of modules ---------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


def on_meta(**values: Any) -> Any:
    """The replica on another device of a module with some plain attributes."""
    return replicate(Holder(**values), ["cpu", "meta"])[1]


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [*BUILTIN.values(), (lambda x: torch.return_types.max((x, x)), lambda v: v.values)],
    ids=[*BUILTIN, "return_types, values"],
)
def test_containers_of_attributes_are_moved(wrap, unwrap):
    value = wrap(X)
    moved = on_meta(value=value).value
    assert type(moved) is type(value)
    assert unwrap(moved).device.type == "meta"
    assert unwrap(value) is X or torch.equal(unwrap(value), X)


def test_packed_sequence_in_an_attribute_moves_as_torch_moves_it():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    moved = on_meta(value=[packed]).value[0]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"  # as torch has it on every device


@pytest.mark.parametrize("held", [X, [X]], ids=["tensor", "container"])
def test_what_several_attributes_hold_is_one_in_the_replica(held):
    replica = on_meta(one=held, other=[held, {"x": held}], apart=copy.copy(held))
    assert replica.one is replica.other[0] is replica.other[1]["x"]
    assert replica.one is not held and replica.apart is not replica.one


@pytest.mark.parametrize("make", [dataclasses.make_dataclass("R", ["x"]), lambda x: deque([x])])
def test_other_containers_in_attributes_are_shared(make):
    value = make(X)
    assert on_meta(value=value).value is value


# -- walks over objects that vanish ------------------------------------------------------------


class Number:
    def __init__(self, value: int) -> None:
        self.value = value


class Fresh(Plain):
    """Registered so that each look finds new leaves, at addresses that are used again."""


_pytree.register_pytree_node(
    Fresh,
    lambda x: ([Number(*x.parts), [Number(*x.parts)], {"x": (Number(*x.parts),)}], None),
    lambda xs, _: tuple(xs),
)


def test_leaves_are_told_apart_where_addresses_are_used_again():
    trees = [Fresh(n) for n in range(50)]
    assert sorted(leaf.value for leaf in leaves_of(trees)) == sorted([*range(50)] * 3)
    found = replace_leaves(lambda leaf: leaf.value, trees)
    assert found == [(n, [n], {"x": (n,)}) for n in range(50)]
