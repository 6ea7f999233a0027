"""The common part of all engines: checkpoint, tokenizer, executor, checked requests, and steps."""

from __future__ import annotations

import logging
import operator
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fastkernels.core.env import Environment
from fastkernels.engine.cache.blocks import BlockManager
from fastkernels.engine.execution.executor import make_executor
from fastkernels.engine.execution.forward.startup import Phases
from fastkernels.engine.execution.nodes import listening
from fastkernels.engine.inputs import tokenizer
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.runners import RUNNERS, runner_name
from fastkernels.engine.scheduling.denoising import ImageRequest
from fastkernels.engine.scheduling.rendering import RenderRequest
from fastkernels.engine.scheduling.request import Request
from fastkernels.engine.scheduling.rollout import FrameRequest
from fastkernels.engine.scheduling.speaking import SpeechRequest
from fastkernels.models.common.checkpoints import weights
from fastkernels.models.common.configs import length
from fastkernels.models.common.descriptions import registry
from fastkernels.models.common.plans import build
from fastkernels.patch import patch_from_environment

log = logging.getLogger("fastkernels")


@dataclass
class StepStats:
    """Metrics since the last take_stats(). Times in seconds.

    encoded: finished requests of encoders, recommenders and robot policies
    aborted: requests of these that ended without a result, and of images or frames; of text they are in finished
    denoise_steps: steps of single images or frames, of which denoise_steps_reused ran no denoiser
    images: finished requests for them; frames: finished frames.
    speeches: finished requests for speech; ttfs: times to their first sound; sound: seconds of speech
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    encoded: list[Any] = field(default_factory=list)
    aborted: int = 0
    denoise_steps: int = 0
    denoise_steps_reused: int = 0
    images: list[ImageRequest | RenderRequest | FrameRequest] = field(default_factory=list)
    frames: int = 0
    speeches: list[SpeechRequest] = field(default_factory=list)
    ttfs: list[float] = field(default_factory=list)
    sound: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A resolved checkpoint with its config. runner, inputs: those of the model file's ARCH."""

    folder: Path
    hf_config: Any
    runner: str
    inputs: str
    phases: Phases

    @staticmethod
    def open(config: EngineConfig) -> Checkpoint:
        """Resolve config.model and read its config. Raises CheckpointError, UnknownName."""
        phases = Phases()
        folder = weights.resolve(config.model)
        hf_config = build.load_config(folder)
        phases.mark("config")
        runner = runner_name(hf_config, folder)
        inputs = registry.find(build.architecture_of(hf_config, folder)).arch.inputs
        return Checkpoint(folder, hf_config, runner, inputs, phases)


class Engine(ABC):
    """Builds a model from an EngineConfig and runs requests. Not thread-safe: one thread owns it.

    kind      the key of RUNNERS whose models it runs
    inputs    what a request holds: 'tokens', 'images', 'videos', 'prompts', 'samples' or 'cameras'
    requests  unfinished requests by id
    blocks    the KV cache's blocks; None without a cache

    Raises CheckpointError, UnknownName or ValueError for a model or an option that is not supported.
    """

    kind: ClassVar[str]
    requests: dict[str, Any]
    scheduler: Any
    blocks: BlockManager | None = None

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        opened = checkpoint or Checkpoint.open(config)
        if opened.runner != self.kind:
            raise ValueError(f"{config.model} cannot be used here: it is for {RUNNERS[opened.runner].use}")
        if config.data_parallel_size > 1 and self.kind != "Generate":
            raise ValueError(
                f"data_parallel_size {config.data_parallel_size} is not supported for {config.model}, only 1: it is for"
                " language models that generate one token after the other"
            )
        self.config, self.hf_config, self.phases = config, opened.hf_config, opened.phases
        self.hf_config.max_model_len = config.max_model_len  # chooses the factors of LongRoPE
        self.inputs = opened.inputs
        self.tokenizer = None
        if not config.skip_tokenizer_init and self.inputs == "tokens":
            self.tokenizer = tokenizer.load(config.tokenizer or opened.folder)
        self.folder = opened.folder
        self.phases.mark("tokenizer")
        with self.phases.counting():
            self.executor = make_executor(config, opened.folder, self.hf_config, self.phases)
        self.max_model_len: int = self.executor.limits.max_model_len
        if said := length.notice(self.hf_config, config.max_model_len or length.longest(self.hf_config) or 0):
            log.warning("%s", said)
        self.requests = {}
        self.stats = StepStats()
        self.patched: Any = None  # the patch of an integration, which sets it
        try:
            self._start()
            patch_from_environment(self)
        except BaseException:
            self.executor.shutdown()  # otherwise other ranks end with the last reference to this engine
            raise
        self.phases.mark("rest")
        log.info("%s", self.phases.line())

    @property
    def runner(self) -> Any:
        """The Runner of this process."""
        return self.executor.runner

    @property
    def use(self) -> str:
        """How to call this model, for error messages."""
        return RUNNERS[self.kind].use

    @abstractmethod
    def _start(self) -> None:
        """Make the scheduler and the engine's own state."""

    def read(self, prompt: Any, params: Any) -> Any:
        """The prompt for make_request with its media read, which takes long. Safe in any thread. Raises ValueError."""
        return prompt

    @abstractmethod
    def make_request(self, request_id: str, prompt: Any, params: Any, priority: int = 0) -> Any:
        """Check a request without queuing it. Safe in any thread. Raises ValueError for an unsupported request."""

    @abstractmethod
    def check_room(self, requests: Sequence[Any]) -> None:
        """Raise QueueFull if these requests do not fit into the waiting queue."""

    @abstractmethod
    def has_room(self, request: Any) -> bool:
        """Whether add_request would accept it now. An empty queue accepts every checked request."""

    @abstractmethod
    def add_request(self, request_id: str, prompt: Any, params: Any = None, priority: int = 0) -> None:
        """Queue a request: a prompt, or what make_request returned. Raises ValueError, QueueFull."""

    @abstractmethod
    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        """Stop requests, ignoring unknown ids. Returns their last outputs."""

    @abstractmethod
    def abort_all(self) -> None:
        """Stop all requests without outputs, and forget what is cached."""

    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to step."""

    @abstractmethod
    def step(self) -> list[Any]:
        """Run one step and return an output for each request with news. After an exception no request is left."""

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes, e.g. after the model's code has changed.

        Running requests go on with the keys that they have, which no other request finds.
        """
        if self.blocks is not None:
            self.blocks.reset_cache()

    def take_stats(self) -> StepStats:
        """The metrics since the last call. They grow until taken, so the caller of `step` must take them."""
        stats, self.stats = self.stats, StepStats()
        return stats

    def shutdown(self) -> None:
        """End the processes of other ranks. An engine with such processes cannot be used afterwards."""
        self.executor.shutdown()

    def token_ids_of(
        self, prompt: str | Sequence[int], limit: int | None = None, side: str | None = None
    ) -> tuple[str | None, list[int]]:
        """(text, token ids) of a prompt; text is None for token ids. Raises ValueError.

        limit, side: of tokenizer.encode.
        """
        if isinstance(prompt, str):
            text, ids = prompt, self._encode(prompt, limit, side)
        else:
            text, ids = None, token_ids(prompt)
            ids = ids if limit is None else tokenizer.cut(ids, limit, side)
        vocab = self.hf_config.vocab_size + getattr(self.hf_config, "more_token_ids", 0)
        if not ids:
            raise ValueError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise ValueError(f"prompt token id {wrong!r} is not in the vocabulary (0 to {vocab - 1})")
        return text, ids

    def prompt_limit(self, wanted: int | None, room: int = 1) -> int | None:
        """The most tokens of a prompt for truncate_prompt_tokens; -1 leaves room for `room` more. Raises ValueError."""
        if wanted is not None and wanted > self.max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens must be at most {self.max_model_len}, the maximum context length, got {wanted}"
            )
        return max(1, self.max_model_len - room) if wanted == -1 else wanted

    def _encode(self, text: str, limit: int | None, side: str | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, which skip_tokenizer_init left out")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not valid Unicode text: {error}") from error
        return tokenizer.encode(self.tokenizer, text, limit=limit, side=side)


def make_engine(config: EngineConfig) -> Engine:
    """The engine for this model, as its model file names it. Raises what Engine raises."""
    if config.node_rank:
        raise ValueError(
            f"node_rank {config.node_rank} has no engine of its own: use LLM or `fk-bench serve` there"
        )
    with listening(config):
        Environment.read()  # an invalid variable is an error now, not at the first step
        opened = Checkpoint.open(config)
        kind = RUNNERS[opened.runner]
        if not kind.engine:
            raise ValueError(f"{config.model} cannot be used alone: it is for {kind.use}")
        return registry.load(kind.engine)(config, opened)


def token_ids(prompt: Any) -> list[int]:
    """Token ids as Python integers, from any kind of integer. Raises ValueError."""
    if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Iterable):
        raise ValueError(f"the prompt must be text or token ids, got {reprlib.repr(prompt)}")
    ids = list(prompt)
    if set(map(type, ids)) <= {int}:
        return ids
    for token in ids:
        if not is_integer(token):
            raise ValueError(f"prompt token id {reprlib.repr(token)} is not an integer")
    return [operator.index(token) for token in ids]


def is_integer(value: Any) -> bool:
    """Whether the value is an integer of any kind, including numpy's, but not a bool."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
