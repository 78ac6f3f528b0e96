"""Trains one network on ever smaller shares of a batch, with plain and synchronized BatchNorm.

The network and the handwritten digits are the same as in `train_digits.py`, but with few digits,
because that is where small batches hurt. Each of n replicas has 1, 2, 4 or 8 samples in a step.
Plain BatchNorm normalizes each replica's share by itself, synchronized BatchNorm all shares
together.

For one seed all eight trainings see the same samples in the same order, equally often, and begin
with the same weights. The learning rate is proportional to the samples in a step (`--lr` is that
for 32), and falls linearly to 0. Between the two curves `convert_model` is the only difference.
Along a curve the samples in a step differ, and so does the number of steps: compare the curves at
one place, rather than the ends of one curve.

How to read the table. Accuracies are those on 360 digits that are not trained on, in `eval()`,
with running statistics: the median over the seeds, and the lowest and the highest. One digit is
0.3 %. Seeds differ in initial weights, in the samples, and in their order. "gain" is what a seed
gains by synchronization, the median in percentage points; "better" counts the seeds that gain.

What it shows. With the defaults (4 replicas, 10 seeds, on the CPU):

    samples per replica        plain BatchNorm  synchronized BatchNorm        gain    better
                      1   90.1 % (85.6 - 93.1)    96.5 % (93.9 - 97.5)        +6.4  10 of 10
                      2   95.4 % (94.2 - 96.1)    97.1 % (95.0 - 98.3)        +1.5   8 of 10
                      4   96.0 % (95.0 - 97.8)    96.0 % (93.3 - 97.5)        +0.4   6 of 10
                      8   96.2 % (94.2 - 96.9)    96.2 % (93.1 - 98.1)        +0.3   5 of 10

So one sample per replica hurts, two hurt a little, and from four on there is no visible
difference.
Training longer does not help plain BatchNorm: with `--epochs 20 --seeds 2` the gain is 6.5 at one
sample, and none from two on.

How much it is depends on the network. Here the last layer sees the mean of each channel's pixels,
and of that a channel normalized by itself has little left to tell. If it sees all pixels (`--head
flatten --lr 0.2 --seeds 4`), the gain is 1.8 at one sample, 0.4 at two, and at four and eight a
loss of 0.4 and 0.8, which so few seeds do not tell from chance.

Of 0.1, 0.2, 0.5 and 1 the learning rate is the one that suits both kinds best at one sample, in
trials with three or four seeds on these very test digits; at 0.1 and 0.2 plain BatchNorm is
further behind. Another torch, or processor, rounds differently, and finds slightly other numbers.

What it does not show. Images and network are tiny, and behind the last convolution there are 2 x 2
pixels: large images give plain BatchNorm more values per sample. Its running statistics are those
of the first replica's shares, as they are under torch's DataParallel. And it takes one kind of
training, without momentum; others may forgive more, or less.

    python examples/small_batch.py
    python examples/small_batch.py --head flatten --lr 0.2 --seeds 4
    python examples/small_batch.py --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm
from train_digits import (
    Samples,
    add_devices,
    build_net,
    check_values,
    load_data,
    read_devices,
)

from replication import DataParallel, UnsynchronizedWarning
from syncbn import convert_model

#: Samples per replica.
SHARES = (1, 2, 4, 8)

#: The names of the curves: layers as they are, and converted.
PLAIN, SYNCHRONIZED = KINDS = ("plain BatchNorm", "synchronized BatchNorm")


class Options(NamedTuple):
    """The settings of all trainings. ``lr`` is the learning rate of steps with 32 samples."""

    devices: list[torch.device]
    seeds: int
    epochs: int = 5
    samples: int = 320
    lr: float = 0.5
    head: str = "pool"
    dtype: torch.dtype = torch.float32


class Run(NamedTuple):
    """The result of one training: the accuracy, and the final weights as one vector."""

    seed: int
    share: int
    kind: str
    accuracy: float
    weights: Tensor


def initial_net(seed: int, options: Options) -> nn.Module:
    """The network with the initial weights of a seed."""
    torch.manual_seed(seed)
    net = build_net()
    if options.head == "flatten":
        *body, _pool, _flatten, _linear = net.children()
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))
    return net.to(options.devices[0], options.dtype)


def in_order(samples: Samples, seed: int, options: Options) -> Samples:
    """The samples that a seed trains on, epoch after epoch, in their order.

    A few at the end are left out where they do not make up full batches of the largest share: the
    runs of a seed shall see the same samples, and each replica as many as its share.
    """
    images, digits = samples
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(digits), generator=generator)[: options.samples]
    epochs = [
        chosen[torch.randperm(len(chosen), generator=generator)] for _ in range(options.epochs)
    ]
    order = torch.cat(epochs)[: in_all(options)].to(digits.device)
    return images[order], digits[order]


def in_all(options: Options) -> int:
    """How many samples each run sees: full batches of the largest share."""
    largest = max(SHARES) * len(options.devices)
    return options.epochs * options.samples // largest * largest


def batches(samples: Samples, size: int) -> list[Samples]:
    """Cuts samples into batches."""
    images, digits = (tensor.split(size) for tensor in samples)
    return list(zip(images, digits, strict=True))


def lr_of(size: int, options: Options) -> float:
    """The learning rate of steps with ``size`` samples, at the beginning."""
    return options.lr * size / 32


def train(model: nn.Module, data: Sequence[Samples], lr: float, shown: tqdm) -> None:
    """Trains ``model`` in place, at a learning rate that falls from ``lr`` to 0."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(data))
    model.train()
    for images, digits in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), digits).backward()
        optimizer.step()
        falling.step()
        shown.update(len(digits))


@torch.no_grad()
def accuracy(net: nn.Module, samples: Samples) -> float:
    """The fraction of the images that ``net`` reads correctly."""
    images, digits = samples
    net.eval()
    return float((net(images).argmax(1) == digits).double().mean())


def compare(options: Options) -> list[Run]:
    """Trains for each seed and share with plain and with synchronized BatchNorm."""
    # Plain BatchNorm is here to be compared with.
    warnings.filterwarnings("ignore", category=UnsynchronizedWarning)
    training, test = load_data(options.devices[0], options.dtype)
    settings = list(itertools.product(range(options.seeds), SHARES, KINDS))
    runs = []
    with tqdm(total=len(settings) * in_all(options), unit="sample", unit_scale=True) as shown:
        for seed, share, kind in settings:
            shown.set_description(f"seed {seed}, {share} per replica, {kind:<{len(SYNCHRONIZED)}}")
            net = initial_net(seed, options)
            if kind == SYNCHRONIZED:
                net = convert_model(net)
            size = share * len(options.devices)
            data = batches(in_order(training, seed, options), size)
            train(DataParallel(net, options.devices), data, lr_of(size, options), shown)
            weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu()
            runs.append(Run(seed, share, kind, accuracy(net, test), weights))
    return runs


def accuracies(runs: Sequence[Run], share: int, kind: str) -> list[float]:
    """One per seed, in percent."""
    return [100 * run.accuracy for run in runs if (run.share, run.kind) == (share, kind)]


def print_table(runs: Sequence[Run], options: Options) -> None:
    """Prints one line per share."""
    row = "{:>19}  {:>14}  {:>5}  {:>21}  {:>22}  {:>10}  {:>8}".format
    print(row("samples per replica", "all, in a step", "steps", *KINDS, "gain", "better"))
    for share in SHARES:
        plain, synchronized = (accuracies(runs, share, kind) for kind in KINDS)
        gains = [b - a for a, b in zip(plain, synchronized, strict=True)]
        size = share * len(options.devices)
        print(
            row(
                share,
                size,
                in_all(options) // size,
                *(
                    f"{statistics.median(found):.1f} % ({min(found):.1f} - {max(found):.1f})"
                    for found in (plain, synchronized)
                ),
                f"{statistics.median(gains):+.1f}",
                f"{sum(gain > 0 for gain in gains)} of {len(gains)}",
            )
        )


def draw(runs: Sequence[Run], options: Options, path: Path) -> None:
    """Draws the accuracy over the samples per replica: medians, ranges, and every seed."""
    # A Figure without pyplot needs no display, and leaves the caller's backend as it is.
    figure = Figure(figsize=(7, 4.5), facecolor="white")
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    axes.set_title("Handwritten digits: accuracy on the test set", loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SHARES, [str(share) for share in SHARES])
    count, seeds = len(options.devices), options.seeds
    axes.set(
        xlabel=f"samples per replica ({count} replicas, {seeds} seeds)", ylabel="accuracy in %"
    )
    for kind, color, aside in zip(KINDS, ("#0072B2", "#D55E00"), (0.97, 1.03), strict=True):
        places = [share * aside for share in SHARES]  # so that the dots do not hide each other
        found = [accuracies(runs, share, kind) for share in SHARES]
        low, high = [min(values) for values in found], [max(values) for values in found]
        axes.fill_between(places, low, high, color=color, alpha=0.15, lw=0)
        for place, values in zip(places, found, strict=True):
            axes.plot([place] * len(values), values, "o", color=color, alpha=0.3, ms=4, mew=0)
        medians = [statistics.median(values) for values in found]
        axes.plot(places, medians, "o-", color=color, ms=6, label=kind)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", title="median and range", frameon=False)
    figure.savefig(path, format="png", dpi=120)


def parse_options(argv: Sequence[str] | None) -> tuple[Options, Path]:
    """Reads the command line; a bad value ends the program with a message."""
    parser = argparse.ArgumentParser(
        description="Trains one network with 1, 2, 4 and 8 samples per replica, with plain and "
        "with synchronized batch normalization. Prints a table and draws the accuracies.",
    )
    add_devices(parser)
    add = parser.add_argument
    add("--seeds", type=int, default=10, help="trainings of each kind (default: %(default)s)")
    samples_help = "images to train on, drawn by the seed (default: %(default)s)"
    add("--samples", type=int, default=320, help=samples_help)
    add("--epochs", type=int, default=5, help="how often each is seen (default: %(default)s)")
    lr_help = "learning rate of a step with 32 images; others in proportion (default: %(default)s)"
    add("--lr", type=float, default=0.5, help=lr_help)
    head_help = "what the last layer sees: the mean of the pixels, or all (default: %(default)s)"
    add("--head", choices=["pool", "flatten"], default="pool", help=head_help)
    output_help = "where the figure goes (default: %(default)s in the current folder)"
    add("--output", type=Path, default="small_batch.png", metavar="PNG", help=output_help)
    args = parser.parse_args(argv)
    devices = read_devices(parser, args, torch.float32)
    check_values(parser, args, {"seeds": 1, "samples": 1, "epochs": 1})
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr must be a positive number (got {args.lr})")
    options = Options(devices, args.seeds, args.epochs, args.samples, args.lr, args.head)
    if not in_all(options):
        parser.error(
            f"--samples times --epochs must be at least {max(SHARES)} per replica "
            f"(got {args.samples * args.epochs} for {args.replicas})"
        )
    return options, args.output


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit code."""
    options, output = parse_options(argv)
    # The convolutions are too small to share; the replicas are the parallelism here.
    torch.set_num_threads(1)
    runs = compare(options)
    print_table(runs, options)
    draw(runs, options, output)
    print(f"The curves are in {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
