"""Ranks on one machine: starts them, waits for what they report, and ends them in every case.

Problem: a rank can raise, die, or wait for ever, and then the others do. None may stay behind.

Idea: one process supervises. Each rank has a thread of its own that listens to it, says where the
rank is when it is asked, and ends the rank if the supervisor is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing import connection, parent_process, spawn
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import distributed

from replication.errors import ReplicationError, add_note, describe_error
from replication.texts import listed
from replication.verify.position import last_position, position

#: Seconds in which ranks report after one has, so that the origin of an error is known.
_GRACE = 3.0
#: Seconds in which a rank says where it is. One that holds the GIL does not.
_ANSWER = 2.0
#: The interface of a machine with itself, which needs no network and no name of the host.
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
#: What a rank reports, or how it has ended. Any error may follow from the death of another rank,
#: and one of the last kind from another rank's error.
_VALUE, _DEAD, _RAISED, _QUOTES = "value", "dead", "raised", "quotes"
#: What a rank answers.
_WHERE = "where"


class Job(NamedTuple):
    """What ranks do."""

    size: int
    #: A function and its arguments, pickled.
    task: bytes
    timeout: float
    #: What a process that was forked takes over from the caller: paths, and its main module.
    prepared: dict[str, Any]
    environment: dict[str, str]


class Rank(NamedTuple):
    """A process, and the connection to it."""

    process: Any
    channel: Any


def job_of(size: int, task: bytes, timeout: float) -> Job:
    """Describes the work of ranks, and this process as they need it to import the same."""
    prepared = {"sys_path": [*sys.path], "sys_argv": [*sys.argv], "dir": os.getcwd()}
    main = sys.modules["__main__"]
    # Only a function of the main module needs it, and its import may be slow, such as pytest's.
    if b"__main__" in task:
        if (spec := getattr(main, "__spec__", None)) is not None:
            prepared["init_main_from_name"] = spec.name
        elif file := getattr(main, "__file__", None):
            prepared["init_main_from_path"] = os.path.abspath(file)
    return Job(size, task, timeout, prepared, dict(os.environ))


def supervised(context: BaseContext, job: Job, caller: Any = None) -> bytes:
    """Runs a job in new processes. Returns a pickled pair: what rank 0 returns, and an error.

    Raises:
        EOFError: The caller, if there is a connection to it, has ended.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ranks = list[Rank]()
        try:
            for rank in range(job.size):
                ours, theirs = context.Pipe()
                arguments = (rank, job, folder, theirs, context.get_start_method() == "fork")
                process = context.Process(  # type: ignore[attr-defined]
                    target=_run, args=arguments, name=f"rank {rank}", daemon=True
                )
                ranks.append(Rank(process, ours))
                process.start()
                theirs.close()  # so that we notice the end of the process
            return _outcome(ranks, job, caller, Path(folder))
        finally:
            for each in ranks:
                if each.process.pid is not None:
                    each.process.kill()
                    each.process.join()


def _outcome(ranks: list[Rank], job: Job, caller: Any, folder: Path) -> bytes:
    reports, end = dict[int, tuple[str, Any]](), time.monotonic() + job.timeout
    while len(reports) < job.size and (left := end - time.monotonic()) > 0:
        waiting = [each.channel for rank, each in enumerate(ranks) if rank not in reports]
        for ready in connection.wait([*waiting, *([caller] if caller else [])], left):
            if ready is caller:
                raise EOFError("the caller has ended")  # it sends nothing while ranks run
            rank = next(i for i, each in enumerate(ranks) if each.channel is ready)
            try:
                reports[rank] = ranks[rank].channel.recv()
            except (EOFError, OSError):
                reports[rank] = _DEAD, _pickled(_death(rank, ranks[rank], folder))
            if reports[rank][0] != _VALUE:
                end = min(end, time.monotonic() + _GRACE)
    for kind in (_DEAD, _RAISED, _QUOTES):
        for found, payload in reports.values():  # the first that arrived first
            if found == kind:
                return payload  # type: ignore[no-any-return]
    if len(reports) < job.size:
        return _pickled(TimeoutError(_hang(ranks, reports, job.timeout)))
    return reports[0][1]  # type: ignore[no-any-return]


def _pickled(error: Exception) -> bytes:
    return pickle.dumps((None, error))


def _death(rank: int, dead: Rank, folder: Path) -> ReplicationError:
    dead.process.join(_ANSWER)
    code = dead.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = signal.Signals(-code).name
    text = f"rank {rank} has died ({how}) without a Python error; see its output"
    place, sizes = last_position(folder, rank)
    if place:
        text += f". It was here: {place}"
    if sizes and how != "SIGKILL":
        text += (
            "\nProbably ranks passed tensors of different sizes to a collective of torch "
            f"({sizes}): use replication.functional.all_gather, or first verify an even batch"
        )
    return ReplicationError(text)


def _hang(ranks: list[Rank], reports: dict[int, tuple[str, Any]], timeout: float) -> str:
    """Says where ranks are that have not reported."""
    late = [rank for rank in range(len(ranks)) if rank not in reports]
    lines = [f"{listed(late, 'rank')} of {len(ranks)} have not ended after {timeout:g} seconds"]
    for rank in late:
        answer = "does not answer, so it runs code that keeps Python's lock"
        try:
            ranks[rank].channel.send(_WHERE)
            if ranks[rank].channel.poll(_ANSWER):
                kind, text = ranks[rank].channel.recv()
                answer = text if kind == _WHERE else "has just ended"
        except (EOFError, OSError):
            answer = "has just died"
        lines.append(f"rank {rank}: {answer}")
    return "\n".join(lines)


# -- in a rank -----------------------------------------------------------------------------------


def _run(rank: int, job: Job, folder: str, channel: Any, is_forked: bool) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends this process
    position.in_rank = True
    position.keeps(Path(folder), rank)
    report = threading.Lock()
    listening = threading.Thread(target=_listen, args=(channel, report), daemon=True)
    listening.start()
    if is_forked:
        os.environ.clear()
        os.environ.update(job.environment)
    torch.set_num_threads(max(1, torch.get_num_threads() // job.size))
    if sys.platform in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    if rank:
        warnings.simplefilter("ignore")  # rank 0 warns of the same
    value, error = None, None
    try:
        if is_forked:
            spawn.prepare(job.prepared)
        store = distributed.FileStore(str(Path(folder, "store")), job.size)  # type: ignore[attr-defined]
        # Later than the supervisor's, who says where each rank is.
        timeout = timedelta(seconds=job.timeout + 60)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=job.size, timeout=timeout
        )
        function, arguments = pickle.loads(job.task)
        value = function(*arguments)
    except BaseException as raised:
        add_note(raised, f"in rank {rank}:\n{traceback.format_exc()}")
        error = raised
    sent = _report(value if rank == 0 else None, error)
    sys.stdout.flush()
    sys.stderr.flush()
    with report:
        channel.send(sent)
    # Others may still communicate with this rank. The supervisor kills it when all have reported.
    listening.join()
    end(0)


def _report(value: Any, error: BaseException | None) -> tuple[str, bytes]:
    kind = _RAISED
    if error is None or isinstance(error, ReplicationError):
        kind = _VALUE if error is None else _QUOTES
    try:
        if error is not None and not isinstance(error, Exception):
            raise TypeError("a rank that exits must not make the caller exit")
        payload = pickle.dumps((value, error))
        pickle.loads(payload)  # some errors can be pickled, but not loaded
    except Exception as failed:
        what = describe_error(error or failed)
        if error is None:
            kind, what = _RAISED, f"what rank 0 returned can't be pickled: {what}"
        other = ReplicationError(what)
        for note in getattr(error, "__notes__", ()):
            add_note(other, str(note))
        payload = _pickled(other)
    return kind, payload


def _listen(channel: Any, report: threading.Lock) -> None:
    """Answers the supervisor, and ends this process if it is gone."""
    parent: Any = parent_process()
    while True:
        try:
            if parent.sentinel in connection.wait([channel, parent.sentinel]):
                end(1)
            channel.recv()
            with report:
                channel.send((_WHERE, position.text()))
        except (EOFError, OSError):
            end(1)


def end(status: int) -> NoReturn:
    """Ends this process, which may have been a rank."""
    # DistributedDataParallel keeps the threads of its group alive. If gloo's thread frees the
    # tensors of the last collective while Python finalizes, it aborts the process
    # (pytorch/pytorch#179291). So Python does not finalize.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
