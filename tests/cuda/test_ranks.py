"""Ranks on CUDA devices, connected by NCCL, have the numbers of one device.

The ranks stay (`tests.cuda.launched`). What they compute is in `tests.cuda.rank_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda import rank_cases
from tests.cuda.launched import Ranks
from tests.cuda.matrix import OPTIONS, PRECISIONS, SAMPLES, SIZES, skip_file_without
from tests.cuda.rank_cases import WRAPS
from tests.kit.collectives import CASES, OPS
from tests.kit.properties import pairwise

skip_file_without(2)
pytestmark = pytest.mark.gpu

every_wrap = pytest.mark.parametrize("wrap", WRAPS)
every_ddp = pytest.mark.parametrize("wrap", [wrap for wrap in WRAPS if wrap != "alone"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pairwise(precision=PRECISIONS, samples=SAMPLES, options=OPTIONS, split=SIZES)
def test_a_layer_is_as_accurate_as_torchs(ranks, precision, samples, options, split):
    ranks.run(rank_cases.as_accurate, precision, samples, options, split, "syncbn")


@pairwise(wrap=WRAPS, samples=SAMPLES, options=OPTIONS, split=SIZES)
def test_training_has_the_numbers_of_one_device(ranks, wrap, samples, options, split):
    if options == {"affine": False} and wrap != "alone":
        pytest.skip("DDP refuses modules without parameters")
    ranks.run(rank_cases.trains, wrap, samples, options, split)


@pytest.mark.parametrize("split", [split for split in SIZES if "empty" not in split])
@pytest.mark.parametrize("options", OPTIONS)
def test_torchs_layer_meets_the_same_reference(ranks, options, split):
    """So the reference and the runtime are right. It has no gradient for an empty shard."""
    images = rank_cases.IMAGES
    ranks.run(rank_cases.trains, "alone", images, options, split, "nn.SyncBatchNorm")


@every_wrap
@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_checkpoints_have_the_numbers_of_one_device(ranks, wrap, is_reentrant, streams):
    if is_reentrant and wrap == "DDP, searches unused":
        pytest.skip("torch refuses it")
    ranks.run(rank_cases.trains_in_a_checkpoint, wrap, is_reentrant, streams)


@every_wrap
def test_side_streams_have_the_numbers_of_one_device(ranks, wrap):
    ranks.run(rank_cases.trains_on_side_streams, wrap)


@every_wrap
def test_another_current_device_has_the_numbers_of_one_device(ranks, wrap):
    ranks.run(rank_cases.trains_beside_another_current_device, wrap)


@every_wrap
def test_evaluation_has_the_numbers_of_one_device(ranks, wrap):
    ranks.run(rank_cases.evaluates, wrap)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_without_graph_has_the_numbers_of_one_device(ranks, mode):
    ranks.run(rank_cases.trains_without_graph, mode)


@pytest.mark.parametrize("split", SIZES)
@pytest.mark.parametrize("options", [{}, {"affine": False}])
def test_second_derivatives_are_those_of_one_device(ranks, options, split):
    ranks.run(rank_cases.takes_second_derivatives, options, split)


@every_wrap
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_has_the_numbers_of_one_device(ranks, wrap, dtype):
    ranks.run(rank_cases.autocasts, wrap, dtype)


@every_ddp
def test_scaled_losses_train_as_one_device_does(ranks, wrap):
    ranks.run(rank_cases.scales_losses, wrap)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    ("dtype", "reduces"),
    [(torch.float64, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)],
)
def test_fsdp2_has_the_numbers_of_one_device(ranks, dtype, reduces, per_layer):
    ranks.run(rank_cases.shards_parameters, dtype, per_layer, reduces)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("by_name", [False, True])
def test_groups_of_ranks_have_the_numbers_of_one_device_each(ranks, group_size, by_name):
    ranks.run(rank_cases.normalizes_in_groups, group_size, by_name)


@pytest.mark.parametrize("name", CASES)
def test_a_collective_has_the_values_and_derivatives_of_its_oracle(ranks, name):
    ranks.run(rank_cases.collects, name)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.complex64],
)
@pytest.mark.parametrize("op", OPS)
def test_a_reduction_keeps_the_dtype(ranks, dtype, op):
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        pytest.skip("integers have no mean")
    if dtype.is_complex and op not in ("sum", "mean"):
        pytest.skip("complex numbers are only added")
    ranks.run(rank_cases.reduces, op, dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float64, torch.uint8])
def test_other_collectives_move_any_dtype(ranks, dtype):
    ranks.run(rank_cases.moves, dtype)


@every_wrap
@pytest.mark.parametrize("is_right", [True, False])
def test_verify_tells_right_networks_from_wrong_ones(ranks, wrap, is_right):
    if "static" in wrap:
        pytest.skip("verify runs a model twice")
    ranks.run(rank_cases.verifies, wrap, is_right)
