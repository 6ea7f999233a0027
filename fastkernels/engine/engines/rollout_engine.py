"""The engine of world models: first frames and actions in, the frames that follow out, one after the other."""

from __future__ import annotations

import random
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.engines.engine import Checkpoint
from fastkernels.engine.execution.runners.rollout import Beginning, RolloutInput
from fastkernels.engine.inputs.images import is_image, rgb
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.denoising import SEEDS
from fastkernels.engine.scheduling.encoding import BudgetScheduler
from fastkernels.engine.scheduling.rollout import FrameParams, FrameRequest, FrameRequestOutput


class RolloutEngine(BudgetEngine):
    """See Engine. Each step is a pass over one frame of every running request, each at its own denoising step.

    A request runs while its tokens fit into max_num_batched_tokens and its window into the cache.
    """

    kind = "Rollout"
    request_class = FrameRequest
    scheduler: BudgetScheduler[FrameRequest]
    requests: dict[str, FrameRequest]

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint | None = None):
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size {config.tensor_parallel_size} is not supported for world models, only 1"
            )
        super().__init__(config, checkpoint)

    def _start(self) -> None:
        config = self.config
        self.scheduler = BudgetScheduler(self.runner.slots, config.max_num_batched_tokens, config.max_waiting)
        self._seeds = random.Random(config.seed)
        self._drops: list[str] = []

    @property
    def model(self) -> Any:
        return self.runner.model

    def make_request(
        self, request_id: str, prompt: Any, params: FrameParams | None = None, priority: int = 0
    ) -> FrameRequest:
        """See Engine.

        prompt: {"images": a PIL image or a list of them, the first frames; "actions": one for each frame to make;
        "prompt_actions": one for each image (default: no action)}. Images of another size than the model's are resized.
        """
        params, model = params or FrameParams(), self.model
        if not isinstance(params, FrameParams):
            raise ValueError(f"a model that makes frames takes FrameParams, got {type(params).__name__}")
        if not isinstance(prompt, Mapping):
            raise ValueError(
                f"the prompt must be an object with images and actions, got {reprlib.repr(prompt)}"
            )
        if unknown := [key for key in prompt if key not in ("images", "actions", "prompt_actions")]:
            raise ValueError(f"the prompt has the unknown field {reprlib.repr(unknown[0])}")
        steps = params.num_inference_steps or min(model.steps, self.config.max_steps)
        if steps > self.config.max_steps:
            raise ValueError(f"num_inference_steps must be at most {self.config.max_steps}, got {steps}")
        model.schedule(steps)
        images = self._images(prompt.get("images"))
        later = self._actions("actions", prompt.get("actions"), self.config.max_frames)
        if not later:
            raise ValueError("actions must have at least one action: each makes a frame")
        first = prompt.get("prompt_actions")
        if first is None:
            before = np.zeros((len(images), model.num_actions), np.float32)
        else:
            listed = self._actions("prompt_actions", first, len(images))
            if len(listed) != len(images):
                raise ValueError(
                    f"prompt_actions must have one action for each of {len(images)} images, got {len(listed)}"
                )
            before = np.stack(listed)
        seed = self._seeds.randrange(SEEDS) if params.seed is None else params.seed
        actions = np.concatenate((before, np.stack(later)))
        return FrameRequest(request_id, images, actions, params, steps, seed, model.tokens, priority)

    def _images(self, given: Any) -> np.ndarray:
        listed = [given] if is_image(given) else given
        most = max(self.model.window - 1, 1)
        if not isinstance(listed, (list, tuple)) or not listed or not all(map(is_image, listed)):
            raise ValueError(f"images must be a PIL image, or a list of them, got {reprlib.repr(given)}")
        if len(listed) > most:
            raise ValueError(
                f"images must be at most {most}, the frames that the model sees, got {len(listed)}"
            )
        height, width = self.model.size
        made = []
        for image in map(rgb, listed):
            if image.size != (width, height):
                image = image.resize((width, height), 2)  # bilinear
            made.append(np.asarray(image, np.uint8).transpose(2, 0, 1))
        return np.ascontiguousarray(np.stack(made))

    def _actions(self, name: str, given: Any, most: int) -> list[np.ndarray]:
        if not isinstance(given, (list, tuple, np.ndarray)):
            raise ValueError(f"{name} must be a list of actions, got {reprlib.repr(given)}")
        if len(given) > most:
            raise ValueError(f"{name} must be at most {most}, got {len(given)}")
        return [self.model.read_action(f"{name}[{i}]", action) for i, action in enumerate(given)]

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._drops += [i for i in dict.fromkeys(ids) if i in self.requests]
        super().abort_request(ids)
        if not self.requests:  # no step would tell the runner
            self._tell()
        return []

    def abort_all(self) -> None:
        self._drops += self.requests
        super().abort_all()

    def _tell(self) -> None:
        drops, self._drops = self._drops, []
        self.executor.launch(RolloutInput((), (), drops))

    def step(self) -> list[FrameRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        drops, self._drops = self._drops, []
        starts = [Beginning(r.request_id, r.images, r.actions, r.steps, r.seed) for r in batch if r.step == 0]
        found = self._launch(RolloutInput(starts, [(r.request_id, r.step) for r in batch], drops))
        for request in batch:
            request.step += 1
        ended = [r for r in batch if r.step == r.passes]
        self._remove(ended)
        self.stats.denoise_steps += len(batch)
        self.stats.frames += len(found)
        self.stats.images += ended
        return [
            FrameRequestOutput(
                r.request_id, r.step // (r.steps + 1) - 1, [found[r.request_id]], r.seed, r.step == r.passes
            )
            for r in batch
            if r.request_id in found
        ]

    @property
    def steps_left(self) -> int:
        """Passes that the queued and running requests still need."""
        return sum(r.passes - r.step for r in list(self.requests.values()))
