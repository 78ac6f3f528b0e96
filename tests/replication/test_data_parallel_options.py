"""What each option of DataParallel does to arguments and outputs."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from replication import DataParallel, Scattered, data_parallel, gather, scatter, scatter_kwargs
from tests.kit.layers import Echo

CPUS = ["cpu", "cpu"]

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Record:
    image: Tensor
    name: str
    extra: Any = None
    derived: int = field(init=False, default=7)


def echo(replicas: int, **options: Any) -> DataParallel:
    return DataParallel(Echo(), ["cpu"] * replicas, **options)


def lengths(scattered: Scattered) -> list[int]:
    return [len(entry) for entry in scattered]


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [0, 1])
def test_without_replicas_the_module_gets_the_same_arguments(devices):
    module = Echo()
    model = DataParallel(module, ["cpu"] * devices or None, dim=3)
    x, flag, y = torch.arange(3), object(), {"z": torch.zeros(2)}
    model(x, flag, y=y)
    model(torch.arange(3), torch.arange(5))  # nothing is split, so lengths may differ
    (args, kwargs), _ = module.seen
    assert args[0] is x
    assert args[1] is flag
    assert kwargs["y"] is y


def test_a_tensor_that_stays_without_the_batch_dimension_is_an_error_that_names_it():
    model = DataParallel(echo(2).module, ["cpu"] * 2, dim=1, cpu_keywords=["boxes"])
    with pytest.raises(ValueError, match=r"`boxes` must have a dimension 1.*\(4,\)"):
        model(torch.zeros(5, 4), boxes=torch.zeros(4))


def test_a_packed_sequence_goes_whole_and_moves_as_one():
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    model = echo(2)
    model(torch.zeros(4), packed)
    assert all(args[1] is packed for args, _ in model.module.seen)
    inputs, _ = scatter_kwargs(([packed] * 2,), {}, ["meta"] * 2, inputs_are_scattered=True)
    assert [args[0].data.device.type for args in inputs] == ["meta"] * 2


# -- gather_to_one_device ----------------------------------------------------------------------


def test_outputs_stay_where_they_are_in_the_structure_they_are_in():
    x = torch.arange(10).view(5, 2)
    output = echo(3, gather_to_one_device=False)(x, pair=Pair(x, None), n=3)
    assert lengths(output["args"][0]) == lengths(output["pair"].first) == [2, 2, 1]
    assert type(output["pair"]) is Pair
    assert output["pair"].second is None
    assert output["n"] == Scattered((3, 3, 3))


@pytest.mark.parametrize("devices", [0, 1])
def test_single_device_scatters(devices):
    devices = ["cpu"] * devices or None
    output = DataParallel(Echo(), devices, gather_to_one_device=False)(torch.zeros(5))
    assert isinstance(output, Scattered)
    assert lengths(output) == [5]
    assert DataParallel(Echo(), devices)(output).shape == (5,)


def test_the_next_network_recognizes_what_is_scattered():
    x = torch.arange(10).view(5, 2)
    features = echo(3, gather_to_one_device=False)(x)
    model = echo(4)
    output = model(features, [features, 1], labels=torch.arange(5), flag=True, y={"z": features})
    assert len(model.module.seen) == 3
    assert torch.equal(output["args"][0], x)
    assert torch.equal(output["args"][1][0], x)
    assert torch.equal(output["labels"], torch.arange(5))  # labels have stayed with their features
    assert torch.equal(output["y"]["z"], x)
    sizes = sorted(len(kwargs["labels"]) for _, kwargs in model.module.seen)
    assert sizes == [1, 2, 2]


def test_nothing_is_split_twice_or_copied():
    entries = Scattered(torch.zeros(n, 2) for n in (3, 1))
    model = echo(2)
    model(entries)
    given = {id(args[0]) for args, _ in model.module.seen}
    assert given == set(map(id, entries))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, s: m(s, torch.zeros(6)),
            r"`args\[1\]` has length 6 .*`args\[0\]`\) has length 5, so it can't be split",
        ),
        (lambda m, s: m(s, y=Scattered(s[:2])), r"got 3 in `args\[0\]` and 2 in `y`"),
        (lambda m, s: m(Scattered([*s, *s])), r"per replica, 1 to 3 \(got 6"),
        (lambda m, s: m(Scattered()), r"per replica, 1 to 3 \(got 0"),
    ],
    ids=["tensor beside", "fewer beside", "too many", "none"],
)
def test_what_cannot_match_is_an_error(call, message):
    scattered = Scattered(torch.zeros(n) for n in (2, 2, 1))
    with pytest.raises(ValueError, match=message):
        call(echo(3), scattered)


def test_the_first_of_several_scattered_tensors_decides():
    parts = [Scattered(torch.zeros(n) for n in sizes) for sizes in ([2, 1], [1, 3])]
    output = echo(2, gather_to_one_device=False)(*parts, torch.zeros(3))
    assert lengths(output["args"][2]) == [2, 1]
    with pytest.raises(ValueError, match=r"`args\[2\]` has length 4.*`args\[0\]`. has length 3"):
        echo(2)(*parts, torch.zeros(4))


def boxes(*counts: int) -> list[Tensor]:
    """The boxes of some samples."""
    return [torch.zeros(count, 4) for count in counts]


def beside(*parts: Any, length: int = 4) -> list[int]:
    """The lengths of the parts of a tensor beside what is scattered."""
    return [len(args[-1]) for args in scatter((*map(Scattered, parts), torch.zeros(length)), CPUS)]


def test_tensors_tell_how_the_rest_is_split():
    parts = [torch.zeros(3, 2), torch.zeros(1, 2)]
    assert beside(parts) == [3, 1]
    with pytest.raises(ValueError, match=r"has length 5 .*has length 4, so it can't be split"):
        beside(parts, length=5)


@pytest.mark.parametrize(
    "parts",
    [
        [boxes(1, 1), boxes(3, 3)],
        [{"x": torch.zeros(1)}, {"x": torch.zeros(3)}],
        [["a", "b"], ["c", "d"]],
        [0, 1],
        [torch.tensor(1), torch.tensor(3)],
        [torch.zeros(1), None],
    ],
    ids=str,
)
def test_a_batch_beside_entries_that_do_not_tell_the_sizes_is_an_error(parts):
    """A list may hold one item for each sample or one for each argument: nothing is guessed."""
    with pytest.raises(ValueError, match="does not tell its lengths, so it can't be split"):
        beside(parts)
    images = torch.arange(4).split([1, 3])
    found = scatter((Scattered(parts), Scattered(images)), CPUS)
    assert [len(x) for _, x in found] == [1, 3]


def test_beside_entries_for_one_replica_a_batch_goes_whole():
    ((names, x),) = scatter((Scattered([["a", "b"]]), torch.arange(5)), CPUS)
    assert names == ["a", "b"]
    assert torch.equal(x, torch.arange(5))


# -- inputs_are_scattered ----------------------------------------------------------------------


def test_each_argument_has_one_entry_per_replica():
    model = echo(3, inputs_are_scattered=True)
    parts = [torch.zeros(n, 2) for n in (4, 1, 2)]
    output = model(parts, flag=(1, 2, 3), y=Scattered([{"z": part} for part in parts]))
    assert output["args"][0].shape == (7, 2)
    assert output["flag"] == [1, 2, 3]
    assert output["y"]["z"].shape == (7, 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        (([1, 2],), {}, ValueError, r"`args\[0\]` must be a list.*expected 3, got 2"),
        (([1, 2, 3],), {"y": [1] * 4}, ValueError, r"`y` must be a list.*expected 3, got 4"),
        ((torch.zeros(3),), {}, TypeError, r"`args\[0\]` must be a list.*got Tensor"),
        (([1, 2, 3],), {"flag": True}, TypeError, r"`flag` must be a list.*got bool"),
        ((Scattered([1, 2]), [1, 2, 3]), {}, ValueError, r"`args\[1\]`.*expected 2, got 3"),
    ],
    ids=["short", "long", "tensor", "flag", "beside fewer"],
)
def test_a_wrong_number_of_entries_is_an_error_that_names_the_argument(
    args, kwargs, error, message
):
    with pytest.raises(error, match=message):
        echo(3, inputs_are_scattered=True)(*args, **kwargs)


def test_fewer_shards_than_devices_use_as_many_replicas():
    features = echo(3, gather_to_one_device=False)(torch.arange(2))
    model = echo(3, inputs_are_scattered=True)
    assert torch.equal(model(features), torch.arange(2))
    assert len(model.module.seen) == 2


def test_a_loader_delivers_one_batch_per_device():
    items = [{"x": torch.full((n, 2), n), "name": str(n)} for n in (3, 1, 2, 4)]
    loader = DataLoader(items, batch_size=2, collate_fn=Scattered)
    outputs = [echo(2)(batch) for batch in loader]
    assert [len(output["x"]) for output in outputs] == [4, 6]
    assert [output["name"] for output in outputs] == [["3", "1"], ["2", "4"]]


# -- except_keywords ---------------------------------------------------------------------------


class Outputs(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        inner = {"out1": x, "out2": [x, {"deep": x}]}
        return {"outputs": inner, "second": x, "again": {"out1": x}, "record": Record(x, "n")}


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["out1"], ["outputs.out1", "again.out1"]),
        (["outputs"], ["outputs.out1", "outputs.out2.0", "outputs.out2.1.deep"]),
        (["deep", "second"], ["outputs.out2.1.deep", "second"]),
        (["image"], ["record.image"]),
        (("out2",), ["outputs.out2.0", "outputs.out2.1.deep"]),
    ],
    ids=str,
)
def test_outputs_under_the_names_stay_scattered(names, kept):
    x = torch.arange(5)
    output = DataParallel(Outputs(), ["cpu"] * 2, except_keywords=names)(x)
    found = {
        "outputs.out1": output["outputs"]["out1"],
        "outputs.out2.0": output["outputs"]["out2"][0],
        "outputs.out2.1.deep": output["outputs"]["out2"][1]["deep"],
        "second": output["second"],
        "again.out1": output["again"]["out1"],
        "record.image": output["record"].image,
    }
    for path, value in found.items():
        assert isinstance(value, Scattered) == (path in kept), path
        assert torch.equal(torch.cat(value) if path in kept else value, x), path


@pytest.mark.parametrize("devices", [1, 2])
def test_a_name_that_does_not_match_is_reported_with_the_names_that_exist(devices):
    model = DataParallel(Outputs(), ["cpu"] * devices, except_keywords=["out1", "out3"])
    with pytest.warns(UserWarning, match=r"names 'out3'.*it has `outputs.out1`.*`second`"):
        model(torch.arange(5))


def test_an_output_that_is_an_empty_list_is_no_unknown_name():
    """Such as the boxes of a detector that has found none."""
    output = {"y": torch.ones(2), "found": {"boxes": []}}
    for name in ("found", "boxes"):
        assert gather([output, output], "cpu", except_keywords=[name])["found"] == {"boxes": []}


@pytest.mark.parametrize("names", ["out1", [1], None, 3], ids=str)
@pytest.mark.parametrize("option", ["except_keywords", "cpu_keywords"])
def test_names_are_given_as_a_list(option, names):
    with pytest.raises(TypeError, match=f"{option} must be a list of names"):
        echo(2, **{option: names})


# -- sort_and_gather ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "order"),
    [(["meta:2", "cpu", "meta:2", "meta:1"], [1, 3, 0, 2]), (["cpu"] * 4, [0, 1, 2, 3])],
    ids=str,
)
@pytest.mark.parametrize("sorts", [False, True])
def test_all_leaves_have_the_order_of_the_devices(devices, order, sorts):
    model = echo(2, sort_and_gather=sorts, except_keywords=["kept"])
    model.device_ids = devices
    outputs = [
        {"x": torch.tensor([i, i]), "n": i, "kept": torch.tensor([i]), "t": torch.tensor(i)}
        for i in range(len(devices))
    ]
    output = model.gather(outputs, "cpu")
    expected = order if sorts else [*range(len(devices))]
    assert output["n"] == expected
    assert output["x"][::2].tolist() == output["t"].tolist() == expected
    assert [entry.item() for entry in output["kept"]] == expected


# -- cpu_keywords ------------------------------------------------------------------------------


def test_cpu_keywords_stay_on_a_single_device_as_well():
    x, y = torch.zeros(4), {"z": torch.zeros(4)}
    ((moved,),), (kwargs,) = scatter_kwargs((x,), {"y": y, "x": x}, ["meta"], cpu_keywords=["y"])
    assert (moved.device.type, kwargs["x"].device.type) == ("meta", "meta")
    assert list(kwargs) == ["y", "x"]
    assert kwargs["y"] is y


def test_cpu_keywords_are_split_but_not_moved():
    x, boxes = torch.zeros(4, 2), torch.zeros(4, 4)
    inputs, kwargs = scatter_kwargs(
        (x,), {"boxes": boxes, "moved": x}, ["meta"] * 2, cpu_keywords=["boxes", "0"]
    )
    assert [args[0].device.type for args in inputs] == ["meta"] * 2  # "0" is no keyword here
    assert [kw["moved"].device.type for kw in kwargs] == ["meta"] * 2
    assert [kw["boxes"].device.type for kw in kwargs] == ["cpu"] * 2
    assert [len(kw["boxes"]) for kw in kwargs] == [2, 2]


def test_cpu_keywords_have_the_length_of_the_batch():
    with pytest.raises(ValueError, match=r"`boxes` has length 7 .*`args\[0\]`\) has length 5"):
        echo(3, cpu_keywords=["boxes"])(torch.zeros(5), boxes=torch.zeros(7))


def test_cpu_keywords_keep_their_gradients():
    boxes = torch.randn(5, 2, requires_grad=True)
    weights = torch.randn(5, 2)
    output = echo(3, cpu_keywords=["boxes"])(torch.zeros(5), boxes=boxes)
    (output["boxes"] * weights).sum().backward()
    assert torch.equal(boxes.grad, weights)


# -- options together --------------------------------------------------------------------------


def test_the_functional_form_has_the_same_policies():
    x = torch.arange(5)
    kept = data_parallel(Echo(), x, ["cpu"] * 2, gather_to_one_device=False)
    assert torch.equal(data_parallel(Echo(), kept, ["cpu"] * 2), x)  # one argument, not two
    assert lengths(kept) == [3, 2]
    assert torch.equal(data_parallel(Echo(), (kept,), ["cpu"] * 2, inputs_are_scattered=True), x)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        data_parallel(Echo(), x, ["cpu"] * 2, scattered=True)


@given(samples=st.integers(1, 9), first=st.integers(1, 5), second=st.integers(5, 6))
def test_networks_chained_by_what_is_scattered_equal_the_plain_composition(samples, first, second):
    a, b = nn.Linear(3, 4).double(), nn.Bilinear(4, 1, 2).double()
    x = torch.randn(samples, 3, dtype=torch.float64)
    y = torch.randn(samples, 1, dtype=torch.float64)
    upstream = torch.randn(samples, 2, dtype=torch.float64)
    expected = b(a(x), y)
    grads = torch.autograd.grad(expected, [*a.parameters(), *b.parameters()], upstream)
    extract = DataParallel(a, ["cpu"] * first, gather_to_one_device=False)
    combine = DataParallel(b, ["cpu"] * second)
    output = combine(extract(x), y)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output, [*a.parameters(), *b.parameters()], upstream)
    torch.testing.assert_close(found, grads)
