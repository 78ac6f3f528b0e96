"""Trains one network on one device and on replicas, and compares the losses of every step.

A small residual network learns to read scikit-learn's handwritten digits (8 x 8 pixels):

    1. on one device, which sees the whole batch;
    2. on n replicas with plain BatchNorm: each normalizes with its own shard of the batch;
    3. on n replicas with synchronized BatchNorm: all normalize with the whole batch.

Initial weights, order of the batches and optimizer are the same. So run 3 is run 1 up to rounding,
while run 2 trains differently.

The table has the largest distance of losses and final weights from run 1, and the mean loss of the
last 15 steps. The figure shows the loss of every step, and its distance from the loss of run 1.

In float64 the program checks itself: it exits with 1 if a loss of run 3 is off by more than 1e-8.
Float32 rounds half a billion times more coarsely. Sooner or later that moves the input of a ReLU
across zero, and from there on runs 1 and 3 diverge as well. See the first steps in the figure.

    python examples/train_digits.py
    python examples/train_digits.py --devices cuda:0 cuda:1 --dtype float32

Under `torchrun` processes with DistributedDataParallel take the place of the replicas:

    torchrun --nproc-per-node=2 examples/train_digits.py
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from replication import DataParallel, Group, ProcessGroup, SoloGroup, UnsynchronizedWarning
from syncbn import convert_model

#: Far above what rounding makes of a training in float64, far below what wrong statistics make of
#: its first step.
TOLERANCE = 1e-8

#: The steps over which losses are averaged, in the table and in the figure.
SMOOTHED = 15

#: Images ``(N, 1, 8, 8)`` and the digits on them ``(N,)``.
Samples = tuple[Tensor, Tensor]


class Options(NamedTuple):
    """The settings of all three runs. The one-device run is on the first device.

    Under torchrun each process has one device.
    """

    devices: list[torch.device]
    batch_size: int
    steps: int
    dtype: torch.dtype = torch.float64
    processes: int = 1

    @property
    def copies(self) -> str:
        return (
            f"{self.processes} processes"
            if self.processes > 1
            else f"{len(self.devices)} replicas"
        )


class Run(NamedTuple):
    """The result of a training: the loss of each step, and the final weights as one vector."""

    name: str
    losses: Tensor
    weights: Tensor


def load_data(device: torch.device, dtype: torch.dtype) -> tuple[Samples, Samples]:
    """Loads the digits for training and for the test. The split is the same for every seed."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=dtype, device=device).unflatten(1, (1, 8, 8))
    digits = torch.tensor(labels, device=device)
    training, test = train_test_split(
        np.arange(len(labels)), test_size=360, stratify=labels, random_state=0
    )
    return (images[training], digits[training]), (images[test], digits[test])


def in_order(samples: Samples, options: Options) -> Samples:
    """All samples of a training in their order, for the same options always the same."""
    images, digits = samples
    generator = torch.Generator().manual_seed(0)
    needed = options.steps * options.batch_size
    epochs = math.ceil(needed / len(digits))
    order = torch.cat([torch.randperm(len(digits), generator=generator) for _ in range(epochs)])
    order = order[:needed].to(digits.device)
    return images[order], digits[order]


def batches(samples: Samples, options: Options) -> Iterator[Samples]:
    """Yields the training batches."""
    images, digits = (tensor.split(options.batch_size) for tensor in in_order(samples, options))
    return zip(images, digits, strict=True)


def shards(samples: Samples, options: Options) -> Iterable[Samples]:
    """This process' shard of each batch."""
    dataset = TensorDataset(*in_order(samples, options))
    sampler = DistributedSampler(dataset, shuffle=False)  # every n-th sample
    return DataLoader(dataset, options.batch_size // options.processes, sampler=sampler)


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution, and the batch normalization that makes its bias superfluous."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *conv(inputs, outputs, 3, stride), nn.ReLU(), *conv(outputs, outputs, 3)
        )
        self.shortcut = nn.Sequential(*conv(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def build_net() -> nn.Module:
    """Makes a ResNet for tiny images."""
    blocks = Block(16, 16), Block(16, 32, stride=2), Block(32, 64, stride=2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(*conv(1, 16, 3), nn.ReLU(), *blocks, *head)


def train(model: nn.Module, data: Iterable[Samples], group: Group) -> Tensor:
    """Trains ``model`` in place. Returns the loss of each step, the mean over a group."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for images, digits in data:
        optimizer.zero_grad()
        # From the joined output: a mean of the replicas' losses would give uneven shards the same
        # weight.
        loss = nn.functional.cross_entropy(model(images), digits)
        loss.backward()
        optimizer.step()
        losses.append(group.all_reduce(loss.detach(), "mean").item())
    return torch.tensor(losses, dtype=torch.float64)


def compare(options: Options) -> list[Run]:
    """Trains on one device, on replicas, and on replicas with synchronized BatchNorm."""
    # Plain BatchNorm is here to be compared with.
    warnings.filterwarnings("ignore", category=UnsynchronizedWarning)
    devices = options.devices
    training, _ = load_data(devices[0], options.dtype)
    torch.manual_seed(0)
    alone = build_net().to(devices[0], options.dtype)
    plain, synchronized = copy.deepcopy(alone), convert_model(copy.deepcopy(alone))
    several = options.processes > 1
    # What is trained, and the network in it.
    contenders: dict[str, tuple[nn.Module, nn.Module]] = {"one device": (alone, alone)}
    for what, net in (("plain BatchNorm", plain), ("synchronized", synchronized)):
        model = DistributedDataParallel(net) if several else DataParallel(net, devices)
        contenders[f"{options.copies}, {what}"] = (model, net)
    runs = []
    for name, (model, net) in contenders.items():
        is_spread = several and model is not net
        data = shards(training, options) if is_spread else batches(training, options)
        group = ProcessGroup() if is_spread else SoloGroup()
        hidden = not is_first_process()
        shown = tqdm(data, f"{name:<28}", options.steps, unit="step", disable=hidden)
        losses = train(model, shown, group)
        weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu().double()
        runs.append(Run(name, losses, weights))
    return runs


def largest_distance(a: Tensor, b: Tensor) -> float:
    """The largest distance between two entries; NaN if an entry is."""
    return float((a - b).abs().max())


def print_table(runs: Sequence[Run]) -> None:
    """Prints one line per run."""
    row = "{:<28}  {:>11}  {:>14}  {:>8}".format
    print(row("", "loss off by", "weights off by", "loss"))
    for run in runs:
        off = ["-", "-"]
        if run is not runs[0]:
            off[0] = f"{largest_distance(run.losses, runs[0].losses):.1e}"
            off[1] = f"{largest_distance(run.weights, runs[0].weights):.1e}"
        print(row(run.name, *off, f"{run.losses[-SMOOTHED:].mean():.4f}"))


def moving_average(values: Tensor) -> Tensor:
    """Averages over `SMOOTHED` steps, over fewer near the ends."""
    half = SMOOTHED // 2
    return nn.functional.avg_pool1d(
        values[None], SMOOTHED, stride=1, padding=half, count_include_pad=False
    )[0]


def draw(runs: Sequence[Run], options: Options, path: Path) -> None:
    """Draws the losses, and below them their distances from the first run."""
    # A Figure without pyplot needs no display, and leaves the caller's backend as it is. It is
    # narrow enough to be legible on a phone, and white in dark pages too.
    figure = Figure(figsize=(4.8, 5.2), facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.1)
    figure.suptitle(f"Handwritten digits, batches of {options.batch_size}")
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_title(f"Loss (thick: mean of {SMOOTHED} steps)", loc="left")
    above.set(ylabel="cross entropy", xlim=(0, options.steps))
    below.set_title("Distance from one device (gaps: exactly 0)", loc="left")
    below.set(ylabel="absolute difference", xlabel="step", ylim=(1e-18, 1e2))
    steps = range(1, options.steps + 1)
    # The synchronized curve covers the single-device curve: a wide line and dashes show both.
    styles = [("#AAAAAA", "-", 4.5), ("#0072B2", "-", 1.6), ("#D55E00", "--", 1.6)]
    for run, (color, dashes, width) in zip(runs, styles, strict=True):
        curves = [(above, run.losses)]
        if run is not runs[0]:
            curves.append((below, (run.losses - runs[0].losses).abs()))
        for axes, values in curves:
            label = run.name if axes is above else None
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.5)
            axes.plot(steps, moving_average(values), dashes, color=color, lw=width, label=label)
    if options.dtype == torch.float64:
        below.axhline(TOLERANCE, color="black", linestyle=":", lw=1, label="limit of the check")
    for axes in (above, below):
        axes.set_yscale("log", nonpositive="mask")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, format="png", dpi=150)


def is_first_process() -> bool:
    """Whether this is the process that prints and draws."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def device_of_process() -> str:
    """The device of one of several processes: its own GPU, if the machine has any."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"


def add_devices(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the options that say where the replicas are; ``more`` goes into the help."""
    replicas_help = "number of replicas (default: 4, or one per device)"
    parser.add_argument("--replicas", type=int, help=replicas_help)
    devices_help = (
        "one per replica, separated by spaces or commas; may repeat, as in `cuda:0 cuda:0`"
        f"{more} (default: all replicas on the cpu)"
    )
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help=devices_help)


def read_devices(
    parser: argparse.ArgumentParser, args: argparse.Namespace, dtype: torch.dtype
) -> list[torch.device]:
    """Returns the device of each replica, and sets ``args.replicas``."""
    names = [name for item in args.devices or () for name in item.split(",") if name]
    if args.replicas is None:
        args.replicas = 4 if args.devices is None else len(names)
    if args.devices is None:
        names = ["cpu"] * args.replicas
    check_values(parser, args, {"replicas": 1})
    if len(names) != args.replicas:
        parser.error(f"--devices names {len(names)} devices for {args.replicas} replicas")
    for name in names:
        try:
            torch.ones(1, dtype=dtype, device=int(name) if name.isdigit() else name).item()
        except Exception as error:  # of many types: no such device, no driver, no such dtype on it
            parser.error(f"device {name!r} cannot be used: {str(error).splitlines()[0]}")
    return [torch.device(int(name) if name.isdigit() else name) for name in names]


def check_values(
    parser: argparse.ArgumentParser, args: argparse.Namespace, least: dict[str, int]
) -> None:
    """Refuses numbers below the least that their options take, and unusable output."""
    for option, limit in least.items():
        if (value := getattr(args, option)) < limit:
            parser.error(f"--{option.replace('_', '-')} must be at least {limit} (got {value})")
    if args.output.is_dir() or not args.output.parent.is_dir():
        parser.error(f"--output must be a file in a folder that exists (got {args.output})")


def parse_options(argv: Sequence[str] | None) -> tuple[Options, Path]:
    """Reads the command line; a bad value ends the program with a message."""
    parser = argparse.ArgumentParser(
        description="Trains one network three times: on one device, on replicas, and on replicas "
        "with synchronized batch normalization. Prints a table and draws the loss curves.",
    )
    add_devices(parser, "; the one-device run uses the first")
    add = parser.add_argument
    add("--steps", type=int, default=300, help="steps of each run (default: %(default)s)")
    dtype_help = "type of all numbers; the check needs float64 (default: %(default)s)"
    add("--dtype", choices=["float32", "float64"], default="float64", help=dtype_help)
    output_help = "where the figure goes (default: %(default)s in the current folder)"
    add("--output", type=Path, default="train_digits.png", metavar="PNG", help=output_help)
    args = parser.parse_args(argv)

    processes = int(os.environ["WORLD_SIZE"]) if distributed.is_torchelastic_launched() else 1
    if processes > 1:
        if args.replicas is not None or args.devices is not None:
            parser.error("--replicas and --devices do not go with torchrun: one replica a process")
        args.devices = [device_of_process()]
    dtype = getattr(torch, args.dtype)
    devices = read_devices(parser, args, dtype)
    check_values(parser, args, {"steps": 1})
    size = 4 * max(processes, len(devices))
    return Options(devices, size, args.steps, dtype, processes), args.output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    options, output = parse_options(argv)
    # The replicas are the parallelism here. Each would start as many more threads as there
    # are cores, for convolutions too small to share, and all of them would compete for the cores.
    torch.set_num_threads(1)
    if options.processes > 1:
        if options.devices[0].type == "cuda":
            torch.cuda.set_device(options.devices[0])
        distributed.init_process_group()
    try:
        runs = compare(options)
        if options.processes > 1:
            distributed.barrier()  # or one may end while another still has a collective in hand
        return report(runs, options, output) if is_first_process() else 0
    finally:
        if options.processes > 1:
            distributed.destroy_process_group()


def report(runs: Sequence[Run], options: Options, output: Path) -> int:
    """Prints the table and draws the figure. Returns the program's exit code."""
    print_table(runs)
    draw(runs, options, output)
    print(f"The curves are in {output}")
    plain, synchronized = (largest_distance(run.losses, runs[0].losses) for run in runs[1:])
    if options.dtype == torch.float64 and not synchronized <= TOLERANCE:  # NaN fails as well
        print(
            f"FAILED: synchronized losses must be within {TOLERANCE} of one device "
            f"(got {synchronized})"
        )
        return 1
    print(
        f"Synchronized, {options.copies} have the losses of one device in all {options.steps} "
        f"steps, to {synchronized:.0e}. With plain BatchNorm they are off by up to {plain:.2g}."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
