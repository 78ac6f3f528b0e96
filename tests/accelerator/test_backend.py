"""The simulated accelerator finds what it is there to find."""

from __future__ import annotations

import pytest
import torch

from tests import accelerator
from tests.devices import has_simulated

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not has_simulated(), reason="needs pytest --simulated-accelerator"),
]


@pytest.fixture(autouse=True)
def nothing_found_before() -> None:
    accelerator.findings()


def new_stream(index: int = 0) -> torch.Stream:
    return torch.Stream(device=f"sim:{index}")


@pytest.mark.parametrize("other", ["sim:1", "cpu"])
def test_operations_on_two_devices_are_refused(other):
    x, y = torch.ones(3, device="sim:0"), torch.ones(3, device=other)
    for operation in (torch.add, torch.dot, torch.outer):
        with pytest.raises(RuntimeError, match="on the same device"):
            operation(x, y)
    # As on CUDA.
    assert (x * torch.tensor(2.0, device="cpu")).sum().item() == 6
    assert x[torch.tensor([0, 2], device="cpu")].shape == (2,)


def test_an_access_that_waits_for_nothing_is_found():
    x = torch.ones(3, device="sim:0")
    with torch.sim.stream(new_stream()):
        y = x + 1
    (found,) = accelerator.findings()
    assert found.startswith("add on stream ")
    assert "does not wait for fill_ on stream 0 of device 0" in found
    assert y.tolist() == [2, 2, 2]


def test_an_event_or_the_host_orders_accesses():
    x, stream = torch.ones(3, device="sim:0"), new_stream()
    stream.wait_event(torch.sim.current_stream().record_event())
    with torch.sim.stream(stream):
        x.add_(1)
    assert accelerator.findings() == []
    stream.synchronize()
    x.add_(1)
    assert accelerator.findings() == []


def test_reads_need_no_order_but_a_write_after_a_read_does():
    x, stream = torch.ones(3, device="sim:0"), new_stream()
    torch.sim.synchronize()
    with torch.sim.stream(stream):
        x.sum()
    x.sum()
    assert accelerator.findings() == []
    x.add_(1)
    (found,) = accelerator.findings()
    assert found.startswith("add_ on stream 0") or found.startswith("add on stream 0")


@pytest.mark.parametrize("records", [False, True])
def test_memory_that_is_freed_while_another_stream_reads_it_is_found(records):
    x, stream = torch.ones(3, device="sim:0"), new_stream()
    torch.sim.synchronize()
    with torch.sim.stream(stream):
        y = x + 1
    if records:
        x.record_stream(stream)
    del x
    assert len(accelerator.findings()) == (0 if records else 1)
    assert y.device.type == "sim"


def test_a_copy_between_devices_is_ordered_on_both():
    x = torch.ones(3, device="sim:0")
    y = x.to("sim:1")
    x.add_(1)
    y.add_(1)
    assert accelerator.findings() == []
    assert (x.tolist(), y.tolist()) == ([2, 2, 2], [2, 2, 2])


def test_launches_and_waits_of_the_host_are_counted():
    x = torch.ones(3, device="sim:0")
    with accelerator.counting() as counted:
        x.add_(1).view(1, 3).sum().item()
        x.to("sim:1")
        x.cpu()
        torch.ones(2, device="cpu").to("sim:1", non_blocking=True)
        torch.sim.synchronize()
    assert counted == {
        "launch add": 1,
        "launch sum": 1,
        "launch _local_scalar_dense": 1,
        "wait _local_scalar_dense": 1,
        "copy sim:0->sim:1": 1,
        "wait sim:0->cpu": 1,
        "from host cpu->sim:1": 1,
        "wait synchronize of a device": 1,
    }
