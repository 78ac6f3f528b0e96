"""The simulated runtime refuses what CUDA refuses, and counts what is done."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.cuda import runtime

pytestmark = [pytest.mark.gpu, runtime.needs_simulation]


def test_launches_copies_and_waits_are_counted():
    x = torch.ones(3, device="cuda:0")
    torch.cuda.synchronize()
    with runtime.counted() as found:
        x.add_(1).view(1, 3).sum().item()
        x.cpu()
    functors = [name.partition("[")[2] for name in runtime.kernels(found)]
    assert sorted(functors)[-1] == "CUDAFunctorOnSelf_add]" and len(functors) == 2, functors
    assert found["copies"] == {
        "device to host, pinned, async": 1,  # of a number
        "device to host, pageable, async": 1,
    }
    assert sum(found["waits"].values()) >= 2
    assert "pointers" not in found and "errors" not in found


def test_a_copy_between_devices_is_counted():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x = torch.arange(3, device="cuda:0")
    with runtime.counted() as found:
        y = x.to("cuda:1")
    assert found["copies"] == {"between devices, async": 1}
    assert found["bytes"] == {"between devices, async": 24}
    assert y.tolist() == [0, 1, 2]


def test_everything_is_logged_in_its_order():
    x = torch.zeros(2, device="cuda:0")
    runtime.log_start()
    x.add_(1)
    x.to("cpu")
    log = [entry.split()[0] for entry in runtime.log()]
    assert log.index("kernel") < log.index("copy") < log.index("wait"), log


def test_kernels_take_the_time_that_they_are_given():
    x = torch.zeros(2, device="cuda:0")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    runtime.set_times(kernel=500)
    try:
        begin.record()
        for _ in range(4):
            x.add_(1)
        end.record()
        end.synchronize()
    finally:
        runtime.set_times(kernel=0)
    assert begin.elapsed_time(end) >= 2  # milliseconds
    assert x.tolist() == [4, 4]


def test_the_host_computes_for_launches_and_copies_and_sleeps_while_it_waits():
    x = torch.zeros(2, device="cuda:0")
    y = x.clone()
    for times, least, most in (({"launch": 2000}, 0.004, 1), ({"kernel": 200_000}, 0, 0.2)):
        runtime.set_times(**times)
        begin = time.process_time()
        try:
            y.copy_(x.add_(1))
            torch.cuda.synchronize()
        finally:
            runtime.set_times()
        assert least <= time.process_time() - begin < most


def test_an_event_of_another_device_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream("cuda:0"))
    with pytest.raises(RuntimeError, match="device"):
        event.record(torch.cuda.current_stream("cuda:1"))


@pytest.mark.parametrize(
    "call",
    [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize(), lambda x: x.cpu()],
    ids=["item", "synchronize", "copy to pageable memory"],
)
def test_a_capture_refuses_what_waits(call):
    x = torch.ones(3, device="cuda:0")
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        call(x)
    torch.cuda.synchronize()


def test_replays_of_a_graph_compute():
    x, total = torch.ones(3, device="cuda:0"), torch.zeros(3, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(x * 2)
    assert total.tolist() == [0, 0, 0]
    with runtime.counted() as found:
        graph.replay()
        x.fill_(10)
        graph.replay()
        assert total.tolist() == [22, 22, 22]
    assert found["replayed"]["kernel"] == 4


def test_a_forked_process_cannot_use_cuda():
    torch.ones(1, device="cuda:0")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="cuda:0")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_more_memory_than_a_device_has_is_refused():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 38, dtype=torch.uint8, device="cuda:0")
