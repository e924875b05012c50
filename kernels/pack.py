"""Pack: scattered pages into contiguous objects. Unpack: the way back. Bit for bit, in one launch.

`Packer` checks the arguments and picks the path: the page kernel (`tiles`), the short-run kernel
(`units`), or plain torch on a CPU (`reference`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.arguments import of_type, one_of, or_none, sequence, shown, whole_number
from kvferry.errors import ArgumentError
from kvferry.kernels.bulk import check_device
from kvferry.kernels.checksum import layer_sums_reference
from kvferry.kernels.device import KEEP_TAIL, PACK, UNPACK, WHOLE, ZERO_TAIL
from kvferry.kernels.handles import Launch, is_interpreted
from kvferry.kernels.launches import LaunchMemory, launches_of
from kvferry.kernels.page_ids import AnyIds, PageIds
from kvferry.kernels.reference import PageView, pack_reference, unpack_reference
from kvferry.kernels.tables import Move, Tables, build_tables, layer_ranges
from kvferry.kernels.tiles import _move_tiles_kernel
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.segments import Segment
from kvferry.tuned import for_torch_device

BACKENDS = ("auto", "triton", "reference")
TAILS = {"zero": ZERO_TAIL, "keep": KEEP_TAIL}


class Packer:
    """Moves pages of one layout's index space between its pools and page objects.

    Make one per layout and space and keep it: it holds the tables (on the device) and the views
    (on a CPU), made on first use. It may be used from several threads at once, on page ids that
    do not overlap.

    Attributes:
        layout: bound to tensors; its memory is what is read (pack) or written (unpack).
        space: the index space.
        device: where the pools are.
        max_programs: programs that a launch has at most, 0 for no bound.
    """

    def __init__(
        self,
        layout: CacheLayout,
        space: str,
        config: LaunchConfig | None = None,
        *,
        max_programs: int = 0,
        segments: Sequence[Segment] | None = None,
        objects_of: CacheLayout | None = None,
    ) -> None:
        """Describe the moves of one index space.

        Args:
            layout: bound to tensors.
            space: one of its index spaces.
            config: how the kernels are launched; by default as is tuned for the device, by the
                move's direction and bytes, see `kvferry.tuned`.
            max_programs: budget of tuned launches, see `LaunchConfig`; a `config` has its own.
            segments: what a move is made of, ascending by layer, where that is not whole pages in
                the layout's own order: slices of heads or tokens, another layout's objects.
            objects_of: the layout whose objects these are, where it is another: a writer's, whose
                objects are unpacked by the `segments` of a plan (see `reshard`).

        Raises:
            ArgumentError: the layout is not bound, or has no such space; `max_programs` is out of
                range, or given beside a `config`; bulk copies are asked for, and the pools' device
                has none.
        """
        of_type("layout", layout, CacheLayout)
        or_none("config", config, of_type, LaunchConfig)
        or_none("objects_of", objects_of, of_type, CacheLayout)
        max_programs = whole_number("max_programs", max_programs, 0, 2**31 - 1)
        if layout.device is None:
            raise ArgumentError("layout is not bound to tensors, wanted layout.bind(tensors)")
        one_of("space", space, layout.spaces)
        self.layout = layout
        self.space = space
        self.device = layout.device
        if config is not None and max_programs:
            raise ArgumentError(
                f"max_programs is {max_programs} and config has {config.max_programs}, wanted one "
                "of the two"
            )
        self.max_programs = (config or LaunchConfig(max_programs=max_programs)).max_programs
        if config is not None and config.form == "bulk":
            check_device(self.device)
        self._config = config
        self._tuned = for_torch_device(self.device) if config is None else None
        self._objects_of = objects_of or layout
        self._own_segments = segments is not None
        self._segments = tuple(layout.segments(space) if segments is None else segments)
        self._token_segments: tuple[Segment, ...] | None = None
        self._tables: dict[tuple[int, bool, int, int], Tables] = {}
        self._memory = LaunchMemory()
        self._views: dict[tuple[bool, tuple[tuple[int, int], ...]], list[PageView]] = {}

    def pack(
        self,
        page_ids: AnyIds,
        objects: torch.Tensor,
        *,
        stride_bytes: int | None = None,
        layers: Sequence[int] | None = None,
        origin_bytes: int = 0,
        sums: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        """Gather pages into objects: page `page_ids[i]` to `objects[i * stride_bytes:]`.

        Ordered on the current stream of the pools' device, and not waited for. The pools must not
        be written, nor `objects` read, before that work is done.

        Args:
            page_ids: `[num_pages]` integers in any order; see `PageIds.check`.
            objects: contiguous uint8 `[num_bytes]` on the pools' device, or pinned host memory
                where the pools are on a GPU. The caller owns it. Only the bytes of `layers` are
                written.
            stride_bytes: from one object to the next; the object's size by default. Multiples of
                16, on memory aligned alike, take the fast path.
            layers: ascending layer ids to move; all by default.
            origin_bytes: offset in the object at which `objects[0]` stands: 0 for whole objects;
                for memory that holds one layer group of each, the group's first offset.
            sums: contiguous int64 `[num_pages, num_layers]` on the pools' device. The checksum of
                every layer that is moved (see `checksum`) is added to it, in the same pass.
            backend: `auto` (kernels on a GPU, plain torch on a CPU), `triton` (kernels; on a CPU
                in Triton's interpreter), or `reference` (plain torch).

        Raises:
            ArgumentError: an argument is wrong; nothing was launched.
        """
        where = _Where(objects, stride_bytes, layers, origin_bytes, sums)
        self._move(PACK, page_ids, where, backend, WHOLE, 0)

    def unpack(
        self,
        page_ids: AnyIds,
        objects: torch.Tensor,
        *,
        stride_bytes: int | None = None,
        layers: Sequence[int] | None = None,
        origin_bytes: int = 0,
        sums: torch.Tensor | None = None,
        tail_tokens: int | None = None,
        tail: str = "zero",
        backend: str = "auto",
    ) -> None:
        """Scatter objects into pages: `objects[i * stride_bytes:]` to page `page_ids[i]`.

        As `pack`, the other way: `objects` is read, the pools are written, and no page id may
        occur twice. All other bytes of the pools stay as they are.

        Args:
            page_ids: destinations, each once.
            objects: as in `pack`, read.
            stride_bytes: as in `pack`.
            layers: as in `pack`.
            origin_bytes: as in `pack`.
            sums: as in `pack`, of what was read; not for `segments` of one's own, which read parts.
            tail_tokens: how many tokens of the last page are wanted, 0 .. page_size; all of them by
                default.
            tail: what becomes of the last page's other tokens: `zero`, or `keep` what is there.
            backend: as in `pack`.

        Raises:
            ArgumentError: an argument is wrong; nothing was launched.
            LayoutError: `tail_tokens` is given, and a pool's pages cannot be cut by tokens.
        """
        kind = WHOLE
        if tail_tokens is not None:
            one_of("tail", tail, tuple(TAILS))
            tail_tokens = whole_number("tail_tokens", tail_tokens, 0, self.layout.page_size)
            kind = TAILS[tail] if tail_tokens < self.layout.page_size else WHOLE
        where = _Where(objects, stride_bytes, layers, origin_bytes, sums)
        self._move(UNPACK, page_ids, where, backend, kind, tail_tokens or 0)

    def launches(self, move: Move) -> Sequence[Launch]:
        """Return a move's launches: one per kernel variant, 64 Ki rows, and range of layers.

        So the host's work does not grow with the number of layers, buffers or pages.
        """
        align = math.gcd(16, move.object_address, move.stride_bytes)
        known = self._memory.recall(move, align)
        if known is not None:
            return known
        config = self._config_for(move)
        tables = self._tables_for(align, move.tail != WHOLE, config)
        return self._memory.remember(move, align, launches_of(tables, move, config))

    def describe(
        self,
        kind: int,
        ids: PageIds,
        objects_address: int,
        stride_bytes: int,
        ranges: tuple[tuple[int, int], ...],
        origin_bytes: int = 0,
        sums: torch.Tensor | None = None,
        tail: int = WHOLE,
        tail_tokens: int = 0,
    ) -> Move:
        """Return a move as its launches need it; the arguments have been checked."""
        return Move(
            ids.address,
            ids.id_bytes,
            len(ids),
            self.layout.num_pages[self.space],
            objects_address - origin_bytes,
            stride_bytes,
            ranges,
            kind,
            0 if sums is None else sums.data_ptr(),
            self.layout.num_layers,
            tail,
            tail_tokens,
        )

    def _move(
        self, kind: int, page_ids: AnyIds, where: "_Where", backend: str, tail: int, tokens: int
    ) -> None:
        objects, origin = where.objects, where.origin_bytes
        use_kernels = self._use_kernels(backend, objects)
        ids = PageIds.check(self.layout, self.space, page_ids, unique=kind == UNPACK)
        stride = where.stride_bytes
        if stride is None:
            stride = self._objects_of.object_bytes[self.space]
        elif type(stride) is not int or stride < 0:
            stride = whole_number("stride_bytes", stride, 0)
        if type(origin) is not int:
            origin = whole_number("origin_bytes", origin, 0)
        ranges = self._ranges(where.layers)
        self._check_objects(objects, len(ids), stride, ranges, origin)
        if where.sums is not None and self._own_segments:
            raise ArgumentError("sums are given, but segments that read parts have no checksum")
        _check_sums(where.sums, (len(ids), self.layout.num_layers), self.device)
        segments = self._segments_for(tail != WHOLE)
        if not len(ids) or not ranges:
            return
        if use_kernels:
            address = objects.data_ptr()
            move = self.describe(
                kind, ids, address, stride, ranges, origin, where.sums, tail, tokens
            )
            for launch in self.launches(move):
                launch.start(self.device)
            return
        views = self._views_of(segments, ranges)
        if kind == PACK:
            pack_reference(views, ids.on_device, objects, stride, origin)
        else:
            unpack_reference(views, ids.on_device, objects, stride, origin, tail, tokens)
        if where.sums is not None:
            offsets = self._objects_of.layer_offsets[self.space]
            layer_sums_reference(objects, len(ids), offsets, ranges, stride, origin, where.sums)

    def _use_kernels(self, backend: str, objects: torch.Tensor) -> bool:
        if not isinstance(objects, torch.Tensor):
            raise ArgumentError(f"objects are {shown(objects)}, wanted a uint8 tensor [num_bytes]")
        if backend not in BACKENDS:
            raise ArgumentError(f"backend is {shown(backend)}, wanted one of {BACKENDS}")
        on_cpu = self.device.type == "cpu"
        if backend == "triton" and on_cpu and not is_interpreted(_move_tiles_kernel):
            raise ArgumentError(
                "backend is 'triton' and the pools are on a CPU: set TRITON_INTERPRET=1 before "
                "kvferry's kernels are imported"
            )
        if backend == "reference" and objects.device != self.device:
            raise ArgumentError(
                f"backend is 'reference' and objects are on {objects.device}, wanted {self.device}"
            )
        return backend == "triton" or (backend == "auto" and not on_cpu)

    def _ranges(self, layers: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
        num_layers = self.layout.num_layers
        if layers is None:
            return ((0, num_layers),)
        if _is_within(layers, num_layers):  # as transfers by layer name them: no cost for each
            return ((layers[0], layers[-1] + 1),)
        chosen = [
            each if type(each) is int else whole_number("layers", each, 0, num_layers - 1)
            for each in sequence("layers", layers, "layer ids")
        ]
        if any(not 0 <= layer_id < num_layers for layer_id in chosen):
            raise ArgumentError(f"layers are {chosen}, wanted ids in 0 .. {num_layers - 1}")
        if chosen != sorted(set(chosen)):
            raise ArgumentError(f"layers are {chosen}, wanted ascending ids, each once")
        return layer_ranges(chosen)

    def _check_objects(
        self,
        objects: torch.Tensor,
        num_objects: int,
        stride: int,
        ranges: tuple[tuple[int, int], ...],
        origin: int,
    ) -> None:
        if objects.dtype != torch.uint8 or objects.dim() != 1 or not objects.is_contiguous():
            raise ArgumentError(
                f"objects are {objects.dtype} {list(objects.shape)} with strides "
                f"{objects.stride()}, wanted contiguous uint8 [num_bytes]"
            )
        pinned = objects.device.type == "cpu" and self.device.type == "cuda" and objects.is_pinned()
        if objects.device != self.device and not pinned:
            raise ArgumentError(
                f"objects are on {objects.device}, wanted {self.device}, as the pools"
                + (", or pinned host memory" if self.device.type == "cuda" else "")
            )
        if not ranges or not num_objects:
            return
        offsets = self._objects_of.layer_offsets[self.space]
        first, end = offsets[ranges[0][0]], offsets[ranges[-1][1]]
        if not 0 <= origin <= first:
            raise ArgumentError(
                f"origin_bytes is {origin}, wanted 0 .. {first}, where the first layer begins"
            )
        if num_objects > 1 and stride < end - origin:
            raise ArgumentError(f"stride_bytes is {stride}, wanted at least {end - origin}")
        needed = (num_objects - 1) * stride + end - origin
        if objects.numel() < needed:
            raise ArgumentError(
                f"objects have {objects.numel()} bytes, wanted at least {needed} for "
                f"{num_objects} pages"
            )

    def _segments_for(self, by_token: bool) -> tuple[Segment, ...]:
        if by_token and self._own_segments:
            if not all(segment.token_bytes for segment in self._segments):
                raise ArgumentError(
                    "tail_tokens is given, but the segments do not tell tokens apart: plan them "
                    "by_token=True"
                )
            return self._segments
        if not by_token:
            return self._segments
        if self._token_segments is None:
            self._token_segments = self.layout.segments(self.space, by_token=True)
        return self._token_segments

    def _config_for(self, move: Move) -> LaunchConfig:
        if self._tuned is None:
            assert self._config is not None
            return self._config
        offsets = self._objects_of.layer_offsets[self.space]
        page_bytes = sum(offsets[end] - offsets[first] for first, end in move.layer_ranges)
        direction = "pack" if move.kind == PACK else "unpack"
        return self._tuned.choose(direction, move.num_pages * page_bytes, self.max_programs)

    def _tables_for(self, object_align_bytes: int, by_token: bool, config: LaunchConfig) -> Tables:
        # What tables depend on, and no more: directions that differ in warps alone share them.
        key = (object_align_bytes, by_token, config.tile_bytes, config.page_run_bytes)
        tables = self._tables.get(key)
        if tables is None:
            tables = build_tables(
                self._segments_for(by_token),
                self.layout.num_layers,
                self.device,
                object_align_bytes,
                config,
                fill_layers=not self._own_segments,
            )
            self._tables[key] = tables
        return tables

    def _views_of(
        self, segments: tuple[Segment, ...], ranges: tuple[tuple[int, int], ...]
    ) -> list[PageView]:
        key = (segments is self._segments, ranges)
        views = self._views.get(key)
        if views is None:
            views = [
                PageView(segment)
                for segment in segments
                if any(first <= segment.layer_id < end for first, end in ranges)
            ]
            self._views[key] = views
        return views


@dataclass(frozen=True)
class _Where:
    """Where a move's objects are: the arguments that `pack` and `unpack` share."""

    objects: torch.Tensor
    stride_bytes: int | None
    layers: Sequence[int] | None
    origin_bytes: int
    sums: torch.Tensor | None


def _is_within(layers: Sequence[int], num_layers: int) -> bool:
    """Whether layers are a range of consecutive ids in 0 .. num_layers - 1; at a fixed cost."""
    if not isinstance(layers, range) or layers.step != 1:
        return False
    return 0 <= layers.start < layers.stop <= num_layers


def _check_sums(sums: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    if sums is None:
        return
    if not isinstance(sums, torch.Tensor):
        raise ArgumentError(f"sums are {shown(sums)}, wanted an int64 tensor {list(shape)}")
    if sums.dtype != torch.int64 or tuple(sums.shape) != shape or not sums.is_contiguous():
        raise ArgumentError(
            f"sums are {sums.dtype} {list(sums.shape)}, wanted contiguous int64 {list(shape)}"
        )
    if sums.device != device:
        raise ArgumentError(f"sums are on {sums.device}, wanted {device}, as the pools")
