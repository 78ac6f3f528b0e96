"""What each rank gets if one of them fails, with two and three ranks on gloo.

Each case ends at once, or at the timeout of the process group where a rank stays away. Errors name
the layer and the call, and say what to look for.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, distributed, nn

from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.kit.ranks import TIMEOUT, Ended, needs_gloo, started_ranks

pytestmark = [needs_gloo, pytest.mark.slow]

#: The rank that has the fault.
FAULTY = 1

#: The timeout of the process group in seconds, where it ends a case. Elsewhere it is so long that
#: the case would count as hung.
SHORT = 5


class Net(nn.Module):
    """Two synchronized layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


# -- what one rank does, while the others take a step -------------------------------------------


def step(net: Net, x: Tensor) -> None:
    net(x).sum().backward()


def raises(net: Net, x: Tensor) -> None:
    net.stem(x)
    raise ValueError("in its own code")


def raises_before_backward(net: Net, x: Tensor) -> None:
    net(x)
    raise ValueError("in its own code")


def exits(net: Net, x: Tensor) -> None:
    net.stem(x)
    os._exit(7)


def is_killed(net: Net, x: Tensor) -> None:
    net.stem(x)
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(net: Net, x: Tensor) -> None:
    y = net.stem(x)
    distributed.barrier()  # until the others have their errors
    net.head(y)


def has_no_backward(net: Net, x: Tensor) -> None:
    net(x)
    distributed.barrier()


def is_in_eval(net: Net, x: Tensor) -> None:
    step(net.eval(), x)
    distributed.barrier()


def has_its_first_layer_in_eval(net: Net, x: Tensor) -> None:
    net.stem.eval()
    step(net, x)


def has_its_last_layer_in_eval(net: Net, x: Tensor) -> None:
    net.head.eval()
    step(net, x)


def runs_under_no_grad(net: Net, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def has_a_wider_layer(net: Net, x: Tensor) -> None:
    net.head = SynchronizedBatchNorm1d(5, process_group=net.head.process_group)
    net.stem(x)
    net.head(torch.randn(4, 5, requires_grad=True))


def builds_a_graph_of_its_backward(net: Net, x: Tensor) -> None:
    torch.autograd.grad(net(x).sum(), x, create_graph=True)


# -- what a rank gets: patterns ------------------------------------------------------------------

AT_ONCE, AT_THE_TIMEOUT = r"(?!.*Timed out)", rf".*Timed out waiting {SHORT}000ms"
ADVICE = r" Set TORCH_DISTRIBUTED_DEBUG=INFO in the environment to compare the calls\."

NOTHING = "ends as usual"
ITS_OWN = r".*^ValueError: in its own code$"
ABORTED = f"exit code {-signal.SIGABRT}"


def failed(call: str, when: str = AT_ONCE, advice: str = ADVICE) -> str:
    """An error of the backend, with notes."""
    return (
        rf"RuntimeError: {when}.*\nin {re.escape(call)} that requires gradients, rank \d of \d\n"
        r"First check the other ranks' logs for an earlier error\. .* find_unused_parameters=True "
        rf"and .* \(then pass process_group=torch.distributed.new_group\(\) to .*\)\.{advice}"
    )


def diverged(others: str, faulty: str) -> str:
    return (
        rf"ReplicasDiverged: .*: the calls do not match: ranks? 0(, 2)?: {re.escape(others)}; "
        rf"rank 1: {re.escape(faulty)}\. All must make .*: is a layer in eval\(\) on some of .*"
    )


STEM, HEAD = (
    f"`{name}`, call {number}: batch_norm(eps=1e-05) of float32 [3]"
    for number, name in enumerate(("stem", "head"), 1)
)
FIRST_IN_HEAD = HEAD.replace("call 2", "call 1")
HEAD_BACKWARD = "`head`, call 3: batch_norm_backward of float32 [3]"
HEAD_BACKWARD_WITH_GRAPH = HEAD_BACKWARD.replace("backward", "backward(create_graph=True)")
STEM_BACKWARD = "`stem`, call 2: batch_norm_backward of float32 [3]"
WIDER = "`SynchronizedBatchNorm1d`, call 2: batch_norm(eps=1e-05) of float32 [5]"
WITH, WITHOUT = " that requires gradients", " that does not require gradients"


class Fault(NamedTuple):
    act: Callable[[Net, Tensor], None]
    #: What the rank with the fault gets.
    faulty: str
    #: What the other ranks get.
    others: str
    #: What the rank after the faulty one gets, if that is something else.
    next: str | None = None
    #: Whether the ranks compare all calls, as with ``TORCH_DISTRIBUTED_DEBUG=INFO``.
    debugs: bool = False


FAULTS = [
    Fault(raises, ITS_OWN, failed(HEAD)),
    Fault(raises, ITS_OWN, failed(HEAD, advice=""), debugs=True),
    Fault(raises_before_backward, ITS_OWN, failed(HEAD_BACKWARD)),
    Fault(exits, "exit code 7", failed(HEAD)),
    Fault(is_killed, f"exit code {-signal.SIGKILL}", failed(HEAD)),
    Fault(sleeps, failed(HEAD, when=".*"), failed(HEAD, AT_THE_TIMEOUT)),
    Fault(has_no_backward, NOTHING, failed(HEAD_BACKWARD, AT_THE_TIMEOUT)),
    Fault(is_in_eval, NOTHING, failed(STEM, AT_THE_TIMEOUT)),
    Fault(has_its_first_layer_in_eval, *[diverged(STEM + WITH, FIRST_IN_HEAD + WITH)] * 2),
    Fault(
        has_its_last_layer_in_eval,
        *[diverged(HEAD + WITH, STEM_BACKWARD + WITH)] * 2,
        debugs=True,
    ),
    Fault(runs_under_no_grad, *[diverged(STEM + WITH, STEM + WITHOUT)] * 2),
    # gloo aborts a process that receives more than it expects.
    Fault(has_a_wider_layer, failed(WIDER), failed(HEAD), next=ABORTED),
    Fault(has_a_wider_layer, *[diverged(HEAD + WITH, WIDER + WITH)] * 2, debugs=True),
    Fault(
        builds_a_graph_of_its_backward,
        *[diverged(HEAD_BACKWARD + WITH, HEAD_BACKWARD_WITH_GRAPH + WITH)] * 2,
        debugs=True,
    ),
]


# -- the ranks -----------------------------------------------------------------------------------


def in_a_rank(rank: int, index: int) -> str:
    """What a rank gets if one rank has a fault."""
    fault = FAULTS[index]
    if fault.debugs:
        distributed.set_debug_level(distributed.DebugLevel.INFO)
    is_late = AT_THE_TIMEOUT in fault.others
    group = distributed.new_group(timeout=timedelta(seconds=SHORT if is_late else TIMEOUT))
    net = convert_model(Net(), process_group=group)
    x = torch.randn(4, 3, requires_grad=True)
    found = NOTHING
    distributed.barrier()  # the timeouts of all ranks begin here
    try:
        (fault.act if rank == FAULTY else step)(net, x)
    except RuntimeError as error:  # others end this process, as they end a script
        found = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if is_late and rank != FAULTY:
            distributed.barrier()  # for which the faulty rank waits
    distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def cases(request: pytest.FixtureRequest) -> Iterator[list[Callable[[], list[Ended]]]]:
    """All cases, side by side."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(started_ranks(request.param, in_a_rank, index))
            for index in range(len(FAULTS))
        ]


@pytest.mark.parametrize(
    "index", range(len(FAULTS)), ids=[f"{f.act.__name__}{f.debugs * ', compared'}" for f in FAULTS]
)
def test_each_rank_ends_and_names_the_call(cases: Any, index: int) -> None:
    fault, ranks = FAULTS[index], cases[index]()
    expected = [fault.others] * len(ranks)
    if fault.next is not None:
        expected[(FAULTY + 1) % len(ranks)] = fault.next
    expected[FAULTY] = fault.faulty
    for rank, (pattern, (value, error, code)) in enumerate(zip(expected, ranks, strict=True)):
        found = error or value or f"exit code {code}"
        assert re.fullmatch(pattern, found.strip(), re.DOTALL | re.MULTILINE), f"{rank}: {found}"
