"""`verify` finds each of the bugs in ``tests/mutations.py``, names its place, and why.

    python -m tests.test_mutations --write

runs them, and writes the table of ``docs/mutations.md``.
"""

from __future__ import annotations

import argparse
import inspect
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.measuring import line, marked, replaced
from replication import Verification, verify_ranks
from tests import mutations
from tests.kit.deadlines import DEADLINE
from tests.kit.ranks import needs_gloo

pytestmark = [needs_gloo, pytest.mark.slow]

PAGE = Path(__file__).parent.parent / "docs" / "mutations.md"


class Found(NamedTuple):
    """What `verify` says of a bug."""

    #: The first difference, or the only term that differs, or what draws random numbers.
    where: str
    #: Words of its explanation.
    why: str


INPUT = "gradient of input `args[0]`"
ALONE = "from its own samples, as if it were alone"
DERIVATIVE = "the derivative of a collective is missing or wrong"
DRAWS = "must not draw random numbers"
OTHER = "No usual cause fits"
PART = "only a part of its derivative"
SCALE = "must be multiplied by the number of ranks"
UNWRAPPED = "so nothing averages them"

FOUND = {
    "detached_gather": Found(INPUT, PART),
    "detached_gather_with_temperature": Found(INPUT, "some collectives have no derivative"),
    "reduction_in_place": Found(INPUT, PART),
    "maximum_in_place": Found(INPUT, DERIVATIVE),
    "scaled_twice": Found(INPUT, "Every gradient is 2 times one device's"),
    "stack_for_cat": Found(INPUT, OTHER),
    "wrong_group": Found(INPUT, ALONE),
    "no_gather": Found(INPUT, ALONE),
    "labels_without_offset": Found(INPUT, OTHER),
    "one_term_of_two": Found("term `regularizer`: every gradient is 1/2", PART),
    "mean_of_uneven_shards": Found(INPUT, "weighs the gradients of the ranks' losses by 0.6, 0.4"),
    "tokens_of_own": Found(INPUT, "weighs the gradients of the ranks' losses by 0.75, 0.25"),
    "pixels_of_own": Found(INPUT, "weighs the gradients of the ranks' losses by 0.625, 0.375"),
    "boxes_of_own": Found(INPUT, "weighs the gradients of the ranks' losses by 0.8333, 0.1667"),
    "count_of_all_without_size": Found(INPUT, SCALE),
    "sum_under_ddp": Found(INPUT, SCALE),
    "ratio_of_own": Found(INPUT, ALONE),
    "statistics_of_own": Found("buffer of `1.center`", "from its own samples"),
    "statistics_of_rank_0": Found("buffer of `1.center`", "from the samples of rank 0 alone"),
    "half_of_the_statistics": Found("buffer of `1.sums`", "from its own samples"),
    "plain_batch_norm": Found("output of `1` (BatchNorm1d)", ALONE),
    "mean_of_variances": Found("output of `1` (Normalized)", OTHER),
    "detached_moments": Found(INPUT, DERIVATIVE),
    "different_initialization": Found("value of `0.weight`", "begin with different values"),
    "parameters_of_the_loss": Found("gradient of the loss's `weight`", UNWRAPPED),
    "other_parameters_of_the_loss": Found(
        "value of the loss's `weight`", "begin with different values"
    ),
    "temporary_ddp": Found("gradient of `0.weight`", UNWRAPPED),
    "forgotten_no_sync": Found("gradient of `0.weight`", UNWRAPPED),
    "ignored_parameter": Found("gradient of `2.bias`", UNWRAPPED),
    "dropout": Found("`1` (Dropout)", DRAWS),
    "noise_of_own": Found("`1` (Noisy)", DRAWS),
    "directions_of_own": Found("loss", DRAWS),
}


def result_of(name: str, *, mended: bool = False) -> Verification | ValueError:
    """The result of a bug. `verify` raises where random numbers differ."""
    try:
        return verify_ranks(partial(getattr(mutations, name), mended), 2, timeout=DEADLINE)
    except ValueError as error:
        return error


@pytest.mark.parametrize("name", FOUND)
def test_verify_finds_the_bug_and_not_its_mended_form(name):
    found, result = FOUND[name], result_of(name)
    text = str(result)
    assert isinstance(result, ValueError) or not result, text
    assert found.where in text and found.why in text, text
    mended = result_of(name, mended=True)
    assert isinstance(mended, Verification) and mended, mended


def test_every_bug_is_tested():
    made = [
        name
        for name, function in vars(mutations).items()
        if inspect.isfunction(function)
        and list(inspect.signature(function).parameters) == ["mended"]
    ]
    assert made == list(FOUND)


# -- the page ------------------------------------------------------------------------------------


def row(name: str, seconds: str) -> str:
    """The line of a bug in the table."""
    about = inspect.getdoc(getattr(mutations, name)).partition("\n")[0].removesuffix(".")
    return line([f"{about} (`{name}`)", *FOUND[name], seconds])


def table(seconds: dict[str, str]) -> str:
    headings = ["bug (its name)", "where", "what it says", "seconds"]
    rows = [row(name, seconds[name]) for name in FOUND]
    return "\n".join([line(headings), line(["---"] * len(headings)), *rows])


def test_the_page_has_the_table():
    _, written, _ = marked(PAGE.read_text("utf-8"), "mutations")
    seconds = [text.split(" | ")[-1].removesuffix(" |") for text in written.splitlines()[2:]]
    assert all(float(text) > 0 for text in seconds)
    assert written == table(dict(zip(FOUND, seconds, strict=True)))


def main() -> None:
    """Measures each bug, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.test_mutations")
    parser.add_argument("--write", action="store_true", help="write it into the page, too")
    options = parser.parse_args()
    result_of(next(iter(FOUND)))  # the server of the ranks imports torch
    seconds = {}
    for name in FOUND:
        begin = time.perf_counter()
        result = result_of(name)
        seconds[name] = f"{time.perf_counter() - begin:.1f}"
        assert isinstance(result, ValueError) or not result, name
        print(row(name, seconds[name]), flush=True)
    if options.write:
        page = replaced(PAGE.read_text("utf-8"), "mutations", table(seconds))
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
