"""State that several threads change at the same time, as listed in CONTRIBUTING.md.

The tests run on builds of Python with and without the GIL. With it, threads take turns as often as
possible.
"""

from __future__ import annotations

import copy
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from replication import execute_replication_callbacks, patch_replication_callback, replicate
from replication.groups import processes
from replication.warning import once_for
from syncbn import convert_model
from tests.kit.deadlines import DEADLINE
from tests.kit.layers import Centering
from tests.kit.programs import run_python
from tests.kit.steps import batch, each_wrap, network
from tests.kit.threads import together, values
from tests.kit.wrappers import CustomDataParallel

pytestmark = pytest.mark.slow

THREADS = 4


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Makes threads that have the GIL give it up as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Returns the values of calls that begin at the same time, each in a thread."""
    start = threading.Barrier(len(calls), timeout=DEADLINE)

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    return values(together(*(partial(run, call) for call in calls)))


@pytest.mark.skipif(
    sysconfig.get_config_var("Py_GIL_DISABLED") != 1, reason="this Python can't switch the GIL off"
)
def test_imports_leave_the_gil_off():
    program = "import sys, replication, syncbn; print(sys._is_gil_enabled())"
    assert run_python("-c", program).stdout == "False\n"


# -- forwards ----------------------------------------------------------------------------------


@each_wrap
@pytest.mark.parametrize("shared", ["one model", "one network", "nothing"])
def test_forwards_at_once_do_not_mix_their_messages(wrap, shared):
    """pytorch#8388. Two threads, each with its own batches."""
    nets = [network(), network()] if shared == "nothing" else [network()] * 2
    twins = [copy.deepcopy(net) for net in nets]
    models = [wrap(convert_model(net), n) for net, n in zip(nets, (2, 3), strict=True)]
    if shared == "one model":
        models = models[:1] * 2
    batches = [[batch(samples) for samples in sizes] for sizes in ((7, 2, 5) * 4, (3, 8, 4) * 4)]

    def run(module: nn.Module, index: int) -> list[Any]:
        outputs = []
        for x, dy in batches[index]:
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            outputs.append([y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], dy)])
        return outputs

    actual = at_once(*(partial(run, model, index) for index, model in enumerate(models)))
    torch.testing.assert_close(actual, [run(twin, index) for index, twin in enumerate(twins)])
    if shared == "nothing":  # who shares a layer shares its buffers, as without replicas
        for net, twin in zip(nets, twins, strict=True):
            torch.testing.assert_close([*net.buffers()], [*twin.buffers()])


# -- groups ------------------------------------------------------------------------------------


def test_threads_that_ask_at_once_get_groups_that_are_connected():
    from_callbacks: list[Any] = []

    class Layer(nn.Module):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            from_callbacks.append(ctx)

    execute_replication_callbacks(replicate(Layer(), ["cpu"] * 4))
    groups = at_once(*(partial(from_callbacks[0].group, i % 2) for i in range(4)))
    assert len({group._communicator for group in groups}) == 1


def test_process_group_has_one_state():
    for _ in range(20):
        group = nn.Module()  # any object
        states = at_once(*[partial(processes.state_of, group)] * THREADS)
        assert all(state is states[0] for state in states)


# -- the state of the process ------------------------------------------------------------------


def test_flag_is_raised_once():
    for _ in range(20):
        owner = nn.Identity()
        answers = at_once(*[lambda owner=owner: once_for(owner)] * THREADS)
        assert sorted(answers) == [False] * (THREADS - 1) + [True]


def test_a_model_may_be_patched_by_several_threads():
    x = torch.randn(4, 2)
    for _ in range(50):
        model = CustomDataParallel(Centering(), 2)
        before = dict(vars(model))
        handles = at_once(*[partial(patch_replication_callback, model)] * THREADS)
        torch.testing.assert_close(model(x), x - x.mean(0))
        at_once(*(handle.remove for handle in handles))
        assert type(model) is CustomDataParallel
        assert vars(model) == before
