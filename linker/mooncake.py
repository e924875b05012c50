"""MooncakeStore: the object store on Mooncake; the only file that imports Mooncake."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvferry.arguments import of_type, seconds, shown, string, whole_number
from kvferry.errors import StoreClosed, StoreError, StoreUnavailable
from kvferry.linker import clients, codes
from kvferry.linker.arguments import (
    MAX_NAME_LENGTH,
    check_integers,
    check_keys,
    check_names,
    check_sizes,
    split,
)
from kvferry.linker.calls import Calls
from kvferry.linker.endings import Ending
from kvferry.linker.gate import Gate
from kvferry.linker.get_sessions import GetBook, MooncakeGetSession
from kvferry.linker.mooncake_config import MooncakeConfig
from kvferry.linker.objects import get_objects, put_objects
from kvferry.linker.put_book import PutBook
from kvferry.linker.put_sessions import MooncakePutSession
from kvferry.linker.store import STORED, ObjectResult, Store

__all__ = ["MooncakeConfig", "MooncakeStore"]

MAX_ADDRESS = 2**63 - 1
_CONNECT_TIMEOUT_S = 2.0


class MooncakeStore:
    """A client of a Mooncake cluster; see `kvferry.linker.store.Store` for the methods' contracts.

    Connecting and closing hold Python's GIL, mostly for 0.1 to 2 s, longer where the master's
    address answers but is no master (3 times `rpc_timeout_s`) or a segment's owner closes while
    the master is down (13 s): do them where nobody waits. All other calls release it.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Connect.

        Raises:
            StoreError: Mooncake is not installed or can't be loaded, or its setup failed.
            StoreUnavailable: nobody listens at the master's address.
        """
        self._config = of_type("config", config, MooncakeConfig)
        client = _connect(config)
        limits = {
            "max_call_bytes": config.max_call_bytes,
            "max_call_objects": config.max_call_objects,
        }
        self._calls = Calls(client, partial(_listens, config), config.master_address)
        self._gets = GetBook(self._calls, lease_ttl_s=config.lease_ttl_s, **limits)
        self._puts = PutBook(self._calls, self._gets.ask, max_age_s=config.session_age_s, **limits)
        self._closing = threading.Lock()
        self._closed = False
        # Sessions can outlive this, and call: once nobody can, the client goes.
        self._endings = (
            Ending(self._calls, dropped=partial(_disconnect, self._calls.gate, client)),
            Ending(self, at_exit=MooncakeStore._end_at_exit),
        )

    @property
    def client(self) -> Any:
        """The `MooncakeDistributedStore` itself, for benchmarks and diagnosis only.

        Nothing guards it: a call on it during or after `close` crashes the process.
        """
        return self._calls.client

    @property
    def closed(self) -> bool:
        """Whether the store was disconnected."""
        return self._closed

    @property
    def available(self) -> bool:
        """Whether calls are let through now."""
        return not self._calls.gate.closed and not self._calls.breaker.is_open

    @property
    def num_open_puts(self) -> int:
        """Objects that put sessions have open, those included that wait to be revoked."""
        self._calls.gate.home.check()
        return self._puts.num_open

    @property
    def num_open_gets(self) -> int:
        """Objects that get sessions hold."""
        self._calls.gate.home.check()
        return self._gets.num_open

    def register(self, address: int, num_bytes: int) -> None:
        """Make memory known; ArgumentError if it overlaps a registered range."""
        address = whole_number("address", address, 1, MAX_ADDRESS)
        num_bytes = whole_number("num_bytes", num_bytes, 1, MAX_ADDRESS)
        with self._calls.gate:
            self._calls.ranges.add(address, num_bytes)
            code = self._calls.client.register_buffer(address, num_bytes)
            if code != 0:
                self._calls.ranges.remove(address)
                raise _refused(f"register_buffer({address:#x}, {num_bytes} bytes)", code)

    def unregister(self, address: int) -> None:
        """Forget a range by its first address; nothing may be in flight on it."""
        address = whole_number("address", address, 1, MAX_ADDRESS)
        with self._calls.gate:
            self._calls.ranges.remove(address)
            code = self._calls.client.unregister_buffer(address)
        if code != 0:
            raise _refused(f"unregister_buffer({address:#x})", code)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Ask for each key; a found object is leased from then on."""
        self._calls.gate.home.check()
        keys = check_names(keys)
        step = self._config.max_call_objects
        found: list[bool] = []
        for first in range(0, len(keys), step):
            found += self._calls.exists(keys[first : first + step])
        return found

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[ObjectResult]:
        """Write whole objects, by put sessions that last no longer than the call.

        Not by Mooncake's own put: its 0 says neither that these bytes were stored nor that any can
        be read, and after a time-out it gives the object's memory away while bytes may still come.
        What was stored is leased, as by a lookup; if it is gone by then, it is FAILED with
        `OBJECT_NOT_FOUND`.
        """
        self._calls.check_sessions()
        self._check(keys, addresses, sizes)
        results: list[ObjectResult] = []
        for part in split(sizes, self._config.max_call_bytes, self._config.max_call_objects):
            results += put_objects(self._puts, keys[part], addresses[part], sizes[part])
        return results

    def get(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[ObjectResult]:
        """Read whole objects; an object shorter than asked leaves the rest of its memory alone."""
        self._check(keys, addresses, sizes)
        results: list[ObjectResult] = []
        for part in split(sizes, self._config.max_call_bytes, self._config.max_call_objects):
            results += get_objects(
                self._calls, keys[part], addresses[part], sizes[part], self._config.lease_ttl_s
            )
        return results

    def remove(self, keys: Sequence[str]) -> list[ObjectResult]:
        """Delete objects; those that are leased stay."""
        self._calls.gate.home.check()
        keys = check_names(keys)
        step = self._config.max_call_objects
        results: list[ObjectResult] = []
        for first in range(0, len(keys), step):
            answers = self._calls.remove(keys[first : first + step])
            results += [STORED if code == 0 else codes.failure(code) for code in answers]
        return results

    def remove_under(self, prefix: str) -> int:
        """Delete all objects whose keys begin with `prefix`; return how many were.

        Those that are leased or being written stay.
        """
        string("prefix", prefix, most=MAX_NAME_LENGTH)
        count = self._calls.remove_under(prefix)
        if count < 0:
            raise _refused(f"removing what begins with {shown(prefix)}", count)
        return count

    def put_session(self, keys: Sequence[str], sizes: Sequence[int]) -> MooncakePutSession:
        """Open objects for writing in ranges; a key open in another session here is PENDING."""
        self._calls.gate.home.check()
        self._calls.check_sessions()
        keys = check_names(keys)
        check_integers("sizes", sizes)
        return MooncakePutSession(self._puts, keys, sizes)

    def get_session(self, keys: Sequence[str]) -> MooncakeGetSession:
        """Open objects for reading in ranges."""
        self._calls.gate.home.check()
        self._calls.check_sessions()
        return MooncakeGetSession(self._gets, check_names(keys))

    def close(self, timeout_s: float = 30.0) -> None:
        """Refuse new calls, wait for those in flight, revoke open sessions, disconnect.

        Raises:
            StoreError: calls are still in flight after `timeout_s`. The connection then stays up,
                because cutting it would crash them; call `close` again.
        """
        self._calls.gate.home.check()
        timeout_s = seconds("timeout_s", timeout_s)
        deadline_s = time.monotonic() + timeout_s
        if not self._closing.acquire(timeout=timeout_s):
            raise StoreError(f"another thread is still closing the store after {timeout_s} s")
        try:
            if not self._closed:
                self._disconnect(deadline_s, timeout_s)
                self._closed = True
                for ending in self._endings:
                    ending.cancel()
        finally:
            self._closing.release()

    def __enter__(self) -> "MooncakeStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._calls.gate.home.is_here:
            self.close()

    def _check(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self._calls.gate.home.check()
        if self._calls.gate.closed:
            raise StoreClosed("the store is closed")
        check_names(keys)
        check_integers("addresses", addresses)
        check_integers("sizes", sizes)
        check_keys(keys, addresses=addresses, sizes=sizes)
        check_sizes(keys, sizes)
        self._calls.check_addresses(keys, addresses, sizes)

    def _disconnect(self, deadline_s: float, timeout_s: float) -> None:
        num_calls = self._calls.gate.close(timeout_s)
        rest_s = max(0.0, deadline_s - time.monotonic())
        if num_calls or not self._calls.breaker.close(rest_s):
            raise StoreError(
                f"{max(1, num_calls)} calls are still in flight after {timeout_s} s; the store "
                "stays connected, call close() again"
            )
        client = self._calls.client
        writing, reading = self._puts.drain(), self._gets.drain()
        if not self._calls.breaker.is_open:  # else each would block for seconds
            if writing:
                client.batch_put_session_revoke(writing)
            if reading:
                client.batch_get_session_end(reading)
        client.close()

    def _end_at_exit(self, timeout_s: float) -> None:
        """Disconnect, if that is possible at once: nothing may hold up an interpreter's exit."""
        is_away = self._calls.breaker.is_open  # whom disconnecting would wait for
        if not is_away:
            with contextlib.suppress(StoreError):
                self.close(timeout_s)
        if is_away or not self._closed:  # Mooncake's own handler would wait, or crash calls
            clients.skip_exit_handlers()


def _connect(config: MooncakeConfig) -> Any:
    # From 2048 slices in flight on, Mooncake up to 0.3.13 loses its TCP channel for good.
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(round(config.rpc_timeout_s * 1000)))
    # An owner that hangs costs this much, of 30 s: until it begins to answer, or to go on.
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "5")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "10")
    os.environ.setdefault("MC_TCP_LANES_PER_PEER", "16")  # of 4: so many objects wait side by side
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "3")  # of 20; the GIL is held
    client_class = _client_class()
    clients.check_process()
    if not _listens(config):
        raise StoreUnavailable(
            f"nobody listens at master_address {config.master_address!r}",
            code=codes.RPC_FAIL,
            code_name=codes.code_name(codes.RPC_FAIL),
        )
    client = client_class()
    clients.add(client)
    code = client.setup(
        config.local_hostname,
        config.metadata,
        config.segment_bytes,
        config.local_buffer_bytes,
        config.protocol,
        config.device_name,
        config.master_address,
    )
    if code != 0:
        raise _refused(f"setup with {config}", code)
    return client


def _disconnect(gate: Gate, client: Any) -> None:
    """Close a client that nobody can call any more, but perhaps a probe that is at it."""
    if gate.close_if_empty():
        client.close()


def _client_class() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise StoreError(
            f"Mooncake is not installed ({error}); install one of kvferry's extras: kvferry[cpu], "
            "kvferry[cu12] or kvferry[cu13]"
        ) from error
    except ImportError as error:
        raise StoreError(
            f"Mooncake can't be loaded: {error}. On Debian and Ubuntu libibverbs1, libnuma1 and "
            "libcurl4 hold its libraries; a CUDA wheel also needs the driver's libcuda.so.1"
        ) from error
    return MooncakeDistributedStore


def _listens(config: MooncakeConfig) -> bool:
    """Whether the master's port accepts connections; True where the address is not host:port."""
    endpoint = config.master_endpoint()
    if endpoint is None:
        return True
    with contextlib.suppress(OSError):
        socket.create_connection(endpoint, timeout=_CONNECT_TIMEOUT_S).close()
        return True
    return False


def _refused(what: str, code: int) -> StoreError:
    name = codes.code_name(code)
    return StoreError(f"Mooncake refused {what}: {name}", code=code, code_name=name)


if TYPE_CHECKING:
    _implements: type[Store] = MooncakeStore
