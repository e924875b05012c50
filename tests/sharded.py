"""A small model whose every byte is known, and its ranks: what each holds is cut by plain torch."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from kvferry.identity import ModelIdentity
from kvferry.kernels.pack import Packer
from kvferry.launch import LaunchConfig
from kvferry.layout import CacheLayout
from kvferry.pools import PoolTensors
from kvferry.reshard import ReshardPlan, plan_reshard
from kvferry.testing import POISON

SMALL_TILES = LaunchConfig(tile_bytes=1024, units_per_program=32, page_run_bytes=64)
ALL_POOLS = ("k", "v", "latent", "index", "conv", "ssm")
PLANES = (8, 4)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """Sizes of the whole model, and the bytes of `tokens` tokens and `num_states` states."""

    tokens: int
    heads: int = 4
    k_dim: int = 8
    v_dim: int = 4
    latent_dim: int = 24
    channels: tuple[int, ...] = (8, 8, 16)
    state_heads: int = 8
    num_states: int = 1
    layers: int = 2
    pools: tuple[str, ...] = ALL_POOLS

    @cached_property
    def whole(self) -> Mapping[str, list[torch.Tensor]]:
        """Per pool and layer, the bytes of all ranks together."""
        shapes = {
            "k": (torch.int16, (self.tokens, self.heads, self.k_dim)),
            "v": (torch.int16, (self.tokens, self.heads, self.v_dim)),
            "latent": (torch.uint8, (self.tokens, self.latent_dim)),
            "index": (torch.uint8, (self.tokens, sum(PLANES))),
            "conv": (torch.int16, (self.num_states, sum(self.channels), 3)),
            "ssm": (torch.int32, (self.num_states, self.state_heads, 2, 4)),
        }
        generator = torch.Generator().manual_seed(7)
        return {
            name: [_random(*shapes[name], generator) for _ in range(self.layers)]
            for name in self.pools
        }


def _random(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    plain = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(0, 256, (plain,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )


def cut(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """One rank's entries: an equal share, or one entry that several ranks have."""
    entries = whole.shape[dim]
    if size <= entries:
        return whole.chunk(size, dim)[rank]
    return whole.narrow(dim, rank * entries // size, 1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory under a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def twin_of(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same view of other memory."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class Rank:
    """One rank: its layout over guarded memory, and the bytes that its pages must have."""

    def __init__(
        self,
        model: Model,
        page_size: int,
        *,
        tp: tuple[int, int] = (0, 1),
        dcp: tuple[int, int] = (0, 1),
        memory: str = "nhd",
        order: str = "pool",
        padding: int = 0,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.model, self.page_size, self.tp, self.dcp = model, page_size, tp, dcp
        self.memory, self.padding, self.device = memory, padding, device
        self.num_pages = model.tokens // (page_size * dcp[1])
        pool_pages = max(self.num_pages, model.num_states) + 3
        ids = random.Random(seed).sample(range(pool_pages), pool_pages)
        self.page_ids = {"full": ids[: self.num_pages], "state": ids[: model.num_states]}
        self.tensors = {
            name: {layer: self._allocate(name, layer, pool_pages) for layer in range(model.layers)}
            for name in model.pools
        }
        self.layout = CacheLayout.from_tensors(
            [self._pool(name) for name in model.pools],
            page_size=page_size,
            num_layers=model.layers,
            identity=ModelIdentity(model="small", tp=tp, dcp=dcp),
            order=order,
        )

    def _pool(self, name: str) -> PoolTensors:
        model, tensors, by_head = self.model, self.tensors[name], self.memory == "hnd"
        if name in ("k", "v"):
            return PoolTensors(
                name, "full", "page" if by_head else "token", tensors,
                token_axis=1 if by_head else None, shard_axis=0, shard_totals=(model.heads,),
                head_group="kv",
            )  # fmt: skip
        if name == "latent":
            return PoolTensors(name, "full", "token", tensors)
        if name == "index":
            return PoolTensors(name, "full", "page", tensors, token_planes=PLANES)
        if name == "conv":
            parts = tuple(size // self.tp[1] for size in model.channels)
            return PoolTensors(
                name, "state", "page", tensors, shard_axis=1 if by_head else 0, shard_parts=parts,
                shard_totals=model.channels,
            )  # fmt: skip
        return PoolTensors(
            name, "state", "page", tensors, shard_axis=0, shard_totals=(model.state_heads,)
        )

    def pages(self, name: str, layer: int) -> torch.Tensor:
        """What this rank's pages hold, `[num_pages, *page_shape]`."""
        whole = self.model.whole[name][layer].to(self.device)
        if name == "conv":
            parts = whole.split(self.model.channels, 1)
            mine = torch.cat([cut(part, 1, *self.tp) for part in parts], 1)
            return mine.transpose(1, 2) if self.memory == "hnd" else mine
        if name == "ssm":
            return cut(whole, 1, *self.tp)
        dealt = whole.unflatten(0, (self.num_pages, self.page_size, self.dcp[1]))
        dealt = dealt[:, :, self.dcp[0]]
        if name == "index":
            planes = dealt.split(PLANES, 2)
            return torch.cat([plane.flatten(1) for plane in planes], 1)
        if name == "latent":
            return dealt if self.memory == "hnd" else dealt.unsqueeze(2)
        mine = cut(dealt, 2, *self.tp)
        return mine.transpose(1, 2) if self.memory == "hnd" else mine

    def _allocate(self, name: str, layer: int, pool_pages: int) -> torch.Tensor:
        plain = self.pages(name, layer)
        rows = name in ("k", "v", "latent") and not (self.memory == "hnd" and name != "latent")
        shape = [pool_pages * self.page_size, *plain.shape[2:]] if rows else [
            pool_pages, *plain.shape[1:]
        ]  # fmt: skip
        item = plain.element_size()
        wide = [shape[0], shape[1] + self.padding, *shape[2:]]
        size = torch.Size(wide).numel() * item
        memory = torch.full((size + 64,), POISON, dtype=torch.uint8, device=self.device)
        whole = memory[16 : 16 + size].view(plain.dtype).view(wide)
        return whole.narrow(1, self.padding // 2, shape[1])

    def paged(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A pool's tensor, or one like it, with a dimension of pages in front."""
        pool = next(pool for pool in self.layout.pools if pool.name == name)
        return tensor.unflatten(0, (-1, self.page_size)) if pool.rows == "token" else tensor

    def write(self) -> None:
        """Put the rank's bytes into its pages."""
        for name, layers in self.tensors.items():
            ids = torch.tensor(self.page_ids["state" if name in ("conv", "ssm") else "full"])
            for layer, tensor in layers.items():
                self.paged(tensor, name)[ids] = self.pages(name, layer)

    def check(self) -> None:
        """Compare all memory of the pools: the rank's bytes in its pages, poison elsewhere."""
        for name, layers in self.tensors.items():
            ids = torch.tensor(self.page_ids["state" if name in ("conv", "ssm") else "full"])
            for layer, tensor in layers.items():
                got = bytes_of(tensor)
                wanted = torch.full_like(got, POISON)
                self.paged(twin_of(tensor, wanted), name)[ids] = self.pages(name, layer)
                wrong = int((got != wanted).sum())
                assert not wrong, f"pool {name} layer {layer}: {wrong} bytes differ"

    def objects(self, space: str, stride: int, path: str) -> torch.Tensor:
        """Pack all pages of a space, `[num_pages, stride]`."""
        ids = self.page_ids[space]
        objects = torch.full((len(ids) * stride,), POISON, dtype=torch.uint8, device=self.device)
        packer = Packer(self.layout, space, SMALL_TILES)
        packer.pack(ids, objects, stride_bytes=stride, backend=path)
        return objects.view(len(ids), stride)


def deployment(
    model: Model, page_size: int, tp_size: int, dcp_size: int = 1, *, in_tp: bool = False,
    memory: str = "nhd", order: str = "pool", padding: int = 0, device: torch.device = CPU,
) -> dict[tuple[int, int], Rank]:  # fmt: skip
    """All ranks of a deployment, by tp rank and dcp rank, their pages written."""
    pairs: Iterable[tuple[int, int]] = (
        [(tp, tp % dcp_size) for tp in range(tp_size)]
        if in_tp
        else [(tp, dcp) for tp in range(tp_size) for dcp in range(dcp_size)]
    )
    ranks = {
        (tp, dcp): Rank(
            model, page_size, tp=(tp, tp_size), dcp=(dcp, dcp_size), memory=memory, order=order,
            padding=padding, seed=tp * 100 + dcp, device=device,
        )
        for tp, dcp in pairs
    }  # fmt: skip
    for rank in ranks.values():
        rank.write()
    return ranks


def load(
    writers: Mapping[tuple[int, int], Rank],
    reader: Rank,
    *,
    in_tp: bool = False,
    path: str = "reference",
) -> ReshardPlan:
    """Read all pages of a rank from the writers' objects."""
    layout = next(iter(writers.values())).layout
    plan = plan_reshard(layout, reader.layout, dcp_in_tp=in_tp)
    for source in plan.sources:
        space = source.space
        writer = writers[source.identity.tp[0], source.identity.dcp[0]]
        assert source.layout.fingerprint == writer.layout.fingerprint
        larger = source.object_bytes
        stride = -(-larger // 16) * 16
        written = writer.objects(space, stride, path)
        pages = reader.page_ids[space]
        pairs = plan.page_pairs(source, len(pages))
        theirs = [page for _, page in pairs]
        objects = written[theirs].flatten()
        packer = Packer(
            reader.layout, space, SMALL_TILES, segments=source.segments, objects_of=source.layout
        )
        packer.unpack(
            [pages[page] for page, _ in pairs], objects, stride_bytes=stride, backend=path
        )
    return plan
