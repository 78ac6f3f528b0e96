"""A converted network in evaluation is a plain one to what exports, traces and fuses networks."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import fusion

from replication import DataParallel
from syncbn import convert_model, revert_model

pytestmark = pytest.mark.slow


def trained(converts: bool = True) -> nn.Sequential:
    """A network with one layer of each kind, in evaluation, that has trained on replicas."""
    torch.manual_seed(0)
    layers = [
        *(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2), nn.Flatten(2, 3)),
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32, 5), nn.BatchNorm1d(5)),
    ]
    net = convert_model(nn.Sequential(*layers))
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():  # also where a layer begins with zeros and ones
        parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    model = DataParallel(net, ["cpu"] * 2)
    for _ in range(3):
        model(torch.randn(6, 1, 2, 3, 4, generator=generator) + 1)
    return (net if converts else revert_model(net)).eval()


X = torch.randn(3, 1, 2, 3, 4, generator=torch.Generator().manual_seed(2))
BATCH_NORM = torch.ops.aten.batch_norm.default
INFERENCE = torch.ops.aten._native_batch_norm_legit_no_training.default


def operations(program: torch.export.ExportedProgram) -> Counter[object]:
    return Counter(node.target for node in program.graph.nodes if node.op == "call_function")


def exported(net: nn.Module) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(net, (X,), dynamic_shapes=({0: batch},))


def test_export_has_the_operations_of_a_plain_network():
    ours, plain = exported(trained()), exported(trained(converts=False))
    assert operations(ours) == operations(plain)
    assert operations(ours)[BATCH_NORM] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        decomposed = ours.run_decompositions()
    assert operations(decomposed)[INFERENCE] == 3
    assert list(ours.state_dict) == list(plain.state_dict)


def test_export_computes_what_the_network_does_for_any_batch():
    net = trained()
    program = exported(net)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    for loaded in (program, torch.export.load(buffer)):
        for x in (X, torch.randn(7, *X.shape[1:])):
            torch.testing.assert_close(loaded.module()(x), net(x), rtol=1e-6, atol=1e-6)


def traced(net: nn.Module) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(net, X)


def test_trace_has_the_operations_of_a_plain_network_and_its_outputs():
    ours, plain = traced(trained()), traced(trained(converts=False))
    kinds = [[node.kind() for node in t.inlined_graph.nodes()] for t in (ours, plain)]
    assert kinds[0] == kinds[1]
    assert kinds[0].count("aten::batch_norm") == 3
    x = torch.randn(7, *X.shape[1:])
    assert torch.equal(ours(x), trained()(x))


@pytest.mark.parametrize("optimizes", [False, True])
def test_onnx_has_plain_batch_norm_and_the_same_numbers(optimizes):
    reference = pytest.importorskip("onnx.reference", reason="needs pip install '.[onnx]'")
    pytest.importorskip("onnxscript", reason="needs pip install '.[onnx]'")
    net = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(
            net, (X,), dynamo=True, optimize=optimizes, verbose=False, report=False
        )
    model = program.model_proto
    if not optimizes:  # which folds it into the convolutions
        kinds = Counter(node.op_type for node in model.graph.node)
        assert kinds["BatchNormalization"] == 3
    assert {node.domain for node in model.graph.node} == {""}
    (y,) = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), net(X).detach(), rtol=1e-5, atol=1e-5)


FUSIONS: list[tuple[Callable[..., nn.Module], int]] = [
    (fusion.fuse_conv_bn_eval, 0),
    (fusion.fuse_conv_bn_eval, 3),
    (fusion.fuse_linear_bn_eval, 7),
]


@pytest.mark.parametrize(("fuse", "index"), FUSIONS)
def test_layers_are_fused_with_what_is_in_front(fuse, index):
    net = trained()
    expected = net(X)
    net[index] = fuse(net[index], net[index + 1])
    net[index + 1] = nn.Identity()
    torch.testing.assert_close(net(X), expected, rtol=1e-5, atol=1e-5)


def test_a_reverted_network_is_scripted_and_symbolically_traced_with_the_same_bits():
    net = trained()
    reverted = revert_model(copy.deepcopy(net))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(reverted)
    for other in (reverted, scripted, torch.fx.symbolic_trace(reverted)):
        for x in (X, 1e4 * X, X[:1]):
            assert torch.equal(other(x), net(x))
