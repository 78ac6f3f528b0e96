"""torch's own tests of `nn.SyncBatchNorm` pass with our layers, on ranks of gloo.

They are run from the installed torch, which skips them where there are no GPUs. What they call by
the names of CUDA is on the CPU here, and `nn.SyncBatchNorm` is ours.
"""

from __future__ import annotations

import inspect
import os
import unittest
import warnings
from contextlib import ExitStack
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn import SynchronizedBatchNormNd, convert_model
from tests.kit.ranks import needs_gloo, run_ranks

for name in ("numpy", "expecttest"):
    pytest.importorskip(name, reason="torch's tests import it")

pytestmark = [needs_gloo, pytest.mark.slow]

PREFIX = "test_DistributedDataParallel_SyncBatchNorm"

TESTS = [
    PREFIX,
    f"{PREFIX}_2D_Input",
    f"{PREFIX}_Channels_Last",
    f"{PREFIX}_Diff_Input_Sizes_Running_Value",
    f"{PREFIX}_Diff_Input_Sizes_gradient",
    f"{PREFIX}_No_Affine",
    f"{PREFIX}_Single_Input_Per_Process",
    f"{PREFIX}_half",
    "test_ddp_inference",
    "test_ddp_sync_bn_training_vs_eval",  # torch skips it, because its own layer fails
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
]
#: Runs where torch's tests could import torchvision.
WITH_TORCHVISION = "test_SyncBatchNorm_process_group"
# One is left out: `test_sync_bn_logged` asks the log of DistributedDataParallel for layers of
# torch's own class.


class Layer(SynchronizedBatchNormNd):
    """Stands in for `torch.nn.SyncBatchNorm`."""

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        return convert_model(module, process_group=process_group)


class OnTheCpu(DistributedDataParallel):
    """A DistributedDataParallel whose GPU is the CPU."""

    def __init__(self, module: nn.Module, device_ids: Any = None, **options: Any) -> None:
        options.pop("output_device", None)
        super().__init__(module, **options)


class Torch:
    """The module `torch` with the CPU in the place of each GPU."""

    cuda = SimpleNamespace(
        set_device=lambda device: None, current_device=lambda: "cpu", synchronize=lambda: None
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *named: Any) -> torch.device:
        return torch.device("cpu")

    def randn(self, *sizes: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.randn(*sizes, **options)


def theirs(rank: int, names: list[str]) -> dict[str, str]:
    """Runs tests of torch, by name, and returns the errors of those that fail."""
    warnings.simplefilter("ignore")  # of torch about itself
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(distributed.get_world_size()))
    module = import_module("torch.testing._internal.distributed.distributed_test")
    case_of_torch = import_module("torch.testing._internal.common_utils").TestCase

    class Case(module.DistributedTest._DistTestBase, case_of_torch):  # type: ignore[misc, name-defined]
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            distributed.barrier()

        def runTest(self) -> None: ...

    if hasattr(module, "torchvision"):
        names = [*names, WITH_TORCHVISION]
    case, errors = Case(), {}
    case.rank, case.world_size = rank, distributed.get_world_size()
    for name in names:
        with ExitStack() as stack:
            replace = mock.patch.object
            stack.enter_context(replace(nn, "SyncBatchNorm", Layer))
            stack.enter_context(replace(nn.parallel, "DistributedDataParallel", OnTheCpu))
            stack.enter_context(replace(nn.Module, "cuda", lambda net, device=None: net))
            stack.enter_context(replace(Tensor, "cuda", lambda tensor, device=None: tensor))
            stack.enter_context(replace(module, "torch", Torch()))
            test = inspect.unwrap(getattr(type(case), name))  # without what skips it
            torch.manual_seed(0)  # on all ranks alike, as their `setUp` does it
            try:
                test(case)
            except (Exception, unittest.SkipTest) as error:
                errors[name] = f"{type(error).__name__}: {error}"
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_they_pass_with_our_layers(size):
    assert run_ranks(size, theirs, TESTS) == [{}] * size


def test_they_fail_with_layers_that_are_not_synchronized():
    """What they would find."""
    errors, _ = run_ranks(2, theirs_of_plain_layers, [f"{PREFIX}_2D_Input"])
    assert list(errors) == [f"{PREFIX}_2D_Input"]


def theirs_of_plain_layers(rank: int, names: list[str]) -> dict[str, str]:
    with mock.patch.object(Layer, "convert_sync_batchnorm", lambda module: module):
        return theirs(rank, names)
