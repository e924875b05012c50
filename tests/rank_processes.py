"""Ranks in processes of their own, and how a test tells them what to do.

`ranks.all("load", ...)` runs a method of the worker on every rank at once.
"""

import contextlib
import datetime
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 60.0
START_LIMIT_S = 240.0  # a busy machine takes its time to import an engine
Make = Callable[[int, int, str], Any]
"""Makes a worker of rank, number of ranks and the master's address; it has a method `join`."""


def join(rank: int, size: int, port: int) -> None:
    """Come together with the other ranks, as torch.distributed's default group."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )


def serve(make: Make, rank: int, size: int, master_address: str, pipe: Connection) -> None:
    """Carry out what comes through a pipe, until it is closed."""
    torch.set_num_threads(1)
    try:
        worker = make(rank, size, master_address)
    except Exception:  # noqa: BLE001  the test's
        pipe.send((0, False, traceback.format_exc()))
        return
    pipe.send((0, True, None))
    while True:
        try:
            number, name, arguments, options = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((number, True, getattr(worker, name)(*arguments, **options)))
        except Exception:  # noqa: BLE001  the test's, who gets it from the pipe
            pipe.send((number, False, traceback.format_exc()))
    os._exit(0)  # nothing that another rank would be waited for


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Ranks:
    """Some workers, and what they are told."""

    def __init__(self, make: Make, size: int, master_address: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.sent = [0] * size  # numbers of the last calls; 0 is that each is there
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(make, rank, size, master_address, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        try:
            for rank in range(size):
                self.receive(rank, START_LIMIT_S)
            self.all("join", _free_port())
        except BaseException:
            self.close()
            raise

    def send(self, rank: int, name: str, *arguments: Any, **options: Any) -> None:
        """Have one rank begin something."""
        self.sent[rank] += 1
        self.pipes[rank].send((self.sent[rank], name, arguments, options))

    def receive(self, rank: int, limit_s: float = LIMIT_S) -> Any:
        """What came of it; an error of the rank's is raised here."""
        number = -1
        while number != self.sent[rank]:  # not what a test has left behind that failed
            if not self.pipes[rank].poll(limit_s):
                raise TimeoutError(f"rank {rank} did not answer within {limit_s:g} s")
            number, good, answer = self.pipes[rank].recv()
        assert good, f"rank {rank}:\n{answer}"
        return answer

    def one(self, rank: int, name: str, *arguments: Any, **options: Any) -> Any:
        """Run a method on one rank."""
        self.send(rank, name, *arguments, **options)
        return self.receive(rank)

    def all(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """Run a method on all ranks at once, with the same arguments."""
        return self.each(name, *[arguments] * self.size, **options)

    def each(self, name: str, *arguments: Sequence[Any], **options: Any) -> list[Any]:
        """Run a method on all ranks at once, each with its own arguments."""
        for rank, own in enumerate(arguments):
            self.send(rank, name, *own, **options)
        return [self.receive(rank) for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join(5)


@contextlib.contextmanager
def ranks_of(make: Make, size: int, master_address: str) -> Iterator[Ranks]:
    """Some workers for a while."""
    ranks = Ranks(make, size, master_address)
    try:
        yield ranks
    finally:
        ranks.close()
