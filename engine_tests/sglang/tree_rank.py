"""One tensor-parallel rank of an SGLang engine's cache side, in a process of its own."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from rank_processes import join

from kvferry.linker.eviction import evict

RID = "request"


class TreeRank:
    """A rank; its methods are called by name. It loads SGLang as the tests' conftest does."""

    def __init__(self, rank: int, size: int, master_address: str) -> None:
        import standins

        standins.install()
        from hooked import Hooked
        from sglang.srt.arg_groups import overrides
        from sglang.srt.mem_cache.cpp_utils import native_hash
        from sglang.srt.runtime_context import get_context, get_parallel

        from kvferry.linker import sglang
        from kvferry.linker.mooncake import MooncakeStore

        native_hash._load_native_hash_module = lambda: standins.PageHash
        overrides.mamba_cache_chunk_size = lambda _: 64  # a model would say it
        sglang.MooncakeStore = lambda config: Hooked(MooncakeStore(config))
        self._stays = contextlib.ExitStack()
        self._stays.enter_context(
            get_context().override_server_args(model_path=standins.TINY_MODEL)
        )
        self._stays.enter_context(get_parallel().override(attn_dcp_size=1))
        self.rank = rank
        self.size = size
        self.address = master_address
        self.tree: Any = None
        self.verdicts: list[bool] = []

    def join(self, port: int) -> None:
        """Come together with the other ranks."""
        join(self.rank, self.size, port)

    def engine(self, kind: str, namespace: str, **settings: Any) -> None:
        """Make an engine whose tensor-parallel ranks are these processes."""
        from kinds import KINDS
        from tree import Engine

        self.close()
        extra = {"master_server_address": self.address, "namespace": namespace, **settings}
        groups = {"tp_cache_group": dist.group.WORLD, "attn_tp_cache_group": dist.group.WORLD}
        self.tree = Engine(KINDS[kind](), "python", extra, params=groups)
        wrapper = self.tree.cache.linker
        commit = wrapper.commit_completed_offloads

        def committed(successes: Sequence[bool]) -> None:
            self.verdicts += [bool(success) for success in successes]
            commit(successes)

        wrapper.commit_completed_offloads = committed

    def update_weights(self) -> str:
        """Tell what SGLang tells of new weights without a version, and flush; the generation."""
        from sglang.srt.runtime_context import get_context

        from kvferry.linker.sglang_identity import READ_AGAIN

        get_context().override(READ_AGAIN, model_path="/step/2")
        self.tree.flush()
        generation: str = self.tree.linker.linker.keys.generation
        return generation

    def close(self) -> None:
        """End the engine, if there is one."""
        if self.tree is not None:
            self.tree.close()
        self.tree = None

    def _prompt(self, branch: int, num_pages: int) -> Any:
        from prompts import tokens

        return tokens(num_pages * self.tree.kind.page_size, branch)

    def offload(self, branch: int, num_pages: int) -> list[bool]:
        """Compute a prompt, offload and forget it; the verdicts that SGLang acted upon."""
        self.verdicts = []
        self.tree.prefill(self._prompt(branch, num_pages))
        self.tree.settle()
        self.tree.flush()
        return self.verdicts

    def object_keys(self, branch: int, num_pages: int, space: str = "full") -> list[str]:
        """The objects of a prompt's pages."""
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        page_size = self.tree.kind.page_size
        pages = get_storage_hash_str(self._prompt(branch, num_pages), page_size=page_size)
        keys: list[str] = self.tree.linker.linker.keys.object_keys(pages, space)
        return keys

    def remove(self, branch: int, num_pages: int, page: int) -> None:
        """Take a page's object out of the store."""
        (result,) = evict(self.tree.store, [self.object_keys(branch, num_pages)[page]])
        assert result.outcome.value == "stored"

    def found(self, branch: int, num_pages: int) -> int:
        """How many pages of a prompt SGLang would load."""
        request = self.tree.match(self._prompt(branch, num_pages))
        return int(request.match.host_hit_length) // int(self.tree.kind.page_size)

    def load(self, branch: int, num_pages: int) -> dict[str, int]:
        """Load a prompt, read it layer by layer, check every byte; counts of shared reads."""
        request = self.tree.match(self._prompt(branch, num_pages))
        assert request.match.host_hit_length == num_pages * self.tree.kind.page_size
        self.tree.load(request)
        self.tree.flush()
        sharing = self.tree.linker.linker.sharing
        return {} if sharing is None else vars(sharing.counts)

    def failing_load(self, branch: int, num_pages: int) -> tuple[list[str], bool]:
        """Load a prompt; the requests that SGLang aborts, and this rank's own verdict."""
        request = self.tree.match(self._prompt(branch, num_pages), RID)
        assert self.tree.load_back(request)
        own: list[bool] = []
        finish = self.tree.linker.finish_layer_wise_loading

        def finished(index: int) -> bool:
            own.append(finish(index))
            return own[-1]

        self.tree.linker.finish_layer_wise_loading = finished
        assert self.tree.start() >= 0
        failed = self.tree.finish(request)
        self.tree.linker.finish_layer_wise_loading = finish
        self.tree.flush()
        return failed, own[0]

    def break_calls(self, *names: str) -> None:
        """Have some of the store's calls fail for all their objects; the others are healed."""
        from kvferry.linker.store import ObjectResult, Outcome

        def fail(keys: Sequence[str], *_: Any) -> list[ObjectResult]:
            return [ObjectResult(Outcome.FAILED, "TRANSFER_FAIL") for _ in keys]

        self.tree.store.before = dict.fromkeys(names, fail)

    def puts(self) -> list[str]:
        """Objects that this rank has put."""
        return [key for name, keys in self.tree.store.calls if name == "put" for key in keys]
