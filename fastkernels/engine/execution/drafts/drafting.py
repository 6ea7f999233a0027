"""Draft models: after each step of the target, they propose the tokens that may follow the sampled ones.

A first pass computes the step's tokens, and a chain of passes one token of each row. Keys are in the blocks of the
target's sequences, in caches of the draft's layers. Those of the chain belong to drafts, and the first pass of the next
step overwrites them.

EAGLE-3 reads the target's hidden states of a token, and the embedding of the next one. Other draft models read tokens
only: their first pass has one token more than the step, the one that the target has sampled.

Drafts are sampled with the parameters and the noise of the target's token in the same place. So a greedy request has
the most likely drafts, and if both models have the same logits, every draft is accepted at any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastkernels.core.dispatch import direct_calls
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec, StateSpec
from fastkernels.engine.execution.attention import AttentionBackend, make_backend
from fastkernels.engine.execution.attention.ops import OpsBackend
from fastkernels.engine.execution.drafts.draft_kernels import (
    COLUMNS,
    ROOM,
    SLOT,
    TOKENS,
    UNSURE,
    Held,
    Rows,
    accept,
    advance,
    settle,
)
from fastkernels.engine.execution.drafts.tree_kernels import accept_tree, tables_of
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.draft_tree import Level
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.sampling.sampler import Sampler
from fastkernels.engine.steps.input_batch import InputBatch, Inputs, Staging
from fastkernels.engine.steps.step import SAMPLED, NextDrafts, StepInput, Together
from fastkernels.models.common.checkpoints import checkpoint, weights
from fastkernels.models.common.configs import length
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.layers import shared_experts
from fastkernels.models.common.layers.decoder import DecoderModel, Taps
from fastkernels.models.common.plans import build
from fastkernels.overrides.sampling.sampling import sampling


@dataclass(frozen=True)
class DraftSource:
    """A draft model's folder and config, checked against its target.

    layers  of the target whose hidden states EAGLE-3 reads; (): the draft reads tokens only
    """

    folder: Path
    config: Any
    settings: Speculation
    layers: tuple[int, ...]

    @staticmethod
    def open(settings: Speculation, engine: EngineConfig, target: Any, max_model_len: int) -> DraftSource:
        """Raises CheckpointError, UnknownName, and ValueError for a draft that does not suit the target's config."""
        where = settings.model or engine.model
        folder = weights.resolve(where)
        config = build.load_config(folder)
        config.max_model_len = engine.max_model_len  # chooses the factors of LongRoPE
        name = build.architecture_of(config, folder)
        if settings.method == "mtp":
            name = _head_of(name, where)
            config.architectures = [name]
        runner, eagle = registry.find(name, config).arch.runner, settings.reads_states
        what = f"speculative_config: the draft model {where}"
        if runner != ("Draft" if eagle else "Generate"):
            other = "'draft_model'" if eagle else "'eagle3'" if runner == "Draft" else "'ngram'"
            raise ValueError(
                f"{what} is a {name}, which method {settings.method!r} does not run; use {other}"
            )
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"{what} has a vocabulary of {config.vocab_size} tokens, and {engine.model} one of"
                f" {target.vocab_size}: they must be the same"
            )
        if not eagle:
            own = length.longest(config)
            if own is None:
                config.max_model_len = max_model_len
            elif own < max_model_len and length.has_positions(config):
                raise ValueError(
                    f"{what} has a context of {own} tokens, and this engine one of {max_model_len}: set"
                    f" max_model_len to at most {own}"
                )
            return DraftSource(folder, config, settings, ())
        keys = checkpoint.keys(folder) if engine.load_format == "auto" else None
        made, described = registry.model_class(name), registry.describe(target)
        try:
            layers = made.fit(config, described.hidden, len(described.layers), max_model_len, keys)
        except ValueError as error:
            raise ValueError(f"{what} does not suit {engine.model}: {error}") from error
        return DraftSource(folder, config, settings, layers)


def _head_of(name: str, where: str) -> str:
    """The architecture of a model's head for multi-token prediction. Raises UnknownName, ValueError."""
    if (head := registry.find(name).arch.head) == "":
        others = [m for m in registry.models().values() if m.arch.head]
        known = ", ".join(own for model in others for own in model.arch.names)
        raise ValueError(
            f"speculative_config: method 'mtp' is for {known}, and {where} is a {name}; use another method"
        )
    return head


class Drafter:
    """A draft model on one rank.

    layers  its attention layers, whose keys are in blocks of the target's sequences
    shares_experts  with other data-parallel ranks
    """

    def __init__(
        self, source: DraftSource, engine: EngineConfig, target: Any, dtype: torch.dtype, device: Any
    ):
        """target: the model. Raises what build.build raises, and ValueError for models that cannot be a pair."""
        self.settings, self._source, self._engine = source.settings, source, engine
        self.eagle, self.count = bool(source.layers), source.settings.num_speculative_tokens
        self.tree = source.settings.tree
        self._device, self._dtype = torch.device(device), dtype
        self.model: Any = build.build(
            source.folder, source.config, self._device, dtype, engine.load_format, engine.seed
        )
        shares = engine.data_parallel_size > 1 and shared_experts.connect(self.model)
        self.shares_experts: bool = shares
        modules = list(self.model.modules())
        self.layers = [m for m in modules if isinstance(getattr(m, "keeps", None), KVSpec)]
        others = any(isinstance(getattr(m, "keeps", None), StateSpec) for m in modules)
        if not self.layers or others or any(m.keeps.cross for m in self.layers):
            raise ValueError(
                f"speculative_config: the draft model {self.settings.model} keeps more than the keys of its tokens,"
                " which is not supported"
            )
        pair: dict[str, Any] = {engine.model: target, str(self.settings.model or "its head"): self.model}
        for name, model in pair.items():
            if hasattr(model, "encode_source") or (model is self.model and hasattr(model, "encode")):
                raise ValueError(
                    f"speculative_config: {name} reads more than text, which is not supported"
                    f" {'for a draft model' if model is self.model else 'with a draft model'}"
                )
        self._media = hasattr(target, "encode")
        self._target: Any = getattr(target, "model", None)
        if self.eagle:
            if not isinstance(self._target, DecoderModel):
                raise ValueError(
                    f"speculative_config: method {self.settings.method!r} is not supported for"
                    f" {engine.model}, whose hidden states a draft model cannot read"
                )
            drafts: Any = self.model
            drafts.check_map()
            drafts.share(target)

    def bind(self, batch: InputBatch, sampler: Sampler, max_model_len: int) -> None:
        """Allocate buffers, after the layers have their caches."""
        config, device = self._engine, self._device
        name = None if config.attention_backend == "flashinfer" else config.attention_backend
        backend = make_backend(name, self.layers, device, self._dtype, self.tree is not None)
        if not isinstance(backend, OpsBackend) and self.settings.method != "mtp":
            raise ValueError(
                f"speculative_config: the draft model {self.settings.model} has latent attention, which is not"
                " supported"
            )
        self.backend: AttentionBackend = backend
        self._batch, self._sampler = batch, sampler
        self._axes = any(getattr(module, "mrope_section", None) for module in self.model.modules())
        self._last_position = (
            getattr(self._source.config, "max_position_embeddings", 0) - 1
        )  # EAGLE's config has it
        self.longest, rows = max_model_len, config.max_num_seqs
        self._staging = Staging(device)
        hidden = self._source.config.hidden_size
        self._out = torch.zeros(rows, hidden, dtype=self._dtype, device=device)
        self._hidden = torch.zeros(rows, hidden if self.eagle else 0, dtype=self._dtype, device=device)
        self._rows = Rows(*torch.zeros(len(Rows._fields), rows, dtype=torch.int64, device=device).unbind())
        self._rows.slot.fill_(batch.dummy)
        self._drafts = torch.zeros(rows, self.count, dtype=torch.int64, device=device)
        self._packed = torch.zeros(len(COLUMNS), rows, dtype=torch.int64, device=device)
        self._packed[TOKENS].fill_(1)  # for capture, which runs before the first step
        self._packed[SLOT].fill_(batch.dummy)
        self.held = Held.zeros(batch.dummy + 1, self.count, device)
        if self.tree is not None:
            self._children = tables_of(self.tree, self._device).children
            self.path = torch.zeros(rows, self.tree.depth, dtype=torch.int64, device=device)
            self._order = torch.arange(config.max_num_batched_tokens, device=device)
            self._inner = torch.tensor(self.tree.inner_masks, device=device)
            self._levels = [_Level(level, self._device) for level in self.tree.levels]
        if self.eagle:
            tokens = config.max_num_batched_tokens
            size = self._target.embed_tokens.embedding_dim
            self._taps = self._target.taps = Taps(self._source.layers, tokens, size, self._dtype, device)

    def unbind(self) -> None:
        """Free the buffers."""
        if self.eagle:
            self._target.taps = None
            del self._taps

    def extended(self, step: StepInput) -> StepInput:
        """The first pass of a draft that reads tokens only: each row with a token behind those of the step.

        Rows without room for it are as in the step.
        """
        more, together = self._more(step), step.together
        ends = np.cumsum(step.query_lens)
        ids = np.insert(step.input_ids, ends[more > 0], 0)
        lens, keys = step.query_lens + more, step.seq_lens + more
        if together is not None:
            together = Together(together.tokens + together.rows, together.rows, decode=False)
        return StepInput(
            step.slots, lens, keys, step.offsets, ids, 0, step.block_updates[:0], together=together
        )

    def _more(self, step: StepInput) -> np.ndarray:
        """[B] int32: tokens that the first pass has in addition to the step's."""
        if self.eagle:
            return np.zeros_like(step.query_lens)
        return (step.seq_lens < np.minimum(self._next_of(step).room, self.longest)).astype(np.int32)

    def _next_of(self, step: StepInput) -> NextDrafts:
        if step.next_drafts is not None:
            return step.next_drafts
        rows = len(step.slots)  # a step that no request is in
        return NextDrafts(
            self.count, np.full(rows, SAMPLED, np.int64), np.full(rows, self.longest, np.int32), None
        )

    def load(self, step: StepInput) -> None:
        """Copy to the device what `settle` and `accept` read of a step."""
        given, rows, size = self._next_of(step), len(step.slots), len(self._out)
        drafts = np.zeros(rows, np.int64) if step.drafts is None else step.drafts.astype(np.int64)
        lens, more = step.query_lens.astype(np.int64), self._more(step).astype(np.int64)
        columns = (
            np.cumsum(lens) - lens, lens, drafts, np.cumsum(drafts + 1) - (drafts + 1), np.maximum(step.offsets, 0),
            given.next_ids, np.full(rows, -1) if given.forced is None else given.forced,
            np.cumsum(lens + more) - (lens + more), more, step.seq_lens - lens, step.slots, given.room,
            np.zeros(rows, np.int64) if given.unsure is None else given.unsure,
        )  # fmt: skip

        def fill(buffer: np.ndarray) -> None:
            packed = buffer.reshape(len(columns), size)
            for out, column in zip(packed, columns, strict=True):
                out[:rows], out[rows:] = column, column[0]
            packed[SLOT, rows:], packed[ROOM, rows:], packed[UNSURE, rows:] = self._batch.dummy, 0, 0

        self._staging.copy(len(columns) * size, fill, self._packed.view(-1))

    def settle(self, inputs: Inputs) -> None:
        """Correct the inputs of the step that was loaded last; see draft_kernels.settle. Can be captured."""
        if self.tree is None:
            settle(inputs, self._batch, self.held, self._packed[UNSURE])

    def settle_again(self, inputs: Inputs) -> None:
        """The same for the pass over what `extended` makes of it."""
        if self.tree is None:
            settle(inputs, self._batch, self.held, None)

    def accept(self, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Find which drafts of the loaded step the target has sampled, too, for the passes that follow.

        ids: [T] of the step; tokens: what it sampled: one before the first draft of each row, and one behind each. Can
        be captured.
        """
        if self.tree is None:
            last = self._batch.last_tokens
            accept(self._packed, ids, tokens, self._rows, self.count, self.eagle, self.held, last)
            return
        order = self._order[: len(ids)]
        accept_tree(self._packed, ids, tokens, self._rows, self.path, order, self._children)

    def first(self, inputs: Inputs, metadata: AttentionMetadata) -> torch.Tensor:
        """The pass over the tokens of a step, or of what `extended` makes of it. Returns its output [rows, H].

        Can be captured: it reads what `accept` has written.
        """
        rows = len(inputs.slots)
        last, ids = self._rows.last[:rows], inputs.input_ids.clamp_min(0)
        states = self._taps.states[: len(ids)] if self.eagle else None
        if self.tree is not None and states is not None:
            order = self._order[: len(ids)]
            ids, states = ids.index_select(0, order), states.index_select(0, order)
        if self.eagle:
            ids = ids.roll(-1)
        ids = ids.scatter(0, last, self._rows.token[:rows])
        hidden = None if states is None else self.model.combine(states)
        out, hidden = self._forward(ids, self._positions(inputs), hidden, metadata)
        self._out[:rows] = out.index_select(0, last)
        if hidden is not None:
            self._hidden[:rows] = hidden.index_select(0, last)
        return self._out[:rows]

    def _positions(self, inputs: Inputs) -> torch.Tensor:
        """[T] or [3, T]: the draft's positions of a step's tokens.

        EAGLE has those of the target whose states it reads, or without axes the temporal ones, as in vLLM. Another
        draft reads text: media are as long as their placeholders.
        """
        found = inputs.positions
        if not self._media:
            return found
        if not self.eagle:
            return found - self._batch.device_shifts.index_select(0, inputs.token_slots)
        return (found if self._axes or found.dim() == 1 else found[0]).clamp(0, self._last_position)

    def _behind(self, at: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[R]: the draft's positions of tokens behind all media, with these numbers in their sequences."""
        if not self._media or not self.eagle:
            return at
        return (at + self._batch.device_shifts.index_select(0, slots)).clamp(0, self._last_position)

    def chain(self, rows: int, longest: int, most: int = 0) -> torch.Tensor:
        """The drafts of the first `rows` rows, [rows, count]. Can be captured. longest: number of keys at most.

        most: rows of the largest data-parallel rank, with padding
        """
        if self.tree is not None:
            return self._grow(rows, longest, most)
        batch, own = self._batch, Rows(*(t[:rows] for t in self._rows))
        tables = self._tables(own, longest)
        drawing = self._sampler.drawing(own.slot)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        # A copy, since the model overwrites it
        out, hidden = self._out[:rows], self._hidden[:rows].clone() if self.eagle else None
        ids = own.token
        for i in range(self.count):
            if i:
                at, lens, mappings = advance(own, i, self.longest, batch)
                same = (1, longest, rows, longest, self.backend)  # of all groups
                parts = [
                    AttentionMetadata(slots, starts, lens, table, *same, padded=False, most_tokens=most)
                    for slots, table in zip(mappings.unbind(), tables, strict=True)
                ]
                metadata = replace(parts[0], groups=tuple(parts[1:]))
                out, hidden = self._forward(ids, self._behind(at, own.slot), hidden, metadata)
            ids = sampling(self.model.compute_logits(out), *drawing, own.offset + (i + 1))
            self._drafts[:rows, i] = ids
        self.held.drafts.index_copy_(0, own.slot, self._drafts[:rows])
        return self._drafts[:rows]

    def made(self, rows: int) -> torch.Tensor:
        """[rows, count]: what `chain` has made."""
        return self._drafts[:rows]

    def _tables(self, own: Rows, longest: int) -> list[torch.Tensor]:
        """The rows' block tables of each group, for at most `longest` keys."""
        batch = self._batch
        columns = min(-(-longest // batch.block_size), batch.width)
        return [
            batch.group_table(group)[:, :columns].index_select(0, own.slot) for group in range(batch.groups)
        ]

    def _grow(self, rows: int, longest: int, most: int) -> torch.Tensor:
        """The drafts of a tree, level by level. Keys of drafts with children follow each other behind the row's own."""
        own = Rows(*(t[:rows] for t in self._rows))
        tables, drafts = self._tables(own, longest), self._drafts[:rows]
        out, hidden = self._out[:rows], self._hidden[:rows].clone()
        ids, keys = own.token, 1  # keys: of the row's last token, and of drafts so far
        for depth, level in enumerate(self._levels):
            count = level.count
            if depth:
                hidden = hidden.view(rows, -1, hidden.shape[1]).index_select(1, level.parents).flatten(0, 1)
                masks = self._inner[keys : keys + count]
                metadata = replace(
                    self._level(own, tables, keys, count, longest, masks), most_tokens=most * count
                )
                ids = drafts.index_select(1, level.nodes - 1).flatten()
                at = self._behind((own.at + depth).clamp_max(self.longest - 1), own.slot)
                made, states = self._forward(ids, at.repeat_interleave(count), hidden, metadata)
                assert states is not None
                out, hidden, keys = made, states, keys + count
            logits = self.model.compute_logits(out)
            drawing = self._sampler.drawing(own.slot.repeat_interleave(count))
            offsets = (own.offset + (depth + 1)).repeat_interleave(count)
            tokens = ids
            for rank, (places, children) in enumerate(level.ranks):
                if rank:  # the next one of those that the row may sample
                    logits = logits.scatter(1, tokens[:, None], -torch.inf)
                tokens = sampling(logits, *drawing, offsets)
                drafts.index_copy_(1, children, tokens.view(rows, count).index_select(1, places))
        return drafts

    def _level(
        self, own: Rows, tables: list[torch.Tensor], keys: int, count: int, longest: int, masks: torch.Tensor
    ) -> AttentionMetadata:  # fmt: skip
        """The metadata of a pass over `count` drafts of each row, behind `keys` keys from own.at on."""
        batch, device, rows = self._batch, self._device, len(own.at)
        places = own.at[:, None] + torch.arange(keys, keys + count, device=device)
        kept = places.clamp_max(self.longest - 1)
        column, inside = kept // batch.block_size, kept % batch.block_size
        stored = places < own.room[:, None].clamp_max(self.longest)
        starts = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=device)
        lens = (own.at + (keys + count)).clamp_max(self.longest).to(torch.int32)
        parts = []
        for table in tables:
            block = table.gather(1, column.clamp_max(table.shape[1] - 1)).long()
            slots = torch.where(stored, block * batch.block_size + inside, -1).flatten()
            parts.append(
                AttentionMetadata(
                    slots, starts, lens, table, count, longest, 0, 0, self.backend, padded=False,
                    tree=masks.repeat(rows),
                )
            )  # fmt: skip
        return replace(parts[0], groups=tuple(parts[1:]))

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        groups = tuple(replace(group, backend=self.backend) for group in metadata.groups)
        own = replace(metadata, backend=self.backend, groups=groups)
        with forward_context(own), direct_calls(self._device):
            if hidden is not None:
                return self.model(ids, positions, hidden)
            return self.model(ids, positions), None


class _Level:
    """A draft_tree.Level on the device.

    ranks  (places of nodes, columns of their drafts) for each rank among siblings
    """

    def __init__(self, level: Level, device: torch.device):
        self.count = len(level.nodes)
        self.nodes = torch.tensor(level.nodes, device=device)
        self.parents = torch.tensor(level.parents, device=device)
        most = 1 + max(rank for _, rank, _ in level.children)
        self.ranks = [
            (
                torch.tensor([place for place, r, _ in level.children if r == rank], device=device),
                torch.tensor([child - 1 for _, r, child in level.children if r == rank], device=device),
            )
            for rank in range(most)
        ]
