"""The public face: save pages under keys, ask which prefixes exist, load them back."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, overload

import numpy as np

from kvferry.arguments import flag, of_type, one_of, or_none, seconds, sequence, whole_number
from kvferry.errors import ArgumentError, StoreUnavailable, TransferFailed
from kvferry.groups import check_groups
from kvferry.kernels.pack import TAILS
from kvferry.layout import CacheLayout
from kvferry.linker.config import LinkerConfig
from kvferry.linker.crew import Crew
from kvferry.linker.endings import Ending
from kvferry.linker.home import Home
from kvferry.linker.keys import KeyScheme, check_page_keys
from kvferry.linker.layer_load import LayerLoad, LoadRequest
from kvferry.linker.layer_plan import Tail, groups_for, merge
from kvferry.linker.layer_save import LayerSave
from kvferry.linker.lookup import ExistenceCache
from kvferry.linker.plan import SpaceIds, SpacePlan, plan_transfer, stride_bytes
from kvferry.linker.shared_reads import SharedReads
from kvferry.linker.staging import StagingBuffer
from kvferry.linker.stats import Stats
from kvferry.linker.store import Store
from kvferry.linker.streams import fence_of_caller
from kvferry.linker.trace import Trace
from kvferry.linker.transfer import Transfer
from kvferry.restore import restorable

log = logging.getLogger(__name__)

_INTERRUPTED_S = 3.0
"""How long `close` takes at most where an exception leaves a linker's block."""


class Linker:
    """Moves pages between a layout's pools and a store. A context manager that closes itself.

    Threads of its own do the work, in the order of the calls: `kvferry-save` and `kvferry-load`,
    and for layer-wise transfers `kvferry-save-layers` and `kvferry-load-layers`, with a few for
    their store calls. Callers only check, plan and enqueue. Safe from any thread.

    Attributes:
        layout: bound to the pools.
        config: the settings.
        keys: makes the object keys; another one after `renew`.
        stats: counters of what its transfers came to.
        sharing: what layer-wise loads share with other ranks, if they do.
    """

    def __init__(
        self,
        layout: CacheLayout,
        store: Store,
        staging: StagingBuffer,
        config: LinkerConfig | None = None,
        *,
        trace: Trace | None = None,
        sharing: SharedReads | None = None,
    ) -> None:
        """Register the staging buffer with the store and start the threads.

        On a GPU this waits for the device, once.

        Args:
            layout: bound to tensors.
            store: connected. The caller owns it and closes it after the linker.
            staging: for this linker's transfers alone. The caller owns its memory; it is
                registered here and unregistered by `close`.
            config: settings.
            trace: where a timeline of the transfers is recorded; none by default.
            sharing: other ranks that layer-wise loads share their reads with; closed by `close`.

        Raises:
            ArgumentError: the layout is not bound, staging cannot hold one object, groups do not
                cover the layers, or the wait would be wrong here.
            StoreError: the store refused the registration.
        """
        of_type("layout", layout, CacheLayout)
        of_type("staging", staging, StagingBuffer)
        for name, value, wanted in (
            ("config", config, LinkerConfig),
            ("trace", trace, Trace),
            ("sharing", sharing, SharedReads),
        ):
            or_none(name, value, of_type, wanted)
        if layout.device is None:
            raise ArgumentError("layout is not bound to tensors, wanted layout.bind(tensors)")
        self.layout = layout
        self.config = config or LinkerConfig()
        for space in layout.spaces:
            needed = stride_bytes(layout, space, trailer=self.config.integrity)
            if needed > staging.num_bytes:
                raise ArgumentError(
                    f"staging has {staging.num_bytes} bytes, wanted at least {needed}: one object "
                    f"of index space {space!r}"
                )
        if self.config.groups is not None:
            check_groups(self.config.groups, layout.num_layers)
        self._home = Home("the linker")
        self.keys = self._scheme_of(layout)
        self.stats = Stats()
        self._store = store
        self._staging = staging
        self._trace = trace
        self.sharing = sharing
        self._existence = ExistenceCache(self.config.lookup_ttl_s, self.config.miss_ttl_s)
        self._can_be_cut = False  # not known yet
        staging.register(store)
        try:
            self._crew = Crew(layout, store, staging, self._existence, self.config, trace, sharing)
        except BaseException:
            staging.unregister()
            raise
        self._ending = Ending(self, at_exit=Linker._abandon, dropped=self._crew.leave)

    @overload
    def save(
        self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: Literal[False] = False
    ) -> Transfer: ...

    @overload
    def save(
        self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: Literal[True]
    ) -> LayerSave: ...

    def save(self, keys: Sequence[str], page_ids: SpaceIds, *, layerwise: bool = False) -> Transfer:
        """Store pages; those that the store has already are not written again.

        The pack is ordered behind all work that the calling thread's current stream has been given
        so far. The pages must not be written again before `Transfer.wait_packed`.

        Args:
            keys: a key for each page of the prefix, each once.
            page_ids: integers `[len(keys)]`, or a mapping of index space to such; -1 where a key
                has no page in that space. On the host, or (at the cost of a wait) on the device.
            layerwise: the pages are not written yet: each layer group leaves once the handle's
                `layer_written` has said so, ordered behind the stream of that call.

        Returns:
            A handle; its result tells which objects failed.

        Raises:
            ArgumentError: an argument is wrong; nothing was enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        self._home.check()
        flag("layerwise", layerwise)
        plans, plan_us = self._plan("save", self.keys, keys, page_ids)
        assert self.layout.device is not None
        caller = fence_of_caller(self.layout.device)
        if not layerwise:
            transfer = Transfer("save", plans, caller, self.config.transfer_timeout_s, plan_us)
            transfer.on_end.append(self.stats.ended)
            self._crew.whole(transfer)
            return transfer
        save = LayerSave("save", plans, caller, self.config.transfer_timeout_s, plan_us)
        groups = groups_for(
            self.layout,
            merge([plans], [None]),
            self.config.groups,
            self.config.compute_us_per_layer,
            self.config.wire_gb_per_s,
        )
        save.prepare(groups, self.layout.num_layers, self.layout.device)
        save.on_end.append(self.stats.ended)
        self._crew.layer_save(save)
        return save

    @overload
    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        partial: bool = False,
        layerwise: Literal[False] = False,
    ) -> Transfer: ...

    @overload
    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        partial: bool = False,
        layerwise: Literal[True],
    ) -> LayerLoad: ...

    def load(
        self,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        tail_tokens: int | None = None,
        tail: str = "zero",
        partial: bool = False,
        layerwise: bool = False,
    ) -> Transfer | LayerLoad:
        """Fetch pages into the pools, whole and verified, or fail.

        The unpack is ordered behind all work that the calling thread's current stream has been
        given so far. The pages must not be read or written until the result is there.

        Args:
            keys: as in `save`, in the order of the prefix; a part of one is fine.
            page_ids: destinations, as in `save`; no page twice. Of the keys, `full` wants a page
                for each, `swa` for the last `window_pages`, `state` for the last one.
            tail_tokens: how many tokens of the last key's page are wanted, 0 .. page_size; all of
                them by default. States are always whole.
            tail: what becomes of that page's other tokens: `zero`, or `keep` what is there.
            partial: that some of those pages, or whole index spaces, are left out on purpose: they
                are filled already. Each key still has a page somewhere.
            layerwise: return a load that is yet to be started, whose layers may be used as they
                arrive; see `LayerLoad`.

        Returns:
            A handle; its result raises `TransferFailed` if any object could not be had.

        Raises:
            ArgumentError: an argument is wrong, or pages cannot be cut by tokens; nothing was
                enqueued.
            TransferFailed: the linker is closing, or too many transfers wait.
        """
        self._home.check()
        flag("layerwise", layerwise)
        request = LoadRequest(keys, page_ids, tail_tokens, tail, partial)
        if layerwise:
            return self.load_batch([request])
        transfer = self._load_of(request, self.keys)
        self._crew.whole(transfer)
        return transfer

    def load_batch(
        self, requests: Sequence[LoadRequest], *, number: int | None = None
    ) -> LayerLoad:
        """Prepare a layer-wise load of several requests, each with a verdict of its own.

        They travel together: a layer counts as there once it is there for all of them. Requests
        may share keys, but not pages.

        Args:
            requests: at least one.
            number: of the load, if its reads are shared: counted alike by all ranks, from 0 on.
                A number that is not loaded here after all is told by `skip_load`.

        Returns:
            The load; it begins with `LayerLoad.start`.

        Raises:
            ArgumentError: an argument is wrong; nothing has happened.
        """
        self._home.check()
        if not sequence("requests", requests, "LoadRequests"):
            raise ArgumentError("requests are empty, wanted at least one")
        if number is not None:
            number = whole_number("number", number, 0)
        scheme = self.keys  # of all of them: they may ask for the same objects
        transfers = tuple(self._load_of(request, scheme) for request in requests)
        rows = merge(
            [transfer.plans for transfer in transfers], [transfer.tail for transfer in transfers]
        )
        groups = groups_for(
            self.layout,
            rows,
            self.config.groups,
            self.config.compute_us_per_layer,
            self.config.wire_gb_per_s,
        )
        assert self.layout.device is not None
        return LayerLoad(
            transfers, rows, groups, self.layout.device, self._crew.layer_load, self._trace, number
        )

    def skip_load(self, number: int) -> None:
        """Tell the ranks that reads are shared with that a load does not take place here."""
        self._home.check()
        whole_number("number", number, 0)
        if self.sharing is not None:
            self.sharing.skip(number)

    def lookup(self, keys: Sequence[str]) -> list[int]:
        """Return every prefix length, in pages, that could be loaded now; ascending, without 0.

        Cheap enough for every scheduling pass: answers are remembered for `lookup_ttl_s`, and the
        unknown ones are asked in one call. While the store cannot be reached nothing exists.

        Args:
            keys: the prefix's page keys, in order.

        Raises:
            ArgumentError: a key is not usable, or occurs twice.
            TransferFailed: the linker is closed.
            StoreClosed: the store is.
        """
        self._home.check()
        page_keys = check_page_keys(keys)
        if self._crew.is_closed:
            raise TransferFailed("lookup refused: the linker is closed", cause="closed")
        if not page_keys:
            return []
        scheme = self.keys
        rows = {space: scheme.object_keys(page_keys, space) for space in self.layout.spaces}
        try:
            if not self._store.available:  # whatever is remembered
                self._store.exists(page_keys[:1])  # says why
                return []
            exists = self._existence.ask(self._store, [key for row in rows.values() for key in row])
        except StoreUnavailable as error:
            log.debug("lookup of %d pages: %s", len(page_keys), error)
            return []
        table = np.asarray(exists, dtype=bool).reshape(len(rows), len(page_keys))
        return restorable(
            dict(zip(rows, table, strict=True)), window_pages=self.layout.window_pages
        )

    def distrust(self, keys: Sequence[str]) -> None:
        """Count pages as missing for `miss_ttl_s`, or until they are written anew.

        Args:
            keys: page keys, whose objects may be there or not.

        Raises:
            ArgumentError: a key is not usable, or occurs twice.
        """
        self._home.check()
        scheme = self.keys
        keys = check_page_keys(keys)
        for space in self.layout.spaces:
            self._existence.mark_failed(scheme.object_keys(keys, space))

    def renew(self, generation: str) -> None:
        """Go over to another generation of the model's weights, for all calls from now on.

        Transfers that were begun, and layer-wise loads that were made, keep the keys that they
        have: what the old weights computed is stored under the old generation, or not at all.
        Nothing is deleted. `layout` keeps the identity that it was made with.

        Args:
            generation: see `ModelIdentity.generation`.
        """
        self._home.check()
        identity = replace(self.layout.identity, generation=generation)
        # One assignment: every call takes the scheme once.
        self.keys = self._scheme_of(self.layout.of_rank(identity))

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what was enqueued, end the threads, take back the registration. Idempotent.

        Transfers that are not done when `timeout_s` has passed fail, and so do layer-wise saves
        whose layers are not all written after 0.5 s. From a transfer's `on_end` this does not wait.

        A linker that is dropped does the same by itself, without a limit but the transfers' own.
        One that an exception or the interpreter's exit ends has 4 s: then what was being loaded,
        and saves that lack layers, fail at once.

        Raises:
            ArgumentError: `timeout_s` is no time.
            TransferFailed: a thread is still inside a store call. Staging stays registered until
                that comes back, since the call may still use it.
        """
        self._home.check()
        seconds("timeout_s", timeout_s)
        self._crew.close(timeout_s)
        self._ending.cancel()

    def __enter__(self) -> "Linker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._home.is_here:
            return
        if kind is None:
            self.close()
        else:
            self._abandon(_INTERRUPTED_S)

    def _abandon(self, timeout_s: float) -> None:
        """Close in a hurry: whoever has the handles will not go on with them."""
        self._crew.close(timeout_s, abandon=True)
        self._ending.cancel()

    def _check_cut(self) -> None:
        """Refuse, once and for all, layouts whose pages cannot be cut by tokens."""
        if not self._can_be_cut:
            for space in self.layout.spaces:
                if space != "state":
                    self.layout.segments(space, by_token=True)
            self._can_be_cut = True

    def _scheme_of(self, layout: CacheLayout) -> KeyScheme:
        config = self.config
        return KeyScheme.of(layout, config.namespace, config.replicated, sealed=config.integrity)

    def _plan(
        self,
        kind: str,
        scheme: KeyScheme,
        keys: Sequence[str],
        page_ids: SpaceIds,
        *,
        partial: bool = True,
    ) -> tuple[tuple[SpacePlan, ...], float]:
        """Return the plans of a transfer, and how many microseconds they took."""
        begin = time.perf_counter()
        plans = plan_transfer(
            self.layout,
            scheme,
            keys,
            page_ids,
            unique=kind == "load",
            trailer=self.config.integrity,
            partial=partial,
        )
        return plans, (time.perf_counter() - begin) * 1e6

    def _load_of(self, request: LoadRequest, scheme: KeyScheme) -> Transfer:
        """Check a request, and return its handle."""
        of_type("requests", request, LoadRequest)
        one_of("tail", request.tail, tuple(TAILS))
        partial = flag("partial", request.partial)
        page_size, tokens = self.layout.page_size, request.tail_tokens
        if tokens is not None:
            tokens = whole_number("tail_tokens", tokens, 0, page_size)
        tail: Tail | None = None
        if tokens is not None and tokens < page_size:
            self._check_cut()
            tail = (tokens, request.tail)
        plans, plan_us = self._plan("load", scheme, request.keys, request.page_ids, partial=partial)
        assert self.layout.device is not None
        caller = fence_of_caller(self.layout.device)
        load = Transfer("load", plans, caller, self.config.transfer_timeout_s, plan_us, tail)
        load.on_end.append(self.stats.ended)
        return load
