"""The engine of language models: requests in, one step at a time, outputs out. Not thread-safe: one thread owns it.

A request passes through these stages: make_request checks it and splits it into sequences; the scheduler picks the
batch of each step; step_input makes a StepInput of it; the executor's runners compute and sample; outputs turns the
tokens into text and answers.
"""

from __future__ import annotations

import json
import logging
import random
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fastkernels.engine.cache.blocks import BlockManager, hash_block, salt_root
from fastkernels.engine.cache.cross_blocks import CrossBlocks
from fastkernels.engine.cache.media_cache import MediaCache
from fastkernels.engine.cache.snapshots import Snapshots
from fastkernels.engine.engines.engine import Engine, StepStats
from fastkernels.engine.engines.recognition import Recognizer
from fastkernels.engine.execution.drafts import draft_costs
from fastkernels.engine.inputs import tokenizer
from fastkernels.engine.inputs.audio import AudioReader, SourcePrompt
from fastkernels.engine.inputs.media import MediaPrompt, MediaReader, media_of
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.sampling.unmask_params import UnmaskParams
from fastkernels.engine.scheduling import outputs
from fastkernels.engine.scheduling.data_parallel import DataParallelCore, Schedulers
from fastkernels.engine.scheduling.detokenizer import Detokenizer
from fastkernels.engine.scheduling.engine_core import EngineCore, StepResult
from fastkernels.engine.scheduling.outputs import News, RequestGroup
from fastkernels.engine.scheduling.payoff import Payoff
from fastkernels.engine.scheduling.request import Request, RequestOutput
from fastkernels.engine.scheduling.scheduler import LEAST_TOKENS, QueueFull, Scheduler
from fastkernels.engine.speech import vocabulary
from fastkernels.engine.structured.constraint import Constraint
from fastkernels.engine.structured.grammars import Grammars
from fastkernels.models.common.plans.plan import plan

log = logging.getLogger("fastkernels")


def _least_tokens(config: Any) -> int:
    """The tokens of a shortened step. A mixture reads all its experts; each token is multiplied with few of them."""
    made = plan(config)
    weights = sum(item.weight_bytes(made.dtype) for item in made if item.read != 0)
    return LEAST_TOKENS * max(weights // made.read_bytes, 1)


class LLMEngine(Engine):
    """See Engine."""

    kind = "Generate"
    params: ClassVar[type[SamplingParams]] = SamplingParams
    scheduler: Scheduler | Schedulers
    requests: dict[str, RequestGroup]

    def _start(self) -> None:
        config, limits = self.config, self.executor.limits
        self.eos_token_ids = eos_token_ids(self.folder, self.hf_config, self.tokenizer)
        self.grammars = Grammars(
            self.tokenizer, self.hf_config.vocab_size, self.eos_token_ids, config.json_any_whitespace
        )
        self.media: MediaReader | None = None
        if hasattr(self.runner.model, "encode"):
            own = config.limit_mm_per_prompt or {}
            self.media = MediaReader(
                self.folder, self.runner.model, self.runner.dtype, own, self.max_model_len
            )
            if (
                config.load_format != "dummy"
            ):  # which a folder with a config is enough for, until an image is given
                template = self.media.processor.chat_template
                if self.tokenizer is not None and not self.tokenizer.chat_template:
                    self.tokenizer.chat_template = template
        self.audio: AudioReader | None = None
        if limits.cross is not None:
            self.audio = AudioReader(self.folder, self.runner.model, self.runner.dtype)
        made = [self._scheduler() for _ in range(config.data_parallel_size)]
        self.blocks = made[0].groups[0] if made[0].groups else None
        depth = 2 if self._overlaps() else 1
        self.core: EngineCore | DataParallelCore
        if len(made) > 1:
            self.scheduler = Schedulers(made, config.max_waiting)
            self.core = DataParallelCore(self.scheduler, self.executor, depth)  # type: ignore[arg-type]
        else:
            self.scheduler = made[0]
            self.core = EngineCore(self.scheduler, self.executor, depth)
        self._measure_drafts(self.scheduler.speculation)
        self._begin()

    def _scheduler(self) -> Scheduler:
        """The scheduler of a rank, or of all ranks of one KV cache."""
        config, limits = self.config, self.executor.limits
        groups = [
            BlockManager(count, config.block_size, config.enable_prefix_caching, window)
            for window, count in limits.groups
        ]
        states = media = cross = None
        if limits.snapshots is not None:
            states = Snapshots(
                limits.snapshots, config.max_num_seqs + 1, config.block_size, config.enable_prefix_caching
            )
        if self.media is not None:
            media = MediaCache(limits.media, limits.max_num_batched_tokens)
        if limits.cross is not None:
            count, length = limits.cross
            cross = CrossBlocks(count, config.block_size, length, config.enable_prefix_caching)
        return Scheduler(
            groups, config.max_num_seqs, limits.max_num_batched_tokens, config.max_waiting,
            _least_tokens(self.hf_config), states, media, cross, self._speculation(),
            limits.border,
        )  # fmt: skip

    def _overlaps(self) -> bool:
        """Whether two steps are in flight. Raises ValueError if that is requested and not possible."""
        config, wanted = self.config, self.config.async_scheduling
        reason = None if config.speculative_config is None else self.runner.serial_drafts
        if wanted and reason is not None:
            raise ValueError(
                f"async_scheduling True is not possible with this speculative_config: {reason}; leave it out"
            )
        if wanted is None:
            return reason is None and self.executor.device.type == "cuda"
        return wanted

    def _speculation(self) -> Speculation | None:
        """The settings of drafts. Raises ValueError for a model whose tokens cannot be taken back."""
        given = self.config.speculative_config
        if given is None:
            return None
        if self.executor.limits.border:
            raise ValueError(
                f"speculative_config is not supported for {self.config.model}: its weights change at the borders of"
                " chunks of tokens"
            )
        return Speculation.read(given)

    def _measure_drafts(self, settings: Speculation | None) -> None:
        """Measure at which numbers of sequences steps with drafts pay."""
        if settings is None or not settings.is_measured:
            return
        ratios = draft_costs.measure(self.executor, self.config, settings, self.core.depth)
        if ratios:
            self.scheduler.payoff = Payoff(ratios, settings.depth + 1)
            log.info("%s", self.scheduler.payoff.describe())

    def _begin(self) -> None:
        """Make the state of requests."""
        self._group_of: dict[int, RequestGroup] = {}  # by id of the sequence
        self._seeds = random.Random(self.config.seed)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_cache()

    def read(self, prompt: Any, params: SamplingParams) -> Any:
        """See Engine."""
        if isinstance(prompt, (MediaPrompt, SourcePrompt)) or not isinstance(params, SamplingParams):
            return prompt
        prompt, data = media_of(prompt)
        if not data and self.audio is None:
            return prompt
        return self.read_media(prompt, data, self.prompt_limit(params.truncate_prompt_tokens))

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestGroup:
        """See Engine. cache_salt: only requests with the same one share cached blocks.

        prompt: text, token ids, a MediaPrompt, or {'prompt': text, 'multi_modal_data': {'image': a PIL image, the bytes
        of a file, or a list of these}}
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"a language model takes SamplingParams, got {type(params).__name__}")
        self._check_params(params)
        limit = self.prompt_limit(params.truncate_prompt_tokens)
        made: MediaPrompt | SourcePrompt | None = None
        prompt = self.read(prompt, params)
        if isinstance(prompt, (MediaPrompt, SourcePrompt)):
            made = prompt
            text, ids = made.text, made.token_ids
        else:
            text, ids = self.token_ids_of(prompt, limit, params.truncation_side)
        vocab = self.hf_config.vocab_size
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and the maximum context length is {self.max_model_len}"
                " tokens, output included"
            )
        params.verify(vocab, self.config.max_logprobs)
        speculation = self.scheduler.speculation
        if params.logprobs is not None and speculation is not None and speculation.synthetic:
            raise ValueError(
                "logprobs are not possible with synthetic acceptance: accepted drafts are not the target's tokens"
            )
        if params.n > self.config.max_waiting:
            raise ValueError(
                f"n must be at most {self.config.max_waiting} (max_waiting of this engine), got {params.n}"
            )
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which skip_tokenizer_init left out")
        max_tokens = self._max_tokens(params, room)
        self.scheduler.check_size(len(ids), max_tokens)
        ends = {i for i in params.stop_token_ids or () if 0 <= i < vocab}
        # A grammar allows EOS only where the output is complete.
        ends |= set() if params.ignore_eos and params.structured_outputs is None else set(self.eos_token_ids)
        new_constraint = self._constraints(params)
        group = RequestGroup(request_id, text, ids, params, [])
        for index in range(params.n):
            seed = self._seeds.getrandbits(63) if params.seed is None else _wrap(params.seed + index)
            own = params if index == 0 else replace(params, prompt_logprobs=None)
            group.sequences.append(
                Request(
                    request_id, ids, own, max_tokens, frozenset(ends), text, self._detokenizer(ids, params), seed,
                    priority, index, new_constraint(), salt_root(cache_salt),
                )
            )  # fmt: skip
            sequence = group.sequences[-1]
            if isinstance(made, SourcePrompt):
                sequence.source, root = made.source, salt_root(cache_salt)
                sequence.cache_root = hash_block(root, (), made.source.digest)
            elif made is not None:
                sequence.media, sequence.positions, sequence.shift = made.items, made.positions, made.shift
        if params.prompt_logprobs is not None:
            group.sequences[0].prompt_logprobs = [None] * len(ids)  # steps fill in all but the first
        return group

    def _check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters of another kind of model."""
        if isinstance(params, UnmaskParams):
            raise ValueError(
                f"UnmaskParams are for diffusion language models: {self.config.model} takes SamplingParams"
            )

    def _max_tokens(self, params: SamplingParams, room: int) -> int:
        """The most tokens of an output, of which the context has room for `room`."""
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def read_media(
        self, prompt: str | Sequence[int], data: Mapping[str, Any], limit: int | None = None
    ) -> MediaPrompt | SourcePrompt:
        """A prompt with media {'image': ...}, for make_request; resizes images. Safe in any thread. Raises ValueError.

        limit: of tokens, which is not possible with media
        """
        if self.audio is not None and limit is None:
            return self.audio.read(*self._without_specials(prompt), data)
        if self.media is None and self.audio is None:
            kinds = ", ".join(sorted(data))
            raise ValueError(f"the prompt has media ({kinds}), and {self.config.model} takes text only")
        if limit is not None:
            raise ValueError("truncate_prompt_tokens is not possible for a prompt with media")
        assert self.media is not None
        return self.media.read(*self.token_ids_of(prompt), data)

    @cached_property
    def recognizer(self) -> Recognizer:
        """Makes transcriptions of recordings. Raises ValueError for a model or a tokenizer that cannot."""
        if self.audio is None:
            raise ValueError(f"{self.config.model} takes text only, and no audio")
        window = self.audio.most / self.audio.rate
        states, size = self.runner.model.source_length, self.hf_config.vocab_size
        found = vocabulary.read(self.folder, self.tokenizer, size, window, states)
        return Recognizer(found, self.audio, self.tokenizer, self.max_model_len)

    def _without_specials(self, prompt: str | Sequence[int]) -> tuple[str | None, list[int]]:
        """As token_ids_of, for a decoder whose prompt is as the caller writes it."""
        if isinstance(prompt, str) and self.tokenizer is not None:
            return prompt, self.token_ids_of(tokenizer.encode(self.tokenizer, prompt, special=False))[1]
        return self.token_ids_of(prompt)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int] | RequestGroup,
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        if request_id in self.requests:
            raise ValueError(f"there is already a request {request_id!r}")
        if not isinstance(prompt, RequestGroup):
            prompt = self.make_request(request_id, prompt, params or SamplingParams(), priority)
        self.scheduler.check_room(len(prompt.sequences))
        for sequence in prompt.sequences:
            self.scheduler.add(sequence)
            self._group_of[id(sequence)] = prompt
        self.requests[request_id] = prompt

    def check_room(self, requests: Sequence[RequestGroup]) -> None:
        self.scheduler.check_room(sum(len(r.sequences) for r in requests))

    def has_room(self, request: RequestGroup) -> bool:
        return self.scheduler.num_waiting + len(request.sequences) <= self.config.max_waiting

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        groups = [self.requests.pop(i) for i in dict.fromkeys(ids) if i in self.requests]
        left = {id(g): [s for s in g.sequences if s.finish_reason is None] for g in groups}
        for sequences in left.values():
            for sequence in sequences:
                sequence.finish("abort")
                if sequence.detokenizer is not None:
                    sequence.detokenizer.finish(look=False)
            self.core.end(sequences)
            self._forget(sequences)
        found = (outputs.make_output(g, [News(s) for s in left[id(g)]]) for g in groups)
        return [o for o in found if o is not None]

    def abort_all(self) -> None:
        self.core.reset()
        groups = self.requests.values()
        self.stats.finished += [s for g in groups for s in g.sequences if id(s) in self._group_of]
        self._group_of.clear()
        self.requests.clear()

    def shutdown(self) -> None:
        super().shutdown()
        self.grammars.close()

    def has_unfinished_requests(self) -> bool:
        return self.core.busy

    def step(self) -> list[RequestOutput]:
        """See Engine. With async scheduling two batches are in flight, so the first call returns nothing."""
        try:
            return [output for done in self.core.results() for output in self._read(done)]
        except BaseException:  # the blocks of the failed step are already in the prefix cache
            self.abort_all()
            raise

    def _read(self, done: StepResult) -> list[RequestOutput]:
        now, output = time.monotonic(), done.output
        for row, found in output.prompt_logprobs.items():
            request, start = done.batch.requests[row], done.batch.starts[row]
            outputs.fill_prompt_logprobs(request, start, found, self.tokenizer)
        news: dict[int, tuple[RequestGroup, list[News]]] = {}
        for row, request in done.news:
            count = done.counts.get(row, 1)
            item = News(request, request.output_token_ids[-count:])
            if request.params.logprobs is not None and output.logprobs is not None:
                outputs.add_logprobs(item, output.logprobs, row, self.tokenizer)
            self._count(request, now, count)
            group = self._group_of[id(request)]
            news.setdefault(id(group), (group, []))[1].append(item)
        self._forget([r for _, r in done.news if r.finish_reason is not None])
        made = (outputs.make_output(group, items) for group, items in news.values())
        return [o for o in made if o is not None]

    def _forget(self, sequences: list[Request]) -> None:
        """Remove finished sequences; a request ends with its last sequence."""
        self.stats.finished += sequences
        for sequence in sequences:
            group = self._group_of.pop(id(sequence))
            if group.finished:
                self.requests.pop(group.request_id, None)

    def _count(self, request: Request, now: float, tokens: int = 1) -> None:
        self.stats.generation_tokens += tokens
        if request.first_token_time is None or request.last_token_time is None:
            request.first_token_time = now
            self.stats.prompt_tokens += len(request.prompt_token_ids)
            self.stats.ttft.append(now - request.arrival)
        else:
            self.stats.itl.append(now - request.last_token_time)
        request.last_token_time = now

    def _constraints(self, params: SamplingParams) -> Callable[[], Constraint | None]:
        """Makes the constraint of each of the request's sequences. Compiles its grammar, unless that is cached."""
        banned = self._banned(params.bad_words or ())
        times = params.timestamps
        if (
            params.structured_outputs is None
            and params.allowed_token_ids is None
            and not banned
            and times is None
        ):
            return lambda: None
        structured = params.structured_outputs
        grammar = None if structured is None else self.grammars.get(structured)

        def make() -> Constraint:
            made = Constraint(self.hf_config.vocab_size, grammar, params.allowed_token_ids, banned, times)
            if not made.words.any():
                raise ValueError(
                    "no token is allowed by structured_outputs, allowed_token_ids and bad_words together"
                )
            return made

        return make

    def _banned(self, words: Sequence[str]) -> list[list[int]]:
        """The token sequences of bad_words: of each word alone, and after a space where that is another first token."""
        tokenizer: Any = self.tokenizer
        if words and tokenizer is None:
            raise ValueError("bad_words need a tokenizer, which skip_tokenizer_init left out")
        found: list[list[int]] = []
        for word in words:
            alone, spaced = (
                list(tokenizer(prefix + word.lstrip(), add_special_tokens=False).input_ids)
                for prefix in ("", " ")
            )
            if not alone:
                raise ValueError(f"bad_words: {reprlib.repr(word)} has no token in this vocabulary")
            found.append(alone)
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                found.append(spaced)
        return found

    def _detokenizer(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            ids,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
        )


def _wrap(seed: int) -> int:
    """As a signed 64-bit integer, with wrap-around."""
    return (seed + 2**63) % 2**64 - 2**63


def eos_token_ids(folder: Path, hf_config: Any, tokenizer: Any) -> list[int]:
    """EOS tokens of generation_config.json (instruct models have several) or config.json, and of the tokenizer."""
    try:
        found = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):  # missing, not JSON, or not an object
        found = None
    found = found if found is not None else getattr(hf_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return sorted({i for i in ids if isinstance(i, int)})


__all__ = ["LLMEngine", "QueueFull", "StepStats"]
