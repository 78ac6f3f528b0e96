"""`CallbackContext`: a bag of attributes, three fields, and the groups of a layer's copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    CallbackContext,
    DataParallel,
    ReplicationError,
    SoloGroup,
    execute_replication_callbacks,
    replicate,
)
from tests.kit.memory import pickled


class Keeps(nn.Module):
    """Keeps the context, and sums over the copies."""

    ctx: Any = None
    copy_id = 0

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.ctx, self.copy_id = ctx, copy_id

    def forward(self, x: Tensor) -> Tensor:
        return self.ctx.group(self.copy_id).all_reduce(x.sum(0, keepdim=True))


def contexts(module: nn.Module, on: list[str], **options: Any) -> list[Any]:
    replicas = replicate(module, on)
    execute_replication_callbacks(replicas, **options)
    return [replica.get_submodule("1.0").ctx for replica in replicas]


CPUS = ["cpu"] * 2
NET = nn.Sequential(nn.ReLU(), nn.Sequential(Keeps(), nn.Linear(1, 1)))


# -- fields ------------------------------------------------------------------------------------


def test_fields():
    first, *others = contexts(NET, ["cpu", "cpu", "meta"])
    assert first.num_copies == 3
    assert first.path == "1.0"
    assert [str(device) for device in first.devices] == ["cpu", "cpu", "meta"]
    assert all(ctx is first for ctx in others)


def test_devices_may_be_given():
    (ctx, _) = contexts(NET, CPUS, devices=["meta", torch.device("cpu")])
    assert ctx.devices == (torch.device("meta"), torch.device("cpu"))


def test_devices_of_copies_without_tensors_are_unknown_unless_given():
    replicas = replicate(Keeps(), ["cpu"] * 2)
    execute_replication_callbacks(replicas)
    assert replicas[0].ctx.devices == (None, None)
    (replica, _) = DataParallel(Keeps(), ["cpu"] * 2).replicate(Keeps(), ["cpu"] * 2)
    assert replica.ctx.devices == (torch.device("cpu"),) * 2


def test_another_number_of_devices_is_refused():
    with pytest.raises(ValueError, match=r"one device per copy, 2 \(got 1\)"):
        contexts(NET, CPUS, devices=["cpu"])


# -- groups ------------------------------------------------------------------------------------


def test_single_copy_has_a_group_of_one():
    (ctx,) = contexts(NET, ["cpu"])
    assert isinstance(ctx.group(0), SoloGroup)
    assert isinstance(CallbackContext().group(0), SoloGroup)


@pytest.mark.parametrize(
    ("copy_id", "error", "text"),
    [
        (2, IndexError, r"`1.0` has copies 0 to 1 \(got copy_id 2\)"),
        (-1, IndexError, "got copy_id -1"),
        ("1", IndexError, "got copy_id '1'"),
    ],
)
def test_copy_that_does_not_exist_is_refused(copy_id, error, text):
    ctx, _ = contexts(NET, CPUS)
    with pytest.raises(error, match=text):
        ctx.group(copy_id)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copy_of_a_context_keeps_its_attributes_and_belongs_to_no_forward(copied):
    ctx, _ = contexts(NET, CPUS)
    ctx.kept = ctx.group(1)
    twin = copied(ctx)
    assert (twin.num_copies, twin.path, twin.devices) == (2, "1.0", ctx.devices)
    for call in (lambda: twin.group(0), twin.kept.barrier):
        with pytest.raises(
            ReplicationError, match=r"`1\.0`: a CallbackContext and its groups belong"
        ):
            call()


def test_context_made_by_hand_for_several_copies_has_no_groups():
    with pytest.raises(ReplicationError, match="was copied or created by hand"):
        CallbackContext(2).group(0)
