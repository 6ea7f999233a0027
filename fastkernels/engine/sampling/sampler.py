"""Samples next tokens, each row with its own request's parameters, without host-device synchronization.

The parameters of a request stay on the device in its slot while it runs. `set_rows` fills a slot; a step needs only
the slots of its rows and the number of tokens that each has generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastkernels.engine.sampling.draft_places import DraftPlaces
from fastkernels.engine.sampling.repetition import AGAIN, RING
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampler_state import LogprobsTensors, SamplePlan, SlotFlags
from fastkernels.engine.sampling.token_masks import DeviceMasks, apply_masks
from fastkernels.overrides.sampling.sampling import sampling

# Rows of Sampler.floats and Sampler.ints.
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION = range(6)
TOP_K, SEED, MIN_TOKENS, FIRST_TIME, RULE = range(5)
PROMPT_ROWS = 256  # positions with float32 logits at a time: 131 MB for a vocabulary of 128256


class Drawing(NamedTuple):
    """The rows' sampling parameters [B] for the op `sampling`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor


class Sampler:
    """Samples batches of up to max_num_seqs rows. Slot max_num_seqs is a greedy dummy for padding.

    floats [6, slots], ints [5, slots]  one parameter per row
    bias_ids, bias_values [slots, n]    logit_bias, padded with (0, 0.0)
    end_ids [slots, n]                  tokens banned before min_tokens, padded with -1
    prompt_mask, output_counts [slots, vocab_size]  tokens of the prompt (bool) and of the output (int32), allocated
                                        for the first request with a penalty
    recent [slots, RING]                the last tokens of rows with repetition-aware sampling, in a ring; -1: none
    """

    def __init__(self, device: torch.device | str, vocab_size: int, max_num_seqs: int):
        self.device, self.vocab_size = torch.device(device), vocab_size
        self.num_slots = max_num_seqs + 1
        self.flags = SlotFlags(self.num_slots, vocab_size)
        neutral = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
        self.floats = neutral[:, None].repeat(1, self.num_slots).to(self.device)
        self.ints = torch.zeros(5, self.num_slots, dtype=torch.int64, device=self.device)
        self.bias_ids = torch.zeros(self.num_slots, 0, dtype=torch.int64, device=self.device)
        self.bias_values = torch.zeros(self.num_slots, 0, device=self.device)
        self.end_ids = torch.full((self.num_slots, 0), -1, dtype=torch.int64, device=self.device)
        self.recent = torch.full((self.num_slots, 0), -1, dtype=torch.int64, device=self.device)
        self.prompt_mask: torch.Tensor | None = None
        self.output_counts: torch.Tensor | None = None

    def plan(self, slots: np.ndarray, offsets: np.ndarray, masked: bool = False) -> SamplePlan:
        """The plan of a batch with these slots [B] and offsets [B], for the call with the same values.

        masked: the call gets masks.
        """
        return self.flags.plan(slots, offsets, masked)

    def set_rows(self, rows: Sequence[NewRow]) -> None:
        """Fill slots with new requests, replacing their old contents."""
        if not rows:
            return
        for row in rows:
            if not 0 <= row.slot < self.num_slots - 1:
                raise ValueError(f"slot {row.slot} is not in 0 .. {self.num_slots - 2}")
            self.flags.set(row)
        params = [r.params for r in rows]
        slots = self._tensor([r.slot for r in rows], torch.int64)
        floats = [
            [p.temperature, p.top_p, p.min_p, p.presence_penalty, p.frequency_penalty, p.repetition_penalty]
            for p in params
        ]
        top_k = [min(p.top_k, self.vocab_size) if p.top_k > 0 else 0 for p in params]
        times = [0 if p.timestamps is None else p.timestamps.first for p in params]
        rules = self.flags.rule[[r.slot for r in rows]].tolist()
        ints = [
            [k, r.seed, r.params.min_tokens, t, i]
            for k, r, t, i in zip(top_k, rows, times, rules, strict=True)
        ]
        self.floats.index_copy_(1, slots, self._tensor(floats, torch.float32).T)
        self.ints.index_copy_(1, slots, self._tensor(ints, torch.int64).T)
        # Token ids outside the vocabulary cannot be sampled; as an index they would crash the process.
        biases = [{t: b for t, b in (p.logit_bias or {}).items() if t < self.vocab_size} for p in params]
        self.bias_ids = self._fill(self.bias_ids, slots, [list(b) for b in biases], 0)
        self.bias_values = self._fill(self.bias_values, slots, [list(b.values()) for b in biases], 0.0)
        ends = [
            sorted(t for t in r.end_token_ids if t < self.vocab_size) if r.params.min_tokens else []
            for r in rows
        ]
        self.end_ids = self._fill(self.end_ids, slots, ends, -1)
        for row in rows:
            if row.params.needs_penalties:
                self._count(row)
        if any(i >= 0 for i in rules):
            self._remember(rows)

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        plan: SamplePlan,
        drawn: torch.Tensor | None = None,
        masks: DeviceMasks | None = None,
        places: DraftPlaces | None = None,
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """Sample one token a row, and count it for the penalties.

        logits   [B, vocab_size], not changed
        slots    [B] int64 on the device; the token of a row with the dummy slot is arbitrary
        offsets  [B] int64 on the device: tokens that the request has generated before this one
        plan     self.plan of the same slots and offsets
        drawn    [B] int64: the result of `sampling` for these logits and drawing(slots), if known; only with
                 plan.from_raw
        masks    the tokens that some rows may sample
        places   of the rows, if some sample behind drafts; needed for penalties only

        Returns token ids [B] int64 and the log-probabilities of the plan, both on the device.
        """
        raw = logits
        if not plan.from_raw:
            logits = logits.to(torch.float32, copy=True)
        if masks is not None:
            apply_masks(logits, masks)
        if plan.any_min_tokens:
            self._ban_ends(logits, slots, offsets)
        if plan.any_bias:
            logits.scatter_add_(
                1, self.bias_ids.index_select(0, slots), self.bias_values.index_select(0, slots)
            )
        if plan.any_penalties:
            self._penalize(logits, slots, places)
        if plan.first_time:
            self._prefer_times(logits, slots, plan.first_time)
        if plan.repetition:
            ids = self._draw_aware(logits, slots, offsets, plan)
        else:
            ids = sampling(logits, *self.drawing(slots), offsets) if drawn is None else drawn
        if plan.any_penalties and self.output_counts is not None:
            taken = torch.ones_like(ids, dtype=torch.int32) if places is None else places.taken(ids).int()
            self.output_counts.view(-1).scatter_add_(0, slots * self.vocab_size + ids, taken)
        if plan.num_logprobs < 0:
            return ids, None
        return ids, gather_logprobs(raw, ids, plan.num_logprobs)

    def _draw_aware(
        self, logits: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor, plan: SamplePlan
    ) -> torch.Tensor:
        """Draw ids [B] from logits [B, V] float32 in rows of which some have rules, and keep them in `recent`."""
        numbers, drawing = self.ints[RULE].index_select(0, slots), self.drawing(slots)
        again = drawing._replace(seeds=drawing.seeds + AGAIN)
        recent, kept = self.recent.index_select(0, slots), logits
        for rules, number in plan.repetition:
            kept = torch.where((numbers == number)[:, None], rules.nucleus(logits), kept)
        ids = sampling(kept, *drawing, offsets)
        others = sampling(logits.scatter(1, ids[:, None], -torch.inf), *again, offsets)
        for rules, number in plan.repetition:
            repeated = (numbers == number) & rules.repeats(recent, offsets, ids)
            ids = torch.where(repeated, others, ids)
        self.recent.view(-1).scatter_(0, slots * RING + offsets % RING, ids)
        return ids

    def drawing(self, slots: torch.Tensor) -> Drawing:
        """The parameters of rows in these slots [B] int64."""
        floats, ints = self.floats.index_select(1, slots), self.ints.index_select(1, slots)
        return Drawing(floats[TEMPERATURE], ints[TOP_K].int(), floats[TOP_P], floats[MIN_P], ints[SEED])

    @staticmethod
    def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobsTensors:
        """Log-probabilities of prompt tokens `targets` [T] int64 from the logits [T, V] of the preceding positions.

        k: number of most likely tokens to include for each, 0 to V; -1: all.
        """
        k = logits.shape[1] if k < 0 else k
        chunks = zip(logits.split(PROMPT_ROWS), targets.split(PROMPT_ROWS), strict=True)
        parts = [gather_logprobs(x, ids, k) for x, ids in chunks]
        return LogprobsTensors(*(torch.cat(t) for t in zip(*parts, strict=True)))

    def _ban_ends(self, logits: torch.Tensor, slots: torch.Tensor, offsets: torch.Tensor) -> None:
        ends = self.end_ids.index_select(0, slots)
        banned = (ends >= 0) & (offsets < self.ints[MIN_TOKENS].index_select(0, slots))[:, None]
        logits.scatter_add_(1, ends.clamp_min(0), torch.where(banned, -torch.inf, 0.0))

    def _prefer_times(self, logits: torch.Tensor, slots: torch.Tensor, first: int) -> None:
        """Ban other tokens than timestamps, `first` and later, if these together are more likely than each other.

        In rows with rules for timestamps. logits: [B, V], changed
        """
        ruled = self.ints[FIRST_TIME].index_select(0, slots) == first
        text = logits[:, :first]
        ruled &= logits[:, first:].logsumexp(-1) > text.amax(-1)
        text.masked_fill_(ruled[:, None], -torch.inf)

    def _penalize(self, logits: torch.Tensor, slots: torch.Tensor, places: DraftPlaces | None) -> None:
        """Penalties in vLLM's order: repetition for all seen tokens, then frequency and presence for generated ones.

        logits: [B, V], changed. Drafts can make more rows than there are slots, which would need more memory.
        """
        assert self.prompt_mask is not None and self.output_counts is not None
        first = 0
        for part, own in zip(logits.split(self.num_slots), slots.split(self.num_slots), strict=True):
            floats = self.floats.index_select(1, own)
            counts = self.output_counts.index_select(0, own)
            if places is not None:
                places.add_drafts(counts, first)
            generated = counts > 0
            seen = self.prompt_mask.index_select(0, own) | generated
            repetition = floats[REPETITION][:, None]
            part.copy_(torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part))
            part -= floats[FREQUENCY][:, None] * counts
            part -= floats[PRESENCE][:, None] * generated
            first += len(part)

    def _count(self, row: NewRow) -> None:
        """Fill a slot's token tables for the penalties."""
        if self.prompt_mask is None or self.output_counts is None:
            shape = (self.num_slots, self.vocab_size)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        prompt = self._tensor(row.prompt_token_ids, torch.int64)
        output = self._tensor(row.output_token_ids, torch.int64)
        self.prompt_mask[row.slot].zero_().index_fill_(0, prompt, True)
        ones = torch.ones_like(output, dtype=torch.int32)
        self.output_counts[row.slot].zero_().scatter_add_(0, output, ones)

    def _remember(self, rows: Sequence[NewRow]) -> None:
        """Fill the slots' rings with the last tokens of requests that go on."""
        if not self.recent.shape[1]:
            self.recent = self.recent.new_full((self.num_slots, RING), -1)
        rings = np.full((len(rows), RING), -1, dtype=np.int64)
        for ring, row in zip(rings, rows, strict=True):
            tokens = row.output_token_ids
            for at in range(max(len(tokens) - RING, 0), len(tokens)):
                ring[at % RING] = tokens[at]
        slots = self._tensor([row.slot for row in rows], torch.int64)
        self.recent.index_copy_(0, slots, self._tensor(rings, torch.int64))

    def _fill(
        self, table: torch.Tensor, slots: torch.Tensor, lists: Sequence[Sequence], pad: float
    ) -> torch.Tensor:
        """The table [slots, n] with these rows replaced, widened if a list is longer than its rows."""
        width = max(map(len, lists))
        if width > table.shape[1]:
            wide = table.new_full((self.num_slots, 1 << (width - 1).bit_length()), pad)
            wide[:, : table.shape[1]] = table
            table = wide
        if table.shape[1]:
            # In numpy: a single request can make the table wide, which must not slow down later admissions.
            rows = np.full((len(lists), table.shape[1]), pad)
            for row, entries in zip(rows, lists, strict=True):
                row[: len(entries)] = entries
            table.index_copy_(0, slots, self._tensor(rows, table.dtype))
        return table

    def _tensor(self, data: Sequence | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """Copy to the device through pinned memory, without waiting."""
        tensor = torch.as_tensor(data, dtype=dtype)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsTensors:
    """logits: [R, V], any float dtype; token_ids: [R] int64. See LogprobsTensors."""
    x = logits.float()
    chosen = x.gather(1, token_ids[:, None])
    values, ids = x.topk(k, dim=-1)
    logprobs = torch.cat((chosen, values), dim=1) - x.logsumexp(dim=-1, keepdim=True)
    return LogprobsTensors(torch.cat((token_ids[:, None], ids), dim=1), logprobs, (x >= chosen).sum(dim=-1))
