"""The activations that a network in a process keeps for backward, compiled and uncompiled.

With a memory budget, the compiler computes cheap operations again in backward, such as a BatchNorm
and a ReLU, and keeps only the results of convolutions. Their collectives are not run again.
`benchmarks.processes` shows the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

from benchmarks.measuring import Figures
from benchmarks.networks import conv
from syncbn import convert_model

LAYERS = 11

SHAPE = (8, 16, 32, 32)

#: A value of torch's `activation_memory_budget`: the activations to keep, from 0 (only inputs) to
#: 1 (as fast as possible).
BUDGET = 0.9

ABOUT = (
    f"What {LAYERS} convolutions, each with a BatchNorm and a ReLU, keep for backward, besides "
    "their parameters. The unit is one activation, the input of any layer. The budget is "
    f"`torch._functorch.config.activation_memory_budget = {BUDGET}`."
)

#: Whether the network is converted and compiled, and its budget.
WAYS = {
    "plain BatchNorm": (False, False, 1.0),
    "plain BatchNorm, compiled with the budget": (False, True, BUDGET),
    "syncbn": (True, False, 1.0),
    "syncbn, compiled": (True, True, 1.0),
    "syncbn, compiled with the budget": (True, True, BUDGET),
}


def network(channels: int = SHAPE[1]) -> nn.Module:
    return nn.Sequential(*(conv(channels, channels) for _ in range(LAYERS)))


def kept(output: Tensor, module: nn.Module) -> int:
    """Returns the bytes that the graph of an output keeps, besides what ``module`` owns."""
    # Hooks on saved tensors do not see what a compiled graph saves.
    saved = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for node in _nodes(output.grad_fn)
        for tensor in _saved(node)
    }
    for tensor in (*module.parameters(), *module.buffers()):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def _nodes(last: Any) -> set[Any]:
    """Returns the nodes of a graph, given its last one."""
    found, left = set(), [last]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [before for before, _ in node.next_functions]
    return found


def _saved(node: Any) -> Iterator[Tensor]:
    """Yields the tensors that a node saves. Nodes made in Python have a single attribute."""
    for name in dir(node):
        if name == "saved_tensors" or name.startswith("_saved_"):
            value = getattr(node, name)
            for item in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(item, Tensor):
                    yield item


def figures() -> dict[str, Figures]:
    """Returns the size of an activation in KiB, and what each way keeps."""
    x = torch.randn(SHAPE)
    found: dict[str, Figures] = {"one activation": (x.nbytes / 1024,)}
    for way, (converts, compiles, budget) in WAYS.items():
        torch.compiler.reset()  # else an equal network runs what was compiled with another budget
        net: Any = convert_model(network()) if converts else network()
        model = torch.compile(net) if compiles else net
        with config.patch(activation_memory_budget=budget):
            found[way] = (kept(model(x), net) / 1024,)
    return found
