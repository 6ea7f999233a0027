"""The runner of language models: turns a StepInput into tokens with a KV cache, CUDA graphs and a sampler."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.core.env import Environment
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec
from fastkernels.engine.cache import kv_cache, state_cache
from fastkernels.engine.cache.state_cache import StateCache
from fastkernels.engine.execution.attention import AttentionBackend, make_backend, with_groups
from fastkernels.engine.execution.drafts.drafting import Drafter, DraftSource
from fastkernels.engine.execution.drafts.tree_kernels import Caches, Tables, tables_of
from fastkernels.engine.execution.forward.cross_states import CrossStates
from fastkernels.engine.execution.forward.graphs import Graphs, Outputs, Verify
from fastkernels.engine.execution.forward.media_features import MediaFeatures
from fastkernels.engine.execution.forward.memory_profile import activation_bytes, media_bytes
from fastkernels.engine.execution.forward.packed_weights import pack_weights
from fastkernels.engine.execution.forward.runner import Runner
from fastkernels.engine.execution.runners.warm_up import warm_up
from fastkernels.engine.options.speculation import MOST_DRAFTS, Speculation
from fastkernels.engine.sampling.draft_places import DraftPlaces
from fastkernels.engine.sampling.rows import TokenMasks
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.sampling.sampler_state import LogprobsTensors, SamplePlan
from fastkernels.engine.sampling.token_masks import to_device
from fastkernels.engine.steps.input_batch import InputBatch, Inputs, Staging
from fastkernels.engine.steps.step import (
    SAMPLED,
    PromptTargets,
    StepInput,
    StepOutput,
    Together,
    TokenLogprobs,
)
from fastkernels.engine.steps.step_kernels import begin, finish
from fastkernels.models.common.plans import build
from fastkernels.overrides.sampling.sampling import sampling

PROMPT_LOGITS = 1 << 26  # logits that prompt_logprobs computes at once


class Generate(Runner):
    """Runs a language model: tokens in, sampled tokens out. All ranks run the same launches on their own shards."""

    backend: AttentionBackend
    batch: InputBatch
    graphs: Graphs | None
    states: StateCache | None = None  # of layers that keep a state, if there are any
    features: MediaFeatures | None = None  # of media, for a model that reads them
    cross: CrossStates | None = None  # of sources, for a model with cross attention
    drafter: Drafter | None = None  # a draft model
    tree: Tables | None = None  # of drafts, if these are not in a chain
    draft_graphs: Graphs | None = None  # of its first pass, if that has other tokens than the step

    def _prepare(self, folder: Path) -> None:
        config = self.config
        self.cache_dtype = kv_cache.cache_dtype(config.kv_cache_dtype, self.dtype)
        self.max_model_len = kv_cache.wanted_model_len(config, self.hf_config)
        given = None if config.speculative_config is None else Speculation.read(config.speculative_config)
        self._draft_source = None
        if given is not None and given.has_model:
            self._draft_source = DraftSource.open(given, config, self.hf_config, self.max_model_len)

    def _loaded(self) -> None:
        config, modules = self.config, list(self.model.modules())
        paged = [m for m in modules if isinstance(getattr(m, "keeps", None), KVSpec)]
        self.layers = [m for m in paged if not m.keeps.cross]
        self.cross_layers = [m for m in paged if m.keeps.cross]
        if self._draft_source is not None:
            self.drafter = Drafter(self._draft_source, self.config, self.model, self.dtype, self.device)
            self.shares_experts |= self.drafter.shares_experts
        drafts = [] if self.drafter is None else self.drafter.layers
        self.groups = kv_cache.groups_of([*self.layers, *drafts], self.max_model_len)
        self.state_layers = state_cache.state_layers(modules)
        state_cache.set_dtypes(self.state_layers, config.mamba_ssm_cache_dtype, self.hf_config, self.dtype)
        given = self.config.speculative_config
        speculation = None if given is None else Speculation.read(given)
        if self.state_layers and speculation is not None and speculation.tree is not None:
            raise ValueError(
                f"speculative_config: speculative_token_tree is not supported for {self.config.model}, whose layers"
                " keep a recurrent state; leave it out, and drafts are in a chain"
            )
        # States of a sequence: with drafts, one more, to go back to
        self.copies = 1 if speculation is None else 2
        self.slot_bytes = state_cache.state_bytes(self.state_layers, self.dtype)  # of one sequence
        self.border: int = getattr(self.model, "border", 0)
        if self.device.type == "cpu":
            pack_weights(self.model)
            if self.drafter is not None:
                pack_weights(self.drafter.model)
        self._events = [torch.cuda.Event() if self.device.type == "cuda" else None for _ in range(2)]
        if hasattr(self.model, "encode"):
            self.features = MediaFeatures(self.model, self.device)
        self.sampler = Sampler(self.device, self.hf_config.vocab_size, self.config.max_num_seqs)

    def choose_kernels(self) -> None:
        """See Runner. Shapes of a tuned table, or of an earlier start, are not measured again."""
        if self.device.type != "cuda" and not Environment.read().verify:
            return
        for entry in entry_points(group="fastkernels.hosts", name="fastkernels"):
            entry.load().choose_kernels(self)
        self._mark("choice of kernels")

    def num_fitting_blocks(self) -> int:
        """See Runner. On CUDA, run the largest step to measure its memory.

        Without paged layers, the result is a number of snapshots. Raises ValueError for too few blocks, or for too
        little memory for the states of max_num_seqs sequences.
        """
        config = self.config
        if self.device.type == "cpu" and (free := build.free_bytes(self.device)) is not None:
            self._running_bytes(free)
        if config.num_blocks is not None:
            return config.num_blocks if self.groups else self._fitting(kv_cache.CPU_CACHE)
        if config.kv_cache_memory is not None:
            return self._fitting(config.kv_cache_memory - self._running_bytes(config.kv_cache_memory))
        if self.device.type == "cpu":
            return self._fitting(kv_cache.CPU_CACHE)
        budget = kv_cache.cuda_budget(config)
        self._running_bytes(budget - torch.cuda.memory_allocated())
        self._bind(2 if self.groups else 0, min(self.max_model_len, config.max_num_batched_tokens))
        weights, activations = activation_bytes(self)  # the weights with the slots of running sequences
        if self.features is not None:
            peak, kept = media_bytes(self.features, config.max_num_batched_tokens, self._num_features())
            activations = max(activations, peak) + kept
        self._mark("largest step")
        del self.backend  # and its workspaces
        self._unbind()
        budget = kv_cache.cuda_budget(config)
        own = (self.copies * config.max_num_seqs + 1) * self.slot_bytes
        self._running_bytes(budget - activations - (weights - own))
        blocks = self._fitting(budget - weights - activations)
        if not self.groups:
            return blocks
        least = -(-(config.max_model_len or 1) // config.block_size) + 1
        if blocks < least:
            length = config.max_model_len or config.block_size
            counts = kv_cache.group_blocks(self.groups, least, config)
            sizes = (self.block_bytes(g.layers) * n for g, n in zip(self.groups, counts, strict=True))
            raise kv_cache.too_large(weights, activations, sum(sizes), length, budget, config)
        return blocks

    def bind(self, num_blocks: int) -> None:
        """Allocate the KV cache, capture graphs, and warm up. Raises ValueError for too few blocks."""
        limits = kv_cache.limits(self.config, self.max_model_len, num_blocks, self.groups)
        self.limits = replace(limits, snapshots=self._num_snapshots(num_blocks), media=self._num_features())
        self.limits = replace(self.limits, border=self.border)
        if self.cross_layers:
            self.limits = replace(
                self.limits, cross=(self._cross_blocks(num_blocks), self.model.source_length)
            )
        self._bind(num_blocks, self.limits.max_model_len)
        self._mark("KV cache")
        self.capture()
        self._mark("graphs")
        if self.device.type == "cuda":
            warm_up(self)
            self._mark("warm-up")

    def capture(self) -> None:
        """See Runner. Does nothing on the CPU."""
        if self.device.type != "cuda" or self.config.enforce_eager:
            return
        old, self.graphs = (
            self.graphs,
            None,
        )  # the old graphs' memory must outlive the capture of the new ones
        sizes = self.config.max_num_seqs, self.limits.max_model_len, self.config.max_num_batched_tokens
        self.graphs = Graphs(
            self._captured, self.backend, self.batch, self.device, *sizes, self.drafter, verify=self.verify
        )
        if self.drafter is not None and not self.drafter.eagle:
            self.draft_graphs = Graphs(
                self._draft_captured, self.drafter.backend, self.batch, self.device, *sizes, decode=False
            )
        del old

    @property
    def verify(self) -> Verify | None:
        """The function that graphs of steps with drafts capture. None: there are no drafts, or they are in trees."""
        given = self.config.speculative_config
        settings = None if given is None else Speculation.read(given)
        if settings is None or settings.tree is not None:
            return None
        return Verify(settings.num_speculative_tokens, self._verified)

    @property
    def serial_drafts(self) -> str | None:
        """The reason why a step with drafts waits for the one before; None: two of them can be in flight."""
        if not self._holds_drafts or self.drafter is None:
            return "the host makes these drafts, or reads the tree that they are in"
        if self.state_layers:
            return "the layers of this model keep a recurrent state"
        backends = self.backend, self.drafter.backend
        names = [backend.name for backend in backends if backend.reads_lengths]
        return f"attention {names[0]!r} reads the lengths of sequences on the host" if names else None

    @torch.inference_mode()
    def launch(self, step: StepInput) -> GenerateStep | MaskedStep:
        """Start a step without waiting for the device. At most two steps may be in flight."""
        if step.new_rows:
            self.sampler.set_rows(step.new_rows)
            if self.features is not None:
                self.batch.set_shifts(step.new_rows)
        if step.drafts is None and self._verifies_together(step):
            step = replace(step, drafts=np.zeros(len(step.slots), np.int32))
        slots, offsets = self.batch.sample_slots(step), np.maximum(step.offsets, 0)
        places = None if step.drafts is None else _each_draft(step.drafts)
        if places is not None:
            slots, offsets = slots[places[0]], offsets[places[0]] + self._depths[places[1]]
        if self.drafter is not None and step.next_drafts is not None and step.next_drafts.unsure is not None:
            offsets = np.maximum(offsets - self.drafter.count, 0)  # at least so many tokens are generated
        plan = self.sampler.plan(slots, offsets, step.masked)
        self.batch.update(step.block_updates)
        if step.sources is not None and self.cross is not None:
            self.cross.update(step.sources)
        if self.states is not None:
            self.states.copy(step.state_loads)
        if self.border:
            self._pass_borders(step)
        if self.drafter is not None:
            self.drafter.load(step)
        whole = self._verify_in_graph(step, plan)
        if whole is not None:
            if self.states is not None:
                self.states.copy(step.state_saves)
            return whole
        inputs, outputs, metadata = self._run(step)
        if self.states is not None:
            self.states.copy(step.state_saves)
        rows = inputs.num_rows
        hidden, logits, drawn = outputs
        if places is not None:
            verify = self._verify(hidden, step, plan, inputs, slots, places)

            @torch.inference_mode()
            def choose(masks: TokenMasks | None) -> GenerateStep:
                made, tokens = verify(masks)
                return self._propose(made, step, inputs, metadata, tokens)

            return MaskedStep(choose) if step.masked else choose(None)
        if logits is None:
            last = hidden[:rows] if inputs.decode_only else hidden.index_select(0, inputs.last_index[:rows])
            logits = self.model.compute_logits(last)
        drawn = drawn[:rows] if drawn is not None and plan.from_raw else None
        prompt = {t.row: self._prompt_logprobs(hidden, step, t) for t in step.prompt_targets}

        @torch.inference_mode()
        def sample(masks: TokenMasks | None) -> GenerateStep:
            tokens, logprobs = self.sampler(
                logits[:rows], inputs.sample_slots[:rows], inputs.offsets[:rows], plan, drawn,
                None if masks is None else to_device(masks, self.device),
            )  # fmt: skip
            if drawn is None:
                self.batch.keep(tokens, inputs)
            made = GenerateStep(
                self.batch.sampled[inputs.host_turn, :rows], logprobs, prompt, self._events[inputs.host_turn]
            )
            return self._propose(made, step, inputs, metadata, tokens)

        return MaskedStep(sample) if step.masked else sample(None)

    def _pass_borders(self, step: StepInput) -> None:
        """Let the model change the states of sequences that continue behind a border; see models.Decoder.at_border."""
        starts = step.seq_lens - step.query_lens
        first = np.cumsum(step.query_lens) - step.query_lens
        for row in np.flatnonzero((starts > 0) & (starts % self.border == 0)).tolist():
            slot, known = int(step.slots[row]), int(step.input_ids[first[row]])
            self.at_border(slot, int(starts[row]), known)

    @torch.inference_mode()
    def run_border(self) -> None:
        """Change the state of the first slot at the first border and the last one, without a sequence there."""
        longest = self.batch.width * self.config.block_size
        for end in sorted({self.border, longest // self.border * self.border}) if self.border else ():
            if 0 < end <= longest:
                self.at_border(0, end, 0)

    def at_border(self, slot: int, end: int, next_id: int) -> None:
        """Change the state of the sequence in `slot`, which has `end` tokens. next_id may be SAMPLED."""
        if next_id == SAMPLED:
            following = self.batch.last_tokens[slot : slot + 1]
        else:
            following = torch.full((1,), next_id, dtype=torch.int64, device=self.device)
        tables = [self.batch.group_table(i)[slot] for i in range(self.batch.groups)]
        with direct_calls(self.device):
            self.model.at_border(slot + 1, end, following, tables)

    def _verify(
        self, hidden: torch.Tensor, step: StepInput, plan: SamplePlan, inputs: Inputs, slots: np.ndarray,
        places: tuple[np.ndarray, np.ndarray],
    ) -> Callable[[TokenMasks | None], tuple[GenerateStep, torch.Tensor]]:  # fmt: skip
        """A function that samples after each draft, and before the first one of each row.

        It returns the tokens on the device, too. places: (row, number within its row) of each.
        """
        assert step.drafts is not None
        of, inside = places
        at = (np.cumsum(step.query_lens) - step.drafts - 1)[of] + inside
        parents = np.arange(len(at)) - inside + self._parents[inside]
        numbers = (at, slots, of, self._depths[inside], parents)

        def fill(buffer: np.ndarray) -> None:
            for out, values in zip(buffer.reshape(len(numbers), -1), numbers, strict=True):
                out[:] = values

        packed = self._verify_staging.copy(len(numbers) * len(at), fill)
        rows, own_slots, rows_of, depths, before = packed.view(len(numbers), -1).unbind()
        own_offsets = inputs.offsets.index_select(0, rows_of) + depths
        logits = self.model.compute_logits(hidden.index_select(0, rows))
        drafted = None
        if plan.any_penalties:
            deepest = int(self._depths[inside].max())
            drafted = DraftPlaces(inputs.input_ids.index_select(0, rows).clamp_min(0), before, deepest)
        ids = inputs.input_ids[: len(step.input_ids)] if self._holds_drafts else None
        event = self._events[inputs.host_turn]
        prompt = {t.row: self._prompt_logprobs(hidden, step, t) for t in step.prompt_targets}

        def sample(masks: TokenMasks | None) -> tuple[GenerateStep, torch.Tensor]:
            banned = None if masks is None else to_device(masks, self.device)
            tokens, logprobs = self.sampler(logits, own_slots, own_offsets, plan, None, banned, drafted)
            return GenerateStep(_to_host(tokens), logprobs, prompt, event, ids), tokens

        return sample

    def _verify_in_graph(self, step: StepInput, plan: SamplePlan) -> GenerateStep | None:
        """Run a step with drafts as one graph with its sampling, and with EAGLE, the next drafts; None if none fits."""
        graphs, nexts = self.graphs, step.next_drafts
        if graphs is None or step.drafts is None or not plan.from_raw or plan.num_logprobs >= 0:
            return None
        if step.together is not None and not step.together.verify:
            return None
        decodes = bool((step.query_lens == step.drafts + 1).all()) and int(step.offsets.min()) >= 0
        if not decodes or len(step.prompt_targets) or step.media is not None:
            return None
        if (found := graphs.run_verify(step)) is None:
            return None
        inputs, outputs = found
        assert outputs.tokens is not None
        count, rows = len(step.input_ids), len(step.slots)
        tokens, drafter = outputs.tokens[:count], self.drafter
        ids = inputs.input_ids[:count] if self._holds_drafts else None
        made = GenerateStep(_copied(tokens), None, {}, self._events[inputs.host_turn], ids)
        if drafter is None:
            return made
        if not drafter.eagle:
            return self._propose(made, step, inputs, None, tokens)
        if nexts is None or (nexts.count and nexts.shown):
            made.add_drafts(drafter.made(rows))
        return made

    def _verifies_together(self, step: StepInput) -> bool:
        """Whether other data-parallel ranks verify drafts in a graph in this step, which is for this rank, too."""
        together = step.together
        if self.graphs is None or together is None or not together.verify:
            return False
        return self.graphs.verify_rows(together.rows) is not None

    def _verified(self, inputs: Inputs, metadata: AttentionMetadata, tables: torch.Tensor) -> Outputs:
        """The function that a graph of a step captures in which each row has drafts, or one token.

        With EAGLE it goes on to the drafts of the next step. A draft model that reads tokens only has one token more in
        its first pass.
        """
        drafter = self.drafter
        if drafter is not None:
            drafter.settle(inputs)
        ids, _ = begin(inputs, tables, self.batch, self.sampler)
        hidden = self._forward(ids, inputs, metadata, tree=False)
        logits = self.model.compute_logits(hidden)
        # Each token's place in its row
        starts, at = inputs.cu_seqlens_q, torch.arange(len(ids), device=self.device)
        row = torch.searchsorted(starts[1:], at, right=True).clamp_max_(len(inputs.slots) - 1)
        offsets = inputs.offsets.index_select(0, row) + at - starts.index_select(0, row)
        tokens = sampling(logits, *self.sampler.drawing(inputs.token_slots), offsets)
        if drafter is not None and drafter.eagle:
            drafter.accept(inputs.input_ids, tokens)
            drafter.first(inputs, metadata)
            drafter.chain(len(inputs.slots), self.limits.max_model_len)
        return Outputs(hidden, None, tokens)

    def _propose(
        self, made: GenerateStep, step: StepInput, inputs: Inputs, metadata: AttentionMetadata | None,
        tokens: torch.Tensor,
    ) -> GenerateStep:  # fmt: skip
        """Let the draft model propose the next step's drafts. metadata: None: the step ran as a graph."""
        drafter = self.drafter
        if drafter is None:
            return made
        wanted = step.next_drafts is None or step.next_drafts.count > 0
        rows, together = len(step.slots), step.together if drafter.shares_experts else None
        drafter.accept(inputs.input_ids, tokens)
        if self.tree is not None and step.drafts is not None:
            self._keep_paths(step, inputs)
        if not drafter.eagle:
            self._draft_first(drafter.extended(step))
        elif metadata is not None:
            drafter.first(inputs, metadata)
        else:
            assert self.graphs is not None
            self.graphs.run_first()
        if wanted if together is None else together.proposes:
            longest = min(int(step.seq_lens.max()) + drafter.count + 1, drafter.longest)
            most = 0 if together is None else self._chain_rows(step, together)
            drafts = None if self.graphs is None else self.graphs.run_chain(rows, most)
            drafts = drafter.chain(rows, longest, most) if drafts is None else drafts
            if wanted and (step.next_drafts is None or step.next_drafts.shown):
                made.add_drafts(drafts)
        return made

    def _chain_rows(self, step: StepInput, together: Together) -> int:
        """Rows of each data-parallel rank in the chain of a draft model, with padding."""
        assert self.drafter is not None
        if self.graphs is None:
            return together.rows
        if self.drafter.eagle and self._verifies_together(step):  # the graph goes on to the chain
            return self.graphs.verify_rows(together.rows) or together.rows
        return self.graphs.chain_rows(together.rows) or together.rows

    def _keep_paths(self, step: StepInput, inputs: Inputs) -> None:
        """Move the keys of accepted drafts to the places of their tokens."""
        assert self.drafter is not None and step.drafts is not None
        ends = np.cumsum(step.query_lens, dtype=np.int64)
        roots = torch.from_numpy(ends - step.drafts - 1)
        if self.device.type == "cuda":
            roots = roots.pin_memory().to(self.device, non_blocking=True)
        for group, caches in self._caches.items():
            slots = (inputs.slot_mapping, *inputs.more_slot_mappings)[group]
            caches.keep(slots, roots, self.drafter.path[: len(roots)])

    def _caches_by_group(self) -> dict[int, Caches]:
        return {
            group: Caches(
                [cache for layer in self.layers if layer.kv_group == group for cache in layer.kv_cache]
            )
            for group in sorted({layer.kv_group for layer in self.layers})
        }

    def _draft_first(self, step: StepInput) -> None:
        """The first pass of a draft model that reads tokens only."""
        assert self.drafter is not None
        if self.draft_graphs is not None and self.draft_graphs.run(step) is not None:
            return
        inputs = self.batch.load(step, unread=True)
        self.drafter.settle_again(inputs)
        tables = self.batch.rows_tables(inputs)
        metadata = with_groups(self.drafter.backend.plan(inputs, tables[0]), inputs, tables)
        metadata = _with_padding(metadata, step, self.draft_graphs)
        self.drafter.first(inputs, metadata)

    def _draft_captured(self, inputs: Inputs, metadata: AttentionMetadata, tables: torch.Tensor) -> Outputs:
        """The function that a graph of that pass captures."""
        assert self.drafter is not None
        self.drafter.settle_again(inputs)
        begin(inputs, tables, self.batch, self.sampler)
        return Outputs(self.drafter.first(inputs, metadata))

    def _run(self, step: StepInput) -> tuple[Inputs, Outputs, AttentionMetadata | None]:
        """Run the step, as a CUDA graph where one fits. A graph of a decode batch also samples.

        Returns the metadata of a step that runs without a graph.
        """
        media, features = step.media, self.features
        found = self.graphs.run(step) if self.graphs is not None and media is None else None
        if found is not None:
            return *found, None
        inputs = self.batch.load(step)
        if self.drafter is not None:
            self.drafter.settle(inputs)
        tables = self.batch.rows_tables(inputs)
        metadata = with_groups(self.backend.plan(inputs, tables[0]), inputs, tables)
        more: dict[str, Any] = {}
        if media is not None and features is not None:
            more["media"] = features.prepare(media)
            if len(media.rows):
                inputs = replace(inputs, positions=features.positions(media, inputs.positions))
        if media is None and self._only_last(step, inputs):
            more["rows"] = inputs.last_index[: inputs.num_rows]
        tree = step.drafts is not None
        metadata = _with_padding(metadata, step, self.graphs)
        hidden = self._forward(self.batch.known_ids(inputs), inputs, metadata, tree, **more)
        logits = self.model.compute_logits(hidden) if "rows" in more else None
        return inputs, Outputs(hidden, logits), metadata

    def _only_last(self, step: StepInput, inputs: Inputs) -> bool:
        """Whether nothing but the logits of each row's last token is needed, and the model can leave out the others."""
        more = step.drafts is not None or self.drafter is not None or bool(step.prompt_targets)
        return not more and not inputs.decode_only and getattr(self.model, "selects_rows", False)

    def _captured(self, inputs: Inputs, metadata: AttentionMetadata, tables: torch.Tensor) -> Outputs:
        """The function that a graph captures.

        For a decode batch it includes sampling from the raw logits, which is right for most requests; `launch` samples
        again for the others. For a mixed batch it ends at the hidden states: few rows are at the end of their prompt,
        and the LM head would run for all of them.
        """
        if self.drafter is not None:
            self.drafter.settle(inputs)
        ids, drawing = begin(inputs, tables, self.batch, self.sampler)
        hidden = self._forward(ids, inputs, metadata, tree=not inputs.decode_only)
        if not inputs.decode_only:
            return Outputs(hidden)
        logits = self.model.compute_logits(hidden)
        tokens = sampling(logits, *drawing, inputs.offsets)
        finish(tokens, inputs, self.batch)
        return Outputs(hidden, logits, tokens)

    def _forward(
        self, ids: torch.Tensor, inputs: Inputs, metadata: AttentionMetadata, tree: bool, **media: Any
    ) -> torch.Tensor:
        """Hidden states [T, H], or those of `rows`. tree: there may be drafts; media: more arguments of the model's."""
        positions, nodes = inputs.positions, inputs.nodes
        if tree and self.tree is not None and nodes is not None:
            masks = self.tree.masks.index_select(0, nodes)
            positions = positions - self.tree.back.index_select(0, nodes)
            groups = tuple(replace(group, tree=masks) for group in metadata.groups)
            metadata = replace(metadata, tree=masks, groups=groups)
        if self.states is not None:
            metadata = replace(metadata, state_slots=inputs.state_slots, fresh=inputs.fresh)
        if self.cross is not None:
            metadata = replace(metadata, cross=self.cross.metadata(inputs.token_slots))
        with forward_context(metadata), direct_calls(self.device):
            return self.model(ids, positions, **media)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: StepInput, wanted: PromptTargets
    ) -> list[LogprobsTensors]:
        """Computed in slices, so that a long prompt needs bounded memory."""
        start = int(step.query_lens[: wanted.row].sum())
        n, size = len(wanted.targets), max(1, PROMPT_LOGITS // self.hf_config.vocab_size)
        targets = torch.from_numpy(np.ascontiguousarray(wanted.targets, dtype=np.int64))
        if self.device.type == "cuda":
            targets = targets.pin_memory().to(self.device, non_blocking=True)
        return [
            self.sampler.prompt_logprobs(
                self.model.compute_logits(hidden[start + i : start + min(i + size, n)]),
                targets[i : i + size],
                wanted.num_logprobs,
            )
            for i in range(0, n, size)
        ]

    def block_bytes(self, layers: Sequence[Any] | None = None) -> int:
        """Bytes of one block: keys and values of these layers, by default of all."""
        return kv_cache.block_bytes(layers or self.layers, self.config.block_size, self.cache_dtype)

    def _fitting(self, num_bytes: int) -> int:
        """The number of blocks, or without paged layers of snapshots, for num_bytes."""
        if not self.groups:
            return state_cache.num_snapshots(self.config, self.slot_bytes, num_bytes)
        if self.state_layers:
            num_bytes = num_bytes * state_cache.SHARE // (state_cache.SHARE + 1)
        if self.cross_layers:
            own, cross = self.block_bytes(), self.block_bytes(self.cross_layers)
            most = num_bytes // own
            return (
                bisect.bisect_right(
                    range(2, most + 1), num_bytes, key=lambda n: n * own + self._cross_blocks(n) * cross
                )
                + 1
            )
        return kv_cache.fitting_blocks(self.groups, num_bytes, self.config, self.cache_dtype)

    def _running_bytes(self, num_bytes: int) -> int:
        """Bytes of the states of running sequences. Raises ValueError if num_bytes do not hold them."""
        if not self.state_layers:
            return 0
        state_cache.check_room(self.config, self.copies * self.slot_bytes, num_bytes)
        return (self.copies * self.config.max_num_seqs + 1) * self.slot_bytes

    def _num_snapshots(self, num_blocks: int) -> int | None:
        """Snapshots next to num_blocks blocks: the same number on all ranks. None: no layer keeps a state."""
        if not self.state_layers:
            return None
        if not self.groups:
            return num_blocks
        counts = kv_cache.group_blocks(self.groups, num_blocks, self.config)
        paged = sum(n * self.block_bytes(g.layers) for g, n in zip(self.groups, counts, strict=True))
        return state_cache.num_snapshots(self.config, self.slot_bytes, paged // state_cache.SHARE)

    def _cross_blocks(self, num_blocks: int) -> int:
        """Blocks of sources next to num_blocks blocks, block 0 included: for as many sequences, from one to all."""
        size = self.config.block_size
        own, each = -(-self.max_model_len // size), -(-self.model.source_length // size)
        return 1 + each * max(1, min(self.config.max_num_seqs, (num_blocks - 1) // own))

    def _num_features(self) -> int:
        """Features of media to keep: those of the longest prompt, or of all media that a step encodes."""
        if self.features is None:
            return 0
        return max(self.max_model_len, self.config.max_num_batched_tokens)

    def _bind(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache of num_blocks blocks, and the states that `limits` has."""
        config = self.config
        counts = kv_cache.group_blocks(self.groups, num_blocks, config)
        kv_cache.bind(self.groups, counts, config.block_size, self.cache_dtype, self.device)
        if self.state_layers:
            snapshots = getattr(self, "limits", None)
            slots = (
                1 + self.copies * config.max_num_seqs + (0 if snapshots is None else snapshots.snapshots or 0)
            )
            self.states = None  # frees the old one first
            self.states = StateCache(self.state_layers, slots, self.dtype, self.device)
        if self.cross_layers:
            kv_cache.unbind(self.cross_layers)
            for layer in self.cross_layers:
                count = self._cross_blocks(num_blocks)
                layer.kv_cache = layer.new_cache(count, config.block_size, self.cache_dtype, self.device)
            self.cross = CrossStates(self.model, config.max_num_seqs, config.block_size, self.device)
        # Without paged layers, one table stays zero.
        groups = max(1, len(self.groups))
        given = None if config.speculative_config is None else Speculation.read(config.speculative_config)
        tree = None if given is None else given.tree
        self._depths = np.arange(MOST_DRAFTS + 1) if tree is None else np.array(tree.depths)
        # Of a sequence's places to sample at, the one before each
        self._parents = np.maximum(self._depths - 1, 0) if tree is None else np.array(tree.parents)
        self._holds_drafts = given is not None and given.holds_drafts
        self._verify_staging = Staging(self.device)
        self.batch = InputBatch(
            self.device, config.max_num_seqs, max_model_len, config.block_size, groups, tree is not None
        )
        self.backend = make_backend(
            config.attention_backend, self.layers, self.device, self.dtype, tree is not None
        )
        if tree is not None:
            self.tree, self._caches = tables_of(tree, self.device), self._caches_by_group()
        if self.drafter is not None:
            self.drafter.bind(self.batch, self.sampler, max_model_len)

    def _unbind(self) -> None:
        drafts = [] if self.drafter is None else self.drafter.layers
        kv_cache.unbind([*self.layers, *self.cross_layers, *drafts])
        if self.drafter is not None:
            self.drafter.unbind()
        for layer in self.state_layers:
            layer.states = None
        self.states = None


def _with_padding(metadata: AttentionMetadata, step: StepInput, graphs: Graphs | None) -> AttentionMetadata:
    """The metadata of a step without a graph, which other data-parallel ranks may run as a graph."""
    if step.together is None:
        return metadata
    most = step.together.tokens if graphs is None else graphs.padded(step.together)
    return replace(metadata, most_tokens=most)


def _each_draft(drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, number within its row) of each token that rows with these drafts [B] sample."""
    counts = drafts.astype(np.int64) + 1
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - (counts.cumsum() - counts)[rows]


class GenerateStep:
    """A launched step (step.Pending), whose results are being copied to pinned memory.

    The step after the next one reuses `tokens` and `event`.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs: LogprobsTensors | None,
        prompt: Mapping[int, list[LogprobsTensors]],
        event: torch.cuda.Event | None,
        input_ids: torch.Tensor | None = None,
    ):
        self._tokens, self._event = tokens, event
        self._input_ids = None if input_ids is None else _copied(input_ids)
        self._logprobs = None if logprobs is None else _parts_to_host(logprobs)
        self._prompt = {row: [_parts_to_host(p) for p in parts] for row, parts in prompt.items()}
        self._drafts: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        if event is not None:
            event.record()

    def add_drafts(self, drafts: torch.Tensor) -> None:
        """Start copying the next step's drafts [B, count]. `result` does not wait for them."""
        copied = _copied(drafts)
        event = torch.cuda.Event() if drafts.is_cuda else None
        if event is not None:
            event.record()
        self._drafts = copied, event

    def _next_drafts(self) -> np.ndarray:
        assert self._drafts is not None
        drafts, event = self._drafts
        if event is not None:
            event.synchronize()
        return drafts.numpy()

    def result(self) -> StepOutput:
        """Wait for this step only, not for later launches."""
        if self._event is not None:
            self._event.synchronize()
        prompt = {}
        for row, parts in self._prompt.items():
            joined = (np.concatenate([p[i].numpy() for p in parts]) for i in range(3))
            prompt[row] = TokenLogprobs(*joined)
        logprobs = None if self._logprobs is None else TokenLogprobs(*(t.numpy() for t in self._logprobs))
        drafts = None if self._drafts is None else self._next_drafts
        ids = None if self._input_ids is None else self._input_ids.numpy()
        return StepOutput(self._tokens.numpy().copy(), logprobs, prompt, drafts, ids)


class MaskedStep:
    """A launched step (step.Pending) whose model runs while the host fills the masks for its sampling."""

    def __init__(self, sample: Callable[[TokenMasks], GenerateStep]):
        self._sample = sample
        self._step: GenerateStep | None = None

    def sample(self, masks: TokenMasks) -> None:
        """Sample with these masks. Called once, before the next launch, which may overwrite the logits."""
        self._step = self._sample(masks)

    def result(self) -> StepOutput:
        assert self._step is not None, "sample() comes first"
        return self._step.result()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, of a tensor that the next steps overwrite."""
    return _to_host(tensor) if tensor.is_cuda else tensor.clone()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _parts_to_host(parts: LogprobsTensors) -> tuple[torch.Tensor, ...]:
    return tuple(_to_host(t) for t in (parts.token_ids, parts.logprobs, parts.ranks))
