"""One rank of an engine: its caches, its connector, and the model runner's calls around a step."""

import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from model import Layer, Span, layers_of, next_token
from plan import Plan
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


@dataclass
class Told:
    """What the bytes of an engine's requests are to tell.

    Attributes:
        of_request: tags of a request's tokens, those included that it will be answered with.
        of_key: tags of a block's tokens and all before them, by its hash.
    """

    of_request: dict[str, list[int]] = field(default_factory=dict)
    of_key: dict[str, list[int]] = field(default_factory=dict)


class Worker:
    """One rank: its caches, its connector, and what vLLM's model runner does around a step.

    Attributes:
        connector: kvferry's.
        layers: of the model, in its order.
        model: what stands for its weights; None if it cannot be had.
        seen: the metadata of all steps.
        spoiled: what steps read wrong.
    """

    def __init__(
        self, config: VllmConfig, plan: Plan, told: "Told", *, rank: int = 0, runner: str = "v2"
    ) -> None:
        """Make a rank.

        Args:
            config: of the engine.
            plan: its caches.
            told: what is known of its requests.
            rank: told by the bytes.
            runner: `v2`, or `v1` for the older runner's calls.
        """
        self.config, self.plan = config, plan
        self.layers = layers_of(plan, rank)
        self.connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, plan.config
        )
        self.model: torch.nn.Module | None = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(self.model.weight, 1.0 + rank)
        torch.nn.init.constant_(self.model.bias, 0.0)
        self.told = told
        self.seen: list[Any] = []
        self.spoiled: list[str] = []
        self._tables: dict[str, list[list[int]]] = {}
        self._num_known: dict[str, int] = {}
        self._num_asked: dict[str, int] = {}
        self._v1 = runner == "v1"
        self._be_current()
        if self._v1:
            self.connector.register_kv_caches(plan.caches)
        else:
            self._runner = ActiveKVConnector(config, plan.caches)
        for layer in self.layers:
            config.compilation_config.static_forward_context[layer.name] = layer

    def get_model(self) -> torch.nn.Module | None:
        """As vLLM's runners have it."""
        return self.model

    def execute(self, scheduled: Any) -> ModelRunnerOutput:
        """Run a step as the scheduler has it; it has come by way of bytes, as between processes."""
        scheduled = pickle.loads(pickle.dumps(scheduled))
        self._be_current()
        self.seen.append(scheduled.kv_connector_metadata)
        self._check_null(scheduled.kv_connector_metadata.jobs)
        self._update_tables(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            if self._v1:
                return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
            return self._runner.no_forward(scheduled)
        spans = self._spans(scheduled)
        with ExitStack() as step:
            step.enter_context(
                set_forward_context(
                    {layer.name: SimpleNamespace() for layer in self.layers},
                    self.config,
                    slot_mapping={},
                )
            )
            batch = SimpleNamespace(idx_mapping=None, req_ids=list(spans), num_tokens=0)
            if self._v1:
                with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as out:
                    self._forward(list(spans.values()), scheduled)
            else:
                self._runner.pre_forward(scheduled, batch)
                self._forward(list(spans.values()), scheduled)
                self._runner.finish_forward()
                out = self._runner.post_forward(scheduled.finished_req_ids)
        sampled = {name: self._sample(name, span) for name, span in spans.items()}
        return ModelRunnerOutput(
            req_ids=list(spans),
            req_id_to_index={name: at for at, name in enumerate(spans)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=out,
        )

    def _forward(self, spans: Sequence[Span], scheduled: Any) -> None:
        """Compute all layers, each in vLLM's hooks; what a save is to read must be right."""

        @maybe_transfer_kv_layer
        def attention(layer: Layer, layer_name: str) -> None:
            layer.compute(spans)

        for layer in self.layers:
            attention(layer, layer.name)
        self.spoiled += [span.spoiled for span in spans if span.spoiled]
        for save in scheduled.kv_connector_metadata.jobs.saves:
            for layer in self.layers:
                if layer.group_id in save.pages:
                    self._check_save(layer, save.pages[layer.group_id])

    def _check_save(self, layer: Layer, pages: Any) -> None:
        for key, block in zip(pages.keys, pages.block_ids, strict=True):
            fault = layer.block_fault(block, self.told.of_key[key])
            assert not fault, f"about to be saved: {fault}"

    def _sample(self, name: str, span: Span) -> list[int]:
        if len(span.tags) < self._num_known[name]:
            return []
        return [0 if span.spoiled else next_token(span.tags[-1])]

    def _be_current(self) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector

    def _check_null(self, jobs: Any) -> None:
        for job in (*jobs.loads, *jobs.saves):
            for pages in job.pages.values():
                assert 0 not in pages.block_ids, "the null block travels"
                assert len(set(pages.block_ids)) == len(pages.block_ids) == len(pages.keys)

    def _update_tables(self, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids | scheduled.preempted_req_ids:
            self._tables.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._num_known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            self._num_asked[new.req_id] = len(new.prompt_token_ids)
        cached = scheduled.scheduled_cached_reqs
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(group) for group in ids]
            elif ids is not None:
                for table, more in zip(self._tables[name], ids, strict=True):
                    table += more
        for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            self._num_known[name] = self._num_asked[name] + count

    def _spans(self, scheduled: Any) -> dict[str, Span]:
        cached = scheduled.scheduled_cached_reqs
        first = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        first |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        spans = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            tags = self.told.of_request[name][: first[name] + count]
            spans[name] = Span(tags, first[name], self._tables[name])
        return spans
