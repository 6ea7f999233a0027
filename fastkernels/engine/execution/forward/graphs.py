"""CUDA graphs of steps: decode batches by number of rows, including sampling; mixed batches by number of tokens.

A batch runs in the smallest graph that holds it, or of data-parallel ranks that share experts, each of their batches.
The remaining rows are padding: they use the dummy slot, whose block is the reserved block 0, and store nothing. A graph
serves every context length: its metadata says max_model_len, and the kernels choose on the device by the length of each
row.

All graphs share one memory pool, so the next graph that runs may overwrite the outputs of the last one. Separate
logits [256, 128256] for about forty graphs would take 1 GiB.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.core.runtime.graph_capture import alone, captured_on
from fastkernels.engine.execution.attention import AttentionBackend, CannotCapture, with_groups
from fastkernels.engine.steps.input_batch import InputBatch, Inputs, packed_words
from fastkernels.engine.steps.step import SAMPLED, StepInput, Together, even

log = logging.getLogger("fastkernels")
# Eager launches take 20 ms of CPU time per step, as long as an H200 needs for 1000 tokens of an 8B model, and the HTTP
# server in the same process waits for most of that.
MAX_MIXED_TOKENS = 2048
# A step with more tokens hides its launches; it runs eagerly where attention is faster that way
HIDDEN_TOKENS = 1024
# Of a step with drafts in one graph, which computes the logits of all its tokens
MAX_VERIFIED_TOKENS = 512


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256 and every 32 after that, up to and including max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_num_seqs + 1, 32)]
    return sorted({s for s in sizes if s < max_num_seqs} | {max_num_seqs})


def mixed_sizes(max_tokens: int) -> list[int]:
    """2, 4, 8, 16, every 32 up to 128, every 64 up to 1024, every 128 after that, up to max_tokens or 2048."""
    sizes = [2, 4, 8, 16, *range(32, 129, 32), *range(192, 1025, 64), *range(1152, MAX_MIXED_TOKENS + 1, 128)]
    return [s for s in sizes if s <= max_tokens]


def verify_sizes(count: int, max_num_seqs: int, max_tokens: int) -> list[int]:
    """Rows of the graphs of steps with up to `count` drafts of each: 1, 2, 4, 8, and multiples of 8 from there."""
    most = min(max_tokens, MAX_VERIFIED_TOKENS) // (count + 1)
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    return sorted({min(size, max_num_seqs) for size in sizes if min(size, max_num_seqs) <= most})


class Verify(NamedTuple):
    """Graphs of steps in which each row has drafts or one token, and samples after all of its tokens.

    drafts  most of a row
    run     run(inputs, metadata, tables) is captured
    """

    drafts: int
    run: Callable[[Inputs, AttentionMetadata, torch.Tensor], Outputs]


class Outputs(NamedTuple):
    """The model's outputs of a step.

    hidden  [T, H] of all tokens, or [B, H] of those whose logits are there
    logits  [B, V] of rows with one query, if the graph computes them, or of each row's last token
    tokens  [B] int64: sampled from the raw logits; None without logits. [T] of a graph that verifies drafts
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _Graph:
    """replay() runs the graph. `outputs` are valid until another graph runs.

    first: the first pass of EAGLE over the step's tokens, as a graph or, where it cannot be captured, without one
    """

    replay: Callable[[], None]
    outputs: Outputs
    inputs: Inputs
    metadata: AttentionMetadata
    first: Callable[[], Any] | None = None


class Drafts(Protocol):
    """A draft model (drafting.Drafter), of which other graphs are captured next to those of steps."""

    eagle: bool
    backend: AttentionBackend

    def first(self, inputs: Inputs, metadata: AttentionMetadata) -> torch.Tensor: ...

    def chain(self, rows: int, longest: int) -> torch.Tensor: ...


class Graphs:
    """All graphs of one model, captured on construction, when the model is final and its KV cache bound.

    forward(inputs, metadata, tables) is captured. It reads static tensors only, and fills the block tables `tables`
    [groups, B, width], of which the metadata has views. `replays` counts the steps that ran as a graph.

    drafts  a draft model. EAGLE's first pass over a step's tokens has a graph for each of the step's graphs, and the
            chain of passes that follows has one for each number of rows
    decode  False: every step has a row with more than one query
    verify  None: no step has drafts in a chain
    """

    def __init__(
        self,
        forward: Callable[[Inputs, AttentionMetadata, torch.Tensor], Outputs],
        backend: AttentionBackend,
        batch: InputBatch,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        drafts: Drafts | None = None,
        decode: bool = True,
        verify: Verify | None = None,
    ):
        self._verify = verify
        self._drafts, self._chains = drafts, dict[int, tuple[Callable[[], None], torch.Tensor]]()
        self._last: _Graph | None = None  # that has run
        self._forward, self._backend, self._batch = forward, backend, batch
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._decode, self._mixed = (
            decode_sizes(max_num_seqs) if decode else [],
            mixed_sizes(min(max_tokens, backend.most_mixed)),
        )
        self._verified = (
            []
            if verify is None or verify.drafts >= max_model_len
            else verify_sizes(verify.drafts, max_num_seqs, min(max_tokens, backend.most_mixed))
        )
        wide = 0 if verify is None else (verify.drafts + 1) * max(self._verified, default=0)
        most = max([*self._decode, *self._mixed, wide])
        self._packed = torch.zeros(
            packed_words(most, max_num_seqs, batch.arrays), dtype=torch.int64, device=device
        )
        self._tables = torch.zeros(batch.groups, max_num_seqs, batch.width, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._verifying: dict[int, _Graph] = {}  # by rows
        self._prepare()
        self.replays = {"decode": 0, "mixed": 0}
        with torch.inference_mode():
            backend.capture_buffers(max_num_seqs, batch.width)
            self._mixed = self._capture_all(self._mixed, decode=False)
            self._decode = self._capture_all(self._decode, decode=True)
            if drafts is not None:
                self._capture_chains(drafts)
            if verify is not None:
                self._capture_verifying(verify)
            self._finish()

    def __len__(self) -> int:
        return len(self._graphs)

    def size_of(self, tokens: int, decode: bool) -> int | None:
        """Tokens of the graph for a step, with padding; None if no graph fits."""
        sizes = self._decode if decode else self._mixed
        at = bisect.bisect_left(sizes, tokens)
        return sizes[at] if at < len(sizes) else None

    def verify_rows(self, rows: int) -> int | None:
        """Rows of the graph that verifies drafts of so many rows; None if no graph fits."""
        at = bisect.bisect_left(self._verified, rows)
        return self._verified[at] if at < len(self._verified) else None

    def chain_rows(self, rows: int) -> int | None:
        """Rows of the graph of a draft model's chain; None if no graph fits."""
        return self.size_of(rows, True) if self._chains else None

    def padded(self, together: Together) -> int:
        """Tokens of each data-parallel rank in this step, with padding, whether it runs as a graph or not."""
        if self._verify is not None and together.verify and (rows := self.verify_rows(together.rows)):
            return rows * (self._verify.drafts + 1)
        return self.size_of(together.tokens, together.decode) or together.tokens

    def run(self, step: StepInput) -> tuple[Inputs, Outputs] | None:
        """Run a step. Returns its inputs and outputs with padding, valid until the next run; None if no graph fits."""
        together = step.together
        if together is None:
            tokens, decode = len(step.input_ids), len(step.input_ids) == len(step.slots)
        elif together.verify and self.verify_rows(together.rows) is not None:
            return None  # other ranks run it as a graph of another size
        else:
            tokens, decode = together.tokens, together.decode
        size = self.size_of(tokens, decode)
        if size is None or (not decode and self._backend.takes_apart(step, tokens > HIDDEN_TOKENS)):
            return None
        key = self._key(size, decode)
        found = self._graphs[key]
        inputs = self._batch.load(step, key[0], key[1], self._packed, found.inputs)
        self._backend.plan_replay(found.metadata, inputs, self._batch.group_table())
        found.replay()
        self.replays["decode" if decode else "mixed"] += 1
        self._last = found
        return inputs, found.outputs

    def run_verify(self, step: StepInput) -> tuple[Inputs, Outputs] | None:
        """Run a step whose rows all sample after each of their tokens, of which there are at most Verify.drafts + 1.

        Returns its inputs and outputs with padding, valid until the next run; None if no graph fits.
        """
        size = self.verify_rows(len(step.slots) if step.together is None else step.together.rows)
        if self._verify is None or size is None:
            return None
        found = self._verifying[size]
        tokens = size * (self._verify.drafts + 1)
        inputs = self._batch.load(step, tokens, size, self._packed, found.inputs)
        self._backend.plan_replay(found.metadata, inputs, self._batch.group_table())
        found.replay()
        self.replays["verify"] = self.replays.get("verify", 0) + 1
        self._last = None
        return inputs, found.outputs

    def run_first(self) -> None:
        """Run EAGLE's first pass over the tokens of the step that `run` has run."""
        assert self._last is not None and self._last.first is not None
        self._last.first()

    def run_chain(self, rows: int, most: int = 0) -> torch.Tensor | None:
        """The drafts [rows, count], valid until the next call; None if no graph fits.

        most: rows of the largest data-parallel rank
        """
        size = self.chain_rows(max(rows, most))
        if size is None:
            return None
        replay, drafts = self._chains[size]
        replay()
        self.replays["drafts"] = self.replays.get("drafts", 0) + 1
        return drafts[:rows]

    def _key(self, tokens: int, decode: bool) -> tuple[int, int, bool]:
        """(tokens, rows, decode) of a graph."""
        return tokens, min(tokens, self._max_num_seqs), decode

    def _capture_all(self, sizes: list[int], decode: bool) -> list[int]:
        """Capture the largest first, so that smaller graphs reuse its memory. Returns the captured sizes."""
        try:
            for size in reversed(sizes):
                self._capture(*self._key(size, decode))
        except CannotCapture as reason:
            log.info("no CUDA graphs for %s batches: %s", "decode" if decode else "mixed", reason)
            return []
        return sizes

    def _capture(self, tokens: int, rows: int, decode: bool) -> None:
        inputs = self._example(tokens, rows, decode)
        tables = self._tables[:, :rows]
        metadata = with_groups(self._backend.plan_capture(inputs, tables[0]), inputs, tables.unbind())

        def plan() -> None:
            self._backend.plan_replay(metadata, inputs, self._batch.group_table())

        recorded = self._record(plan, lambda: self._forward(inputs, metadata, tables))
        first: Callable[[], Any] | None = None
        drafts = self._drafts
        if drafts is not None and drafts.eagle:
            first = lambda: drafts.first(inputs, metadata)  # noqa: E731
            with contextlib.suppress(CannotCapture):
                drafts.backend.plan_capture(inputs, tables[0])
                first, _ = self._record(plan, lambda: Outputs(drafts.first(inputs, metadata)))
        self._graphs[tokens, rows, decode] = _Graph(*recorded, inputs, metadata, first)

    def _capture_chains(self, drafts: Drafts) -> None:
        for rows in reversed(self._decode):
            try:
                drafts.backend.plan_capture(self._example(rows, rows, decode=True), self._tables[0, :rows])
            except CannotCapture as reason:
                log.info("no CUDA graphs for drafts: %s", reason)
                return
            made: list[torch.Tensor] = []

            def run(rows: int = rows, made: list[torch.Tensor] = made) -> Outputs:
                made[:] = [drafts.chain(rows, self._max_model_len)]
                return Outputs(made[0])

            replay, _ = self._record(lambda: None, run)
            self._chains[rows] = replay, made[0]

    def _capture_verifying(self, verify: Verify) -> None:
        """Graphs of steps with drafts. If attention cannot be captured, there are none."""
        for rows in reversed(self._verified):
            tokens, tables = rows * (verify.drafts + 1), self._tables[:, :rows]
            inputs = dataclasses.replace(
                self._example(tokens, rows, decode=False, each=verify.drafts + 1),
                max_seqlen_q=verify.drafts + 1,
            )
            try:
                metadata = with_groups(self._backend.plan_capture(inputs, tables[0]), inputs, tables.unbind())
                if self._drafts is not None and self._drafts.eagle:
                    self._drafts.backend.plan_capture(inputs, tables[0])
            except CannotCapture as reason:
                log.info("no CUDA graphs for steps with drafts: %s", reason)
                self._verified = []
                return

            def plan(metadata: AttentionMetadata = metadata, inputs: Inputs = inputs) -> None:
                self._backend.plan_replay(metadata, inputs, self._batch.group_table())

            def run(
                inputs: Inputs = inputs, metadata: AttentionMetadata = metadata, tables: torch.Tensor = tables
            ) -> Outputs:
                return verify.run(inputs, metadata, tables)

            self._verifying[rows] = _Graph(*self._record(plan, run), inputs, metadata)

    def _prepare(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Shared by all graphs: cuBLAS keeps a workspace for every stream.
        self._eager, self._capturing = torch.cuda.Stream(), torch.cuda.Stream()

    def _record(
        self, plan: Callable[[], None], run: Callable[[], Outputs]
    ) -> tuple[Callable[[], None], Outputs]:
        """Capture `run`. Returns (replay function, outputs)."""
        self._eager.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(
            self._eager
        ):  # compiles and loads kernels, which is not possible during capture
            plan()
            run()
        graph = torch.cuda.CUDAGraph()
        with captured_on(self._capturing, graph, pool=self._pool):
            outputs = run()
        hidden, *sampled = outputs
        return graph.replay, Outputs(
            _not_owned(hidden), *(t if t is None else _not_owned(t) for t in sampled)
        )

    def _finish(self) -> None:
        with alone():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory of the eager runs

    def _example(self, tokens: int, rows: int, decode: bool, each: int = 0) -> Inputs:
        """Inputs of the dummy slot in the static buffer, with host numbers that bound those of every replay.

        each: tokens of every row; 0: as the size says
        """
        lens = np.full(rows, max(each, 1), dtype=np.int32)
        if not decode and not each:
            # At least one row has more than one query, so there are fewer rows than tokens. No row is longer than its
            # block table allows; the rest is padding.
            lens = even(min(rows, tokens - 1), tokens, self._max_model_len)
        n = len(lens)
        step = StepInput(
            np.full(n, self._batch.dummy, dtype=np.int64), lens, lens, np.zeros(n, dtype=np.int64),
            np.full(lens.sum(), SAMPLED, dtype=np.int64), n if decode else 0, np.empty((0, 3), dtype=np.int32),
        )  # fmt: skip
        inputs = self._batch.load(step, tokens, rows, self._packed, unread=True)
        longest = self._max_model_len
        return dataclasses.replace(
            inputs, max_seqlen_q=1 if decode else tokens, max_seqlen_k=longest, max_decode_seqlen_k=longest
        )


class _Memory:
    """Device memory described by __cuda_array_interface__, without ownership."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.dtype.itemsize
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "strides": tuple(n * size for n in tensor.stride()),
            "typestr": f"<i{size}", "data": (tensor.data_ptr(), False), "version": 2,
        }  # fmt: skip


def _not_owned(tensor: torch.Tensor) -> torch.Tensor:
    """A view of pool memory that graphs captured later may reuse; the graph itself keeps the memory alive."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
