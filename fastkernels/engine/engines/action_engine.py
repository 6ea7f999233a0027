"""The engine of robot policies: observations in, all denoising steps in one batch, chunks of actions out."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Mapping
from typing import Any

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.engines.engine import Checkpoint, token_ids
from fastkernels.engine.execution.runners.act import ActInput
from fastkernels.engine.inputs import tokenizer
from fastkernels.engine.inputs.images import decode, is_image, rgb
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.acting import ActionParams, ActionRequest, ActionRequestOutput
from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.encoding import BudgetScheduler
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError


class ActionEngine(BudgetEngine):
    """See Engine. A step acts on as many waiting observations as max_num_seqs and max_num_batched_tokens allow."""

    kind = "Act"
    request_class = ActionRequest
    scheduler: BudgetScheduler[ActionRequest]
    requests: dict[str, ActionRequest]

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for robot policies, only 1"
            )
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        super()._start()
        self._seeds = random.Random(self.config.seed)
        if self.inputs == "cameras" and not self.config.skip_tokenizer_init:
            try:
                self.tokenizer = tokenizer.load(self.config.tokenizer or self.folder)
            except CheckpointError as error:
                if self.config.tokenizer:
                    raise
                self._no_tokenizer = str(error)

    _no_tokenizer = "skip_tokenizer_init left it out"

    def make_request(
        self, request_id: str, prompt: Any, params: ActionParams | None = None, priority: int = 0
    ) -> ActionRequest:
        """See Engine. prompt: an observation, as the model's `read` documents it, with a prompt as text or token ids.

        Raises ValueError, whose message begins with "the input" or the parameter.
        """
        params = params or ActionParams()
        if not isinstance(params, ActionParams):
            raise ValueError(f"a robot policy takes ActionParams, got {type(params).__name__}")
        model = self.runner.model
        most = model.chunk[0]
        count = params.num_actions or model.num_actions
        if count > most:
            raise ValueError(f"num_actions must be at most {most}, the model's chunk, got {count}")
        steps = params.num_steps or model.num_steps
        if steps > self.config.max_steps:
            raise ValueError(f"num_steps must be at most {self.config.max_steps} (max_steps), got {steps}")
        model.check_steps(steps)
        observation = model.read(self._plain(prompt) if self.inputs == "cameras" else prompt)
        if observation.size > self.max_model_len:
            raise ValueError(
                f"the input has the size of {observation.size} tokens, and a request may have {self.max_model_len}"
                " (max_num_batched_tokens)"
            )
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        return ActionRequest(request_id, observation, params, count, steps, seed, priority)

    def _plain(self, given: Any) -> Any:
        """An observation with RGB images and token ids. Raises ValueError."""
        if not isinstance(given, Mapping):
            return given  # the model refuses it
        made, images = dict(given), given.get("images")
        if isinstance(images, Mapping):
            images = list(images.values())
        elif is_image(images):
            images = [images]
        if isinstance(images, (list, tuple)):
            if len(images) > (most := self.runner.model.most_images):  # before any is decoded
                raise ValueError(f"the input has {len(images)} images, and at most {most} are allowed")
            images = [_image(image, i) for i, image in enumerate(images)]
        made["images"], made["prompt"] = images, self._prompt(given.get("prompt"))
        return made

    def _prompt(self, prompt: Any) -> list[int]:
        if prompt is None:
            raise ValueError("the input needs `prompt`, a text or token ids")
        if not isinstance(prompt, str):
            try:
                return token_ids(prompt)
            except ValueError as error:
                raise ValueError(f"the input cannot be read: {error}") from error
        if self.tokenizer is None:
            raise ValueError(
                "the input has a `prompt` of text, and this engine has no tokenizer: give token ids"
                f" ({self._no_tokenizer})"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the input has a `prompt` that is not valid Unicode text: {error}") from error
        bos: str = getattr(self.tokenizer, "bos_token", None) or ""
        return tokenizer.encode(self.tokenizer, self.runner.model.prompt_text(prompt, bos), special=False)

    def step(self) -> list[ActionRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        batch, found = self._compute(
            batch,
            lambda some: ActInput(
                [r.observation for r in some], [r.seed for r in some], [r.steps for r in some]
            ),
        )
        self._remove(batch)
        self.stats.prompt_tokens += sum(r.num_tokens for r in batch)
        self.stats.encoded += batch
        return [
            ActionRequestOutput(r.request_id, actions[: r.num_actions], r.seed, r.steps, r.num_tokens)
            for r, actions in zip(batch, found, strict=True)
        ]


def _image(given: Any, i: int) -> Any:
    """The RGB image of a PIL image or of a file's bytes. Raises ValueError."""
    if isinstance(given, bytes):
        try:
            return decode(given)
        except ValueError as error:
            raise ValueError(f"the input has as image {i} {error}") from error
    if not is_image(given):
        raise ValueError(f"the input has {reprlib.repr(given)} as image {i}, which is no PIL image")
    return rgb(given)
