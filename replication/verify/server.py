"""A process that has imported torch, and forks ranks from then on.

Problem: a process that imports torch anew takes seconds, and ranks must be new in each call, so
that none inherits what an earlier one has left behind. The server of `multiprocessing` belongs to
the program: its list of modules, or its absence, is not ours to change.

Idea: a server of our own, in a process of its own, that supervises the ranks it forks. It ends
with the connection to the caller, however the caller ends, and its ranks with it.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from importlib import import_module
from multiprocessing import Pipe, get_context, spawn
from multiprocessing.connection import Connection

from replication.errors import ReplicationError
from replication.verify.supervision import Job, end, supervised

#: Elsewhere there is no fork, or (macOS) system libraries do not survive one.
is_available = sys.platform == "linux"

_OUTPUTS = (1, 2)  # stdout and stderr


class Server:
    """The caller's end. The process starts with the first job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None

    def supervised(self, job: Job) -> bytes:
        """Runs a job in new processes, like `supervision.supervised`."""
        with self._lock:
            try:
                if self._channel is None:
                    self._channel = self._start()
                with socket.socket(fileno=os.dup(self._channel.fileno())) as link:
                    # Ranks print where the caller does now.
                    socket.send_fds(link, [b"."], [*_OUTPUTS])
                self._channel.send(job)
                return self._channel.recv_bytes()
            except BaseException as error:  # such as a Ctrl-C
                self.close()
                if isinstance(error, (EOFError, OSError)):
                    text = "the process that starts ranks has ended; see its output"
                    raise ReplicationError(text) from error
                raise

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        code = (
            f"import sys, warnings; sys.path[:] = {sys.path!r}; before = [*warnings.filters]\n"
            "warnings.simplefilter('ignore')\n"
            "from replication.verify.server import serve\n"
            f"warnings.filters[:] = before; serve({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [spawn.get_executable(), "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return ours

    def close(self) -> None:
        """Ends the process and its ranks, and waits until they have ended."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def forget(self) -> None:
        """Leaves the process to the one that has forked this one."""
        self.__init__()  # type: ignore[misc]


#: Of this process.
server = Server()
atexit.register(server.close)
if is_available:
    os.register_at_fork(after_in_child=server.forget)


def serve(descriptor: int) -> None:
    """Runs the jobs of the caller that has started this process, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what a Ctrl-C ends
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch._dynamo")  # DistributedDataParallel imports it when it runs
    # This process runs no threads. A library that it has imported may, such as NumPy's.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    channel = Connection(descriptor)
    with suppress(EOFError, OSError), socket.socket(fileno=os.dup(descriptor)) as link:
        while True:
            _, outputs, *_ = socket.recv_fds(link, 1, len(_OUTPUTS))
            job = channel.recv()
            for output, own in zip(outputs, _OUTPUTS, strict=True):
                os.dup2(output, own)
                os.close(output)
            channel.send_bytes(supervised(get_context("fork"), job, channel))
    end(0)
