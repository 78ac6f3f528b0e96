"""Verifies what the script itself makes, beside processes and a forkserver of its own."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

from replication import verify_ranks
from tests.programs import checks


def make() -> dict[str, Any]:
    return checks.equal()


def own_name(connection: Any) -> None:
    connection.send(os.environ.get("NAME"))


def ask_a_process(context: Any) -> str:
    ours, theirs = context.Pipe()
    process = context.Process(target=own_name, args=(theirs,))
    process.start()
    name = ours.recv()
    process.join()
    return str(name)


if __name__ == "__main__":
    verify_ranks(make).check()
    # Nothing is chosen for the program, which has a server of its own from now on.
    assert multiprocessing.get_start_method(allow_none=True) is None
    os.environ["NAME"] = "own"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["json"])
    assert ask_a_process(context) == "own"
    os.environ["NAME"] = "later"  # its server does not know it
    verify_ranks(make).check()
    assert ask_a_process(context) == "own"
    print("equal")
