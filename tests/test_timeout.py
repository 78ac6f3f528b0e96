"""The time limit, as a last resort: where each replica is, and a caller who goes on."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import (
    DataParallel,
    ReplicasTimedOut,
    data_parallel,
    patch_replication_callback,
    warning,
)
from replication.sync.lifecycle import rendezvous_of
from tests.layers import (
    DEADLINE,
    HAS_GIL,
    AsTorchDoes,
    Centering,
    FailsAt,
    Numbered,
    together,
    until_others_wait,
    values,
)

LIMIT = 0.3


class Hangs(Numbered):
    """One replica waits for something that no other replica knows of."""

    def __init__(self, replica: int, others: int) -> None:
        super().__init__()
        self.replica, self.others = replica, others
        self.go = threading.Event()
        self.ended = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.copy_id == self.replica:
            until_others_wait(self.others)
            self.go.wait(DEADLINE)
            self.ended.set()
        return x


class HangsInForeignCode(Hangs):
    """The same, while no other replica waits for it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.copy_id == self.replica:
            self.go.wait(2 * DEADLINE)
            self.ended.set()
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_replica_that_hangs_in_foreign_code_is_named_and_the_caller_goes_on(replica, fails):
    hangs = HangsInForeignCode(replica, others=0)
    last = FailsAt((replica + 1) % 3, KeyError) if fails else nn.Tanh()
    model = DataParallel(nn.Sequential(hangs, last), ["cpu"] * 3, timeout=LIMIT)
    try:
        (outcome,) = together(lambda: model(torch.randn(6, 2)))
        assert not hangs.ended.is_set()
    finally:
        hangs.go.set()
    if fails:  # the error that came first is the cause, as a rule
        assert type(outcome.error) is KeyError
    else:
        assert type(outcome.error) is ReplicasTimedOut
        first, *rows = str(outcome.error).splitlines()
        assert first == "the replicas must end within 0.3 s, the timeout, which has passed:"
        at = r" in `0`, at .*\.py:\d+" if HAS_GIL else ""
        assert re.fullmatch(f"  replica {replica}: runs{at}", rows[replica])
        for i in {0, 1, 2} - {replica}:
            assert rows[i] == f"  replica {i}: has ended"
    assert hangs.ended.wait(DEADLINE)


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_replica_that_hangs_is_named_and_the_caller_goes_on(replica):
    hangs = Hangs(replica, others=2)
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(hangs), Centering())
    model = DataParallel(net, ["cpu"] * 3, timeout=LIMIT)
    x = torch.randn(6, 2)
    with pytest.raises(ReplicasTimedOut) as caught:
        model(x)
    assert not hangs.ended.is_set()  # the caller has not waited for it
    first, *rows = str(caught.value).splitlines()
    waiting = [i for i in range(3) if i != replica]
    assert first == "the replicas must end within 0.3 s, the timeout, which has passed:"
    for i in waiting:
        assert rows[i].startswith(f"  replica {i}: waits at `2`, call 1")
    at = r" in `1\.0`, at .*\.py:\d+" if HAS_GIL else ""
    assert re.fullmatch(f"  replica {replica}: runs{at}", rows[replica])
    hangs.go.set()
    assert hangs.ended.wait(DEADLINE)
    hangs.replica, model.timeout = -1, None
    torch.testing.assert_close(model(x), net(x))


def test_a_forward_that_ends_in_time_does_not_meet_the_limit():
    hangs = Hangs(1, others=1)
    hangs.go.set()
    net = nn.Sequential(hangs, Centering())
    x = torch.randn(6, 2)
    y = data_parallel(net, x, ["cpu"] * 2, timeout=DEADLINE)
    torch.testing.assert_close(y, x - x.mean(0))


def test_a_replica_that_comes_late_is_a_matter_of_the_limit():
    """Not of the time within which replicas have to begin, which is longer."""
    limit_passed = threading.Event()

    class Late(AsTorchDoes):
        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            rendezvous_of(replicas).limit_time(LIMIT)

            def run(i: int) -> Any:
                if i == 1:
                    assert limit_passed.wait(DEADLINE)
                try:
                    return replicas[i](*inputs[i], **kwargs[i])
                finally:
                    limit_passed.set()

            return values(together(*(lambda i=i: run(i) for i in range(2))))

    model = Late(Centering(), 2)
    patch_replication_callback(model)
    with pytest.raises(ReplicasTimedOut, match=r"replica 1: has not begun"):
        model(torch.randn(4, 2))


def test_modules_that_cannot_be_walked_hide_nothing():
    class Unwalkable(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    class GlobalMoments(Hangs):
        def __init__(self) -> None:
            super().__init__(1, others=1)
            self.layer = Centering()

        def forward(self, x: Tensor) -> Tensor:
            vars(self)["_modules"] = Unwalkable(self._modules)
            return self.layer(super().forward(x))

    whole = GlobalMoments()
    at = r" at .*\.py:\d+" if HAS_GIL else ""
    with pytest.raises(ReplicasTimedOut, match=f"replica 1: runs{at}"):
        DataParallel(whole, ["cpu"] * 2, timeout=LIMIT)(torch.randn(4, 2))
    whole.go.set()
    assert whole.ended.wait(DEADLINE)


def test_without_the_gil_no_frame_of_another_thread_is_read(monkeypatch):
    monkeypatch.setattr(warning, "_has_gil", lambda: False)
    hangs = Hangs(1, others=1)
    model = DataParallel(nn.Sequential(hangs, Centering()), ["cpu"] * 2, timeout=LIMIT)
    with pytest.raises(ReplicasTimedOut, match=r"replica 1: runs$"):
        model(torch.ones(4, 2))
    hangs.go.set()
    assert hangs.ended.wait(DEADLINE)


def test_by_default_there_is_no_limit():
    assert DataParallel(nn.ReLU(), ["cpu"] * 2).timeout is None


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("5", TypeError)],
)
def test_what_is_no_limit_is_refused(timeout, error):
    with pytest.raises(error):
        DataParallel(nn.ReLU(), ["cpu"] * 2, timeout=timeout)
