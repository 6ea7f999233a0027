"""Selects the requests of the next step, and the number of tokens of each.

A step has a token budget. Decoding requests come first, then running requests with an incomplete prompt, then waiting
ones. A prompt longer than the remaining budget is computed in chunks. If several prompts remain that fit into a few
steps, steps are shortened: prompts computed one after the other finish sooner on average than in parallel.

Requests are ordered by arrival plus priority times AGING: a lower priority number goes first, but no request starves.
When blocks run out, the last running request is preempted: it loses its blocks, keeps its generated tokens and its
place in the order, and is recomputed (or found in the prefix cache) when it is admitted again.

With two steps in flight, a request may be scheduled while its last token is being sampled: see `num_inflight`. If that
step has drafts, all of them count as accepted until it is collected: see `num_unsure`.

Some layers keep a state of each sequence instead of the keys of its tokens. The state of a running sequence is in the
slot after its own number. The prefix cache has snapshots of states for these layers, and chunks of a prompt end where a
snapshot can be taken, at the border of a block. A step with drafts first copies that slot to another one: if a draft is
rejected, the next step computes the accepted tokens again, from the copy, and has no drafts.

Media of a prompt are encoded in the step that computes their first token, and kept until that of the last one. A chunk
ends before a medium that the step has no room for.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fastkernels.engine.cache.blocks import BlockManager, BlockNames, PrefixCache, known_prefix
from fastkernels.engine.cache.cross_blocks import CrossBlocks
from fastkernels.engine.cache.media_cache import MediaCache, MediaItem
from fastkernels.engine.cache.snapshots import Snapshots
from fastkernels.engine.options.speculation import DraftCounts, Speculation
from fastkernels.engine.scheduling.ngrams import Lookup
from fastkernels.engine.scheduling.payoff import Payoff
from fastkernels.engine.scheduling.request import BlockTable, Request, Status
from fastkernels.engine.steps.step import MADE

AGING = 10.0  # seconds of waiting that equal one level of priority
LEAST_TOKENS = 2048  # of a dense model's shortened step: fewer tokens take a GPU nearly as long
PARTS = 5  # most steps that the remaining prompts may take with shortened steps


class QueueFull(RuntimeError):
    """The waiting queue is full; try again later."""


@dataclass
class Batch:
    """The requests of one step; those that compute one token come first. All lists but `admitted` are parallel.

    starts   tokens computed before
    counts   tokens to compute
    offsets  tokens generated before the one that this step samples; -1: it samples none
    admitted requests that received their slot in this step
    state_loads, state_saves  slots of recurrent state to copy, (from, to), before and after the step
    media    whether a request reads media, or has tokens before one
    encodes, dropped  media to encode, and digests of those that are not needed any more
    sources  (admitted request with a source, whether the step computes its blocks)
    drafts   of each request, which follow its known tokens; empty if no request has any
    forced   how many of these are accepted, whatever is sampled; empty: those that are sampled, too
    num_next drafts of each request that a model makes after the step; None: there is no such model
    unsure   whether each request has drafts in the step before whose tokens are unknown
    shows_drafts  whether the host reads the drafts that a model makes
    """

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    num_decodes: int = 0
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    media: bool = False
    encodes: list[MediaItem] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)
    sources: list[tuple[Request, bool]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    num_next: int | None = None
    unsure: list[bool] = field(default_factory=list)
    shows_drafts: bool = True

    @property
    def masked(self) -> bool:
        """Whether a row that samples has a constraint."""
        return any(
            r.constraint is not None and offset >= 0
            for r, offset in zip(self.requests, self.offsets, strict=True)
        )


def _reads(request: Request) -> bool:
    """Whether the request's next token is not behind its last medium."""
    return request.num_computed_tokens < request.media_end


def _no_media(start: int, stop: int) -> bytes:
    return b""


def _key(request: Request) -> tuple[float, str, int]:
    return (request.arrival + request.priority * AGING, request.request_id, request.index)


class Scheduler:
    """Holds all unfinished requests, running and waiting, with their slots and blocks.

    groups: the blocks of each group of paged layers; those of layers that see all tokens come first
    least_tokens: of a shortened step
    states: the snapshots of layers that keep a state; None: there are none
    media: what the ranks keep of media; None: the model reads none
    cross: the blocks of sources; None: the model has no cross attention
    speculation: of drafts, which need the tokens of the step before; None: there are none
    border: tokens of a sequence, of which no step crosses a multiple; 0: steps may end anywhere

    `blocks` is the first group, or without one the snapshots: what names a prefix.
    """

    blocks: BlockManager | Snapshots

    def __init__(
        self,
        groups: Sequence[BlockManager],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        least_tokens: int = LEAST_TOKENS,
        states: Snapshots | None = None,
        media: MediaCache | None = None,
        cross: CrossBlocks | None = None,
        speculation: Speculation | None = None,
        border: int = 0,
    ):
        self.cross, self.border = cross, border
        self.speculation, self.draft_counts = speculation, DraftCounts()
        self.payoff: Payoff | None = None  # of drafts, once it is measured
        self._chance = random.Random(0)  # of synthetic acceptance
        self._num_drafts = 0  # of the step being scheduled
        self.holds_drafts = speculation is not None and speculation.holds_drafts
        self.least_tokens = least_tokens
        self.groups, self.states, self.media = groups, states, media
        self._caches: list[PrefixCache] = [*groups]
        if states is not None:
            self._caches.append(states)
            if groups:
                groups[0].on_forget = states.drop
        named = groups[0] if groups else states
        assert named is not None, "a model keeps blocks, states or both"
        self.blocks, self._names = named, BlockNames(named.block_size)
        self._windowed = [(i, group) for i, group in enumerate(groups) if group.window is not None]
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_waiting = max_waiting
        self.running: list[Request] = []  # by key
        # A heap; removed requests stay in it until they reach the top.
        self._waiting: list[tuple[tuple[float, str, int], Request]] = []
        self.num_waiting = 0
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._planned: dict[Request, int] = {}  # tokens in the step being scheduled, decodes first
        self._preempted = False  # whether this step preempted a request
        self._loads: list[tuple[int, int]] = []  # copies of states in the step being scheduled
        self._saves: list[tuple[int, int]] = []
        self._sources: list[tuple[Request, bool]] = []  # of that step's admitted requests
        self._readers: list[Request] = []  # requests of that step with tokens up to their last medium
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found there

    def __len__(self) -> int:
        return self.num_waiting + len(self.running)

    def check_room(self, num: int = 1) -> None:
        """Raise QueueFull if `num` more requests may not wait."""
        if self.num_waiting + num > self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting; the limit is {self.max_waiting}")

    def check_size(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError for a request larger than the KV cache."""
        tokens = num_prompt_tokens + max_tokens - 1  # the last generated token is never computed
        for group in self.groups:
            held = tokens
            if group.window is not None:
                held = min(tokens, group.window + self.max_num_batched_tokens + 2 * group.block_size)
            room = group.num_usable * group.block_size
            if held > room:
                raise ValueError(
                    f"a prompt of {num_prompt_tokens} tokens with {max_tokens} to generate does not fit into the KV"
                    f" cache, which holds {room} tokens"
                )

    @property
    def num_cache_tokens(self) -> int | None:
        """Tokens that the blocks of the first group hold; None without groups."""
        return self.groups[0].num_usable * self.groups[0].block_size if self.groups else None

    @property
    def cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1, of the group with the fewest left; without groups, of the sequences."""
        return max((group.usage for group in self.groups), default=len(self.running) / self.max_num_seqs)

    def reset_cache(self) -> None:
        """Forget the prefix cache. Running requests go on, and name no blocks until they are admitted again."""
        for group in self.groups:
            group.reset_cache()
        if self.states is not None:
            self.states.reset_cache()
        if self.media is not None:
            self.media.forget()
        if self.cross is not None:
            self.cross.blocks.reset_cache()

    def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFull, and ValueError for a request larger than the KV cache."""
        self.check_room()
        self.check_size(len(request.prompt_token_ids), request.max_tokens)
        self._wait(request)

    def schedule(self) -> Batch | None:
        """The next batch, with slots and blocks assigned; None if there is nothing to run.

        Its tokens count as computed from here on, since steps run in the order of scheduling.
        """
        self._planned, self._preempted, self._loads, self._saves = {}, False, [], []
        for request in self.running:
            if request.num_computed_tokens - request.num_unsure >= request.next_unseen:
                self._free_unseen(request)
            if request.unnamed:
                self._name_snapshots(request)
        if self.speculation is not None:
            if self.payoff is not None and self.running:
                self.payoff.count_step(len(self.running))
            self._num_drafts = 0
            for request in self.running:
                request.drafts = []
        budget = self._plan_running()
        admitted = [] if self._preempted else self._admit(budget)
        planned, self._planned = self._planned, {}
        if not planned:
            return None
        synthetic = self.speculation is not None and self.speculation.synthetic
        if synthetic and any(request.constraint is not None for request in planned):
            self._drop_drafts(planned)
        if self.speculation is not None and self.speculation.has_model:
            self._look_ahead(self.speculation, planned)
        if self.states is not None:
            self._guard_states(self.states, planned)
        ones = [r for r, count in planned.items() if count == 1]
        more = [r for r, count in planned.items() if count > 1]
        requests = ones + more
        counts = [planned[r] for r in requests]
        starts = [r.num_computed_tokens for r in requests]
        unsure = [r.num_unsure > 0 for r in requests] if self.speculation is not None else []
        offsets = [self._advance(r, n) for r, n in zip(requests, counts, strict=True)]
        batch = Batch(
            requests, starts, counts, offsets, admitted, len(ones), self._loads, self._saves
        )  # fmt: skip
        if self._readers:
            self._give_media(batch)
        if self.speculation is not None:
            batch.unsure = unsure
            self._give_drafts(self.speculation, batch)
        if self._sources:
            batch.sources, self._sources = self._sources, []
        return batch

    def remove(self, requests: Iterable[Request]) -> None:
        """Remove unfinished requests, and free their slots and blocks."""
        gone = set()
        for request in requests:
            if request.status is Status.RUNNING:
                gone.add(id(request))
                self._release(request)
            elif request.status is Status.WAITING:
                self.num_waiting -= 1
            request.status = Status.FINISHED
        if gone:
            self.running = [r for r in self.running if id(r) not in gone]
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [item for item in self._waiting if item[1].status is Status.WAITING]
            heapq.heapify(self._waiting)

    def remove_all(self) -> None:
        self.remove([*self.running, *(r for _, r in self._waiting)])
        self._waiting.clear()

    def _wait(self, request: Request) -> None:
        request.status = Status.WAITING
        heapq.heappush(self._waiting, (_key(request), request))
        self.num_waiting += 1

    def _first_waiting(self) -> Request | None:
        while self._waiting and self._waiting[0][1].status is not Status.WAITING:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _plan_running(self) -> int:
        """Plan one token for each decoding request, then chunks of the others. Returns the remaining budget."""
        block_size, planned, prefills = self.blocks.block_size, self._planned, list[Request]()
        media = self.media is not None
        drafting = self.speculation is not None and self._drafts_now(self.speculation)
        for request in list(self.running):
            generated = len(request.output_token_ids) + request.num_inflight
            after = len(request.prompt_token_ids) + generated
            if after - request.num_computed_tokens > 1 or (media and _reads(request)):
                prefills.append(request)
                continue
            if request.status is not Status.RUNNING or generated >= request.max_tokens:
                continue  # preempted by an earlier request, or its last token is in flight
            # The last group's tables are the shortest: others hold a whole prompt from its first step on.
            tables = request.block_tables
            if not tables or after <= len(tables[-1].blocks) * block_size or self._make_room(request, after):
                planned[request] = 1
        if drafting:
            for request in planned:
                planned[request] += self._draft(request)
        budget = self._budget(prefills) - len(planned) - self._num_drafts
        for request in prefills:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            if count < 1 or request.status is not Status.RUNNING:
                continue
            count = self._cut(request, request.num_computed_tokens, count)
            if media and _reads(request):
                count = self._hold_media(request, request.num_computed_tokens, count)
            if count > 0 and self._make_room(request, request.num_computed_tokens + count):
                planned[request] = count
                budget -= count
        return budget

    def _drafts_now(self, settings: Speculation) -> bool:
        """Whether sequences may have drafts in this step."""
        most, rows = settings.disable_by_batch_size, len(self.running)
        if isinstance(most, int):
            return rows <= most
        return self.payoff is None or self.payoff.pays(rows)

    def _drop_drafts(self, planned: dict[Request, int]) -> None:
        """Take the drafts out of a step with a constrained sequence, whose tokens cannot be accepted by force."""
        for request in planned:
            planned[request] -= len(request.drafts)
            request.drafts = []
        self._num_drafts = 0

    def _draft(self, request: Request) -> int:
        """Look up drafts of a decoding request, and hold blocks for them, as far as no other request needs these."""
        settings = self.speculation
        assert settings is not None
        if request.params.repetition_aware is not None:  # its history would have drafts
            return 0
        # Penalties count tokens that the model samples
        if request.params.needs_penalties and settings.synthetic:
            return 0
        left = request.max_tokens - len(request.output_token_ids) - request.num_inflight - 1
        most = min(
            settings.num_speculative_tokens, left,
            self.max_num_batched_tokens - len(self.running) - self._num_drafts,
        )  # fmt: skip
        if most < 1:
            return 0
        if settings.has_model:
            drafts = request.proposed[:most]
        else:
            request.lookup = request.lookup or Lookup(settings)
            drafts = request.lookup.propose(request.prompt_token_ids, request.output_token_ids, most)
        if not self._reserve(request, request.num_tokens + len(drafts)):
            return 0
        request.drafts = drafts
        self._num_drafts += len(drafts)
        return len(drafts)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Hold blocks for the first num_tokens tokens, if no other running request needs these; else return False."""
        for group, table in zip(self.groups, request.block_tables, strict=True):
            if group.blocks_for(num_tokens) - len(table.blocks) > max(group.num_free - len(self.running), 0):
                return False
        self._grow(request, num_tokens)
        return True

    def _look_ahead(self, settings: Speculation, planned: dict[Request, int]) -> None:
        """Hold blocks for the keys of the drafts that a model makes after the step, as far as there are any."""
        for request, count in planned.items():
            end = request.num_computed_tokens + count
            if end >= request.num_tokens:  # it samples
                most = len(request.prompt_token_ids) + request.max_tokens
                self._reserve(request, min(end + settings.lookahead, most))

    def _give_drafts(self, settings: Speculation, batch: Batch) -> None:
        """Give the batch its drafts, how many of them are accepted by force, and how many a model makes after it."""
        if self._num_drafts:
            batch.drafts = [r.drafts for r in batch.requests]
            if settings.synthetic:
                batch.forced = [self._forced(settings, len(drafts)) for drafts in batch.drafts]
        if settings.has_model:
            batch.num_next = settings.num_speculative_tokens if self._drafts_now(settings) else 0
            held = list(range(MADE, MADE - batch.num_next, -1)) if self.holds_drafts else []
            for request, offset in zip(batch.requests, batch.offsets, strict=True):
                request.proposed = held if offset >= 0 else []
            # The masks of a constrained request follow from its drafts.
            constrained = any(r.constraint is not None for r in batch.requests)
            batch.shows_drafts = constrained or not self.holds_drafts

    def _forced(self, settings: Speculation, drafts: int) -> int:
        drawn = self._chance.random()
        return sum(drawn < rate for rate in settings.rates[:drafts])

    def accept(self, request: Request, drafts: int, kept: int, agreed: int) -> None:
        """Take back the tokens behind the drafts that the sequence keeps; the next step computes others in their place.

        agreed  drafts that the model accepts: more than `kept` where the sequence ends before them
        """
        if request.status is not Status.RUNNING:
            pass  # preempted meanwhile: it computes all its tokens again
        elif self.states is not None and kept < drafts:
            request.num_computed_tokens -= drafts + 1
            request.restores = True
        else:
            request.num_computed_tokens -= drafts - kept
        self.draft_counts.add(drafts, agreed)
        if self.payoff is not None:
            self.payoff.count_tokens(agreed + 1)

    def _guard_states(self, states: Snapshots, planned: dict[Request, int]) -> None:
        """Copy the states of sequences with drafts, and bring back those of sequences whose drafts were rejected."""
        behind = self.max_num_seqs + 1 + states.count  # the slots of copies
        for request in planned:
            own, spare = request.slot + 1, behind + request.slot
            if request.restores:
                self._loads.append((spare, own))
                request.restores = False
            if request.drafts:
                self._loads.append((own, spare))

    def _budget(self, prefills: list[Request]) -> int:
        """The token budget of this step, shortened depending on `prefills` and the waiting requests."""
        most, left, prompts = self.max_num_batched_tokens, 0, 0
        if most < 2 * self.least_tokens or len(self._planned) > self.least_tokens // 2:
            return most
        for request in itertools.chain(prefills, (r for _, r in self._waiting if r.status is Status.WAITING)):
            left += request.num_tokens - request.num_computed_tokens
            prompts += 1
            if left > PARTS * (most // 2):
                return most
        while prompts > 1 and most // 2 >= max(self.least_tokens, left / PARTS):
            most //= 2
        return most

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first num_tokens tokens, preempting the last running requests if necessary.

        Returns False if the request itself was the last one and is preempted.
        """
        for group, table in zip(self.groups, request.block_tables, strict=True):
            need = group.blocks_for(num_tokens) - len(table.blocks)
            while need > group.num_free:
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return False
        self._grow(request, num_tokens)
        return True

    def _grow(self, request: Request, num_tokens: int) -> None:
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.grow(table.blocks, num_tokens)

    def _free_unseen(self, request: Request) -> None:
        """Free the blocks that no window sees from the next token on. Those without a name wait for it."""
        computed, reach = request.num_computed_tokens - request.num_unsure, sys.maxsize
        for i, group in self._windowed:
            table = request.block_tables[i]
            unseen = group.num_unseen(computed)
            if self._may_name(request):
                unseen = min(unseen, request.num_named_blocks)
            if unseen > table.num_freed:
                group.free_first(table.blocks, unseen)
                table.num_freed = unseen
            assert group.window is not None
            reach = min(reach, (table.num_freed + 1) * group.block_size + group.window - 1)
        request.next_unseen = reach

    def _preempt(self, request: Request) -> None:
        self._release(request)
        self._planned.pop(request, None)
        request.num_computed_tokens = request.num_named_blocks = request.snapshot = 0
        request.num_preemptions += 1
        request.drafts, request.proposed, request.restores = [], [], False
        self.num_preemptions += 1
        self._preempted = True
        self._wait(request)

    def _release(self, request: Request) -> None:
        if request.unnamed:
            self._name_snapshots(request, last=True)
        if request.num_held:
            self._release_media(request)
        if self.cross is not None:
            self.cross.free(request.cross_blocks)
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.free(table.blocks)
            table.clear()
        self._slots.append(request.slot)
        request.slot = -1

    def _admit(self, budget: int) -> list[Request]:
        admitted: list[Request] = []
        while budget > 0 and self._slots and (request := self._first_waiting()):
            names = self._known_names(request)
            seen = 0 if self.states is None else self.states.num_seen(names)
            names = names[: known_prefix(self._caches, names)]
            if self.speculation is not None and self.speculation.reads_states and names:
                # The draft's keys of a block's last token follow from the token after it, too.
                names = names[: known_prefix(self._caches, names[:-1])]
            found = [group.find(names) for group in self.groups]
            cached = len(names) * self.blocks.block_size
            branch = seen * self.blocks.block_size if seen > len(names) else 0
            count = self._cut(request, cached, min(request.num_tokens - cached, budget), branch)
            if cached < request.media_end:
                request.num_released = sum(item.end <= cached for item in request.media)
                count = self._hold_media(request, cached, count)
            # The blocks of a whole prompt, or of what a window needs of it in this step
            ends = [request.num_tokens if group.window is None else cached + count for group in self.groups]
            source = request.source
            no_source = self.cross is not None and source is not None and not self.cross.has_room(source)
            if count < 1 or no_source or not self._has_room(found, ends):
                self._release_media(request)
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            request.branch = branch
            self._start(request, found, names)
            if self.cross is not None and source is not None:
                self._sources.append((request, self.cross.hold(source, request.cross_blocks)))
            for group, table, end in zip(self.groups, request.block_tables, ends, strict=True):
                group.grow(table.blocks, end)
            # Named at once: layers store a step's keys before they read, so the same step can already share them.
            self._name_blocks(request, request.num_computed_tokens + count)
            self._planned[request] = count
            budget -= count
            admitted.append(request)
        return admitted

    def _has_room(self, found: list[list[int]], ends: list[int]) -> bool:
        """Whether a request with these known blocks can be admitted with blocks for `ends` tokens of each group.

        Each running request may need a block for its next token. Without this reserve, a request might be preempted
        one step after its admission.
        """
        for group, blocks, end in zip(self.groups, found, ends, strict=True):
            missing = group.blocks_for(end) - blocks.count(0) - group.num_held(blocks)
            if missing + len(self.running) > group.num_free:
                return False
        return True

    def _start(self, request: Request, found: list[list[int]], names: Sequence[bytes]) -> None:
        if not request.block_tables:
            request.block_tables = [BlockTable() for _ in self.groups]
        for group, table, blocks in zip(self.groups, request.block_tables, found, strict=True):
            group.hold(blocks)
            table.blocks.extend(blocks)
            table.num_freed = blocks.count(0)
        known = len(names)
        cached = known * self.blocks.block_size
        request.num_computed_tokens, request.num_named_blocks = cached, known
        request.epoch = self.blocks.epoch
        request.next_unseen = 0 if self._windowed else sys.maxsize
        if not request.num_preemptions:
            request.num_cached_tokens = cached
            request.scheduled_time = time.monotonic()
        if self.blocks.enable_caching:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += cached
        request.slot = self._slots.pop()
        request.snapshot = cached
        if self.states is not None and names:
            self._loads.append((self.states.find(names[-1]), request.slot + 1))
        request.status = Status.RUNNING
        insort(self.running, request, key=_key)

    def _advance(self, request: Request, count: int) -> int:
        """Count the step's tokens as computed. Returns the number of tokens generated before the one that the step
        samples, -1 if it samples none.
        """
        computed = request.num_computed_tokens = request.num_computed_tokens + count
        if computed >= (request.num_named_blocks + 1) * self.blocks.block_size:
            self._name_blocks(request, computed)
        if self.states is not None and computed % self.blocks.block_size == 0 and not request.drafts:
            self._take_snapshot(request, self.states)
        generated = len(request.output_token_ids) + request.num_inflight
        if computed < len(request.prompt_token_ids) + generated:
            return -1
        request.num_inflight += 1 + len(request.drafts)
        request.num_unsure += len(request.drafts)
        return generated

    def _hold_media(self, request: Request, start: int, count: int) -> int:
        """The number of tokens, up to `count`, of which the media are there or encoded in this step; holds them."""
        assert self.media is not None
        self._readers.append(request)
        media, at = request.media, request.num_released + request.num_held
        while at < len(media) and media[at].start < start + count:
            if not self.media.hold(media[at]):
                return max(media[at].start - start, 0)
            request.num_held += 1
            at += 1
        return count

    def _release_media(self, request: Request, computed: int = sys.maxsize) -> None:
        """Release the media that end within the first `computed` tokens."""
        while request.num_held and request.media[request.num_released].end <= computed:
            assert self.media is not None
            self.media.release(request.media[request.num_released])
            request.num_released += 1
            request.num_held -= 1

    def _give_media(self, batch: Batch) -> None:
        """Give the batch the media that it encodes. Later steps may drop those of which it computes the last token."""
        assert self.media is not None
        batch.media = True
        batch.encodes, batch.dropped = self.media.take()
        for request in self._readers:
            self._release_media(request, request.num_computed_tokens)
        self._readers = []

    def _known_names(self, request: Request) -> list[bytes]:
        """Names of the blocks to look up. At least one token must be computed to sample the next one."""
        if not self.blocks.enable_caching or request.needs_prompt_logprobs:
            return []
        full = (request.num_tokens - 1) // self.blocks.block_size
        self._hash(request, full)
        return request.block_hashes[:full]

    def _may_name(self, request: Request) -> bool:
        """Whether the prefix cache may know this request's blocks: they contain nothing from before a reset."""
        return self.blocks.enable_caching and request.epoch == self.blocks.epoch

    def _name_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Name the full blocks of the first num_computed_tokens tokens, as far as these are known."""
        if not self._may_name(request):
            return
        size = self.blocks.block_size
        full = min(num_computed_tokens, request.num_known_tokens) // size
        self._hash(request, full)
        first = request.num_named_blocks
        if first >= full:
            return
        names = request.block_hashes[first:full]
        for group, table in zip(self.groups, request.block_tables, strict=True):
            group.name_all(table.blocks[first:full], names)
        if self.states is not None:
            for name in names:
                self.states.see(name)
        request.num_named_blocks = full

    def _cut(self, request: Request, start: int, count: int, branch: int | None = None) -> int:
        """The length of a chunk of up to `count` tokens from `start` on, which may end where a snapshot is taken.

        It ends at the branch, or, if it does not complete the sequence, at the border of a block, and crosses no border
        of the model.
        """
        if self.border:
            count = min(count, self.border - start % self.border)
        if self.states is None or not self.blocks.enable_caching:
            return count
        branch = request.branch if branch is None else branch
        size, end = self.blocks.block_size, start + count
        if start < branch < end:
            return branch - start
        if end < request.num_tokens and end // size * size > start:
            return end // size * size - start
        return count

    def _take_snapshot(self, request: Request, states: Snapshots) -> None:
        """Let the step that is being scheduled copy the request's state, which is at the border of a block then."""
        at = request.num_computed_tokens
        far = at - request.snapshot >= states.interval
        if not self._may_name(request) or not states.enable_caching or not (far or at == request.branch):
            return
        slot = states.take()
        if slot is not None:
            self._saves.append((request.slot + 1, slot))
            request.unnamed.append((at, slot))
            request.snapshot = at

    def _name_snapshots(self, request: Request, last: bool = False) -> None:
        """Name the snapshots whose tokens are known by now. last: free the others."""
        states = self.states
        assert states is not None
        left = []
        for at, slot in request.unnamed:
            if not self._may_name(request):
                states.give_back(slot)
            elif at <= request.num_known_tokens:
                self._name_blocks(request, at)
                self._name_snapshot(request, at, slot, request.block_hashes[at // states.block_size - 1])
            elif last:
                states.give_back(slot)
            else:
                left.append((at, slot))
        request.unnamed = left

    def _name_snapshot(self, request: Request, at: int, slot: int, name: bytes) -> None:
        """Name a snapshot. Of those within the generated tokens, the last one replaces the others.

        Its block may have no name: another one had it, and is evicted. Then nothing would evict the snapshot.
        """
        assert self.states is not None
        if self.groups and not self.groups[0].knows(name):
            self.states.give_back(slot)
        elif self.states.name(slot, name) and at > len(request.prompt_token_ids):
            if request.decode_snapshot is not None:
                self.states.drop_unused(request.decode_snapshot)
            request.decode_snapshot = name

    def _hash(self, request: Request, num_blocks: int) -> None:
        media = request.media_key if request.media else _no_media
        self._names.extend(
            request.block_hashes, num_blocks, request.cache_root, request.token_ids, media
        )  # fmt: skip
