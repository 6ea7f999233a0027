"""The engine of encoders: whole sequences, images or videos in, one forward pass, vectors or probabilities out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fastkernels.engine.engine import Engine
from fastkernels.engine.execution.encode import EncodeInput
from fastkernels.engine.images import READERS, ImageReader, is_image, is_video
from fastkernels.engine.scheduling.encoding import (
    EncodeRequest,
    EncodeScheduler,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
)


class EncodeEngine(Engine):
    """See Engine. Each step encodes as many waiting sequences as max_num_seqs and max_num_batched_tokens allow."""

    kind = "Encode"
    scheduler: EncodeScheduler
    requests: dict[str, EncodeRequest]

    def _start(self) -> None:
        config = self.config
        self.images: ImageReader | None = None
        if self.inputs in READERS:
            self.images = READERS[self.inputs](self.folder, self.hf_config, self.runner.model)
        self.scheduler = EncodeScheduler(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_waiting
        )

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: PoolingParams | None = None,
        priority: int = 0,
    ) -> EncodeRequest:
        """See Engine. prompt: text, token ids, a PIL image, or a list of frames. params: default PoolingParams()."""
        if params is not None and not isinstance(params, PoolingParams):
            raise ValueError(f"an encoder takes PoolingParams, got {type(params).__name__}")
        params = params or PoolingParams()
        if params.task == "classify" and not self.num_labels:
            raise ValueError(
                f"task 'classify' needs a model with a classifier, which {self.config.model} has not"
            )
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        if self.images is not None:
            image = self.images.patches(prompt)
            request = EncodeRequest(request_id, None, [], params, priority, image=image)
        elif is_image(prompt) or is_video(prompt):
            raise ValueError("the prompt must be text or token ids: this model takes no images")
        else:
            request = EncodeRequest(request_id, *self.token_ids_of(prompt), params, priority)
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens, and the maximum input length is"
                f" {self.max_model_len} tokens"
            )
        return request

    @property
    def num_labels(self) -> int:
        """Classes that the model's classifier tells apart; 0 without one."""
        return getattr(self.runner.model, "num_labels", 0)

    def _check_dimensions(self, wanted: int) -> None:
        """Raise ValueError for a size that the model's vectors cannot be cut to, as its config declares."""
        sizes = getattr(self.hf_config, "matryoshka_dimensions", None)
        if not sizes and not getattr(self.hf_config, "is_matryoshka", False):
            raise ValueError(
                f"dimensions cannot be set, got {wanted}: this model does not declare Matryoshka embeddings"
            )
        most = getattr(self.hf_config, "vision_config", self.hf_config).hidden_size
        if wanted > most or (sizes and wanted not in sizes):
            allowed = f"one of {', '.join(map(str, sizes))}" if sizes else f"1 to {most}"
            raise ValueError(f"dimensions must be {allowed}, got {wanted}")

    def _cut(self, data: np.ndarray, size: int | None) -> np.ndarray:
        """The first `size` values of vectors, of length 1 again if the model's vectors are."""
        if size is None:
            return data
        data = data[..., :size]
        if not self.runner.pooling.normalize:
            return data
        return data / np.maximum(np.linalg.norm(data, axis=-1, keepdims=True), 1e-12)

    def check_room(self, requests: Sequence[EncodeRequest]) -> None:
        self.scheduler.check_room(len(requests))

    def has_room(self, request: EncodeRequest) -> bool:
        return self.scheduler.num_waiting < self.config.max_waiting

    def add_request(self, request_id: str, prompt: Any, params: Any = None, priority: int = 0) -> None:
        if request_id in self.requests:
            raise ValueError(f"there is already a request {request_id!r}")
        if not isinstance(prompt, EncodeRequest):
            prompt = self.make_request(request_id, prompt, params, priority)
        self.scheduler.add(prompt)
        self.requests[request_id] = prompt

    def abort_request(self, request_ids: str | Iterable[str]) -> list[PoolingRequestOutput]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.scheduler.remove([self.requests.pop(i) for i in dict.fromkeys(ids) if i in self.requests])
        return []

    def abort_all(self) -> None:
        self.scheduler.remove_all()
        self.requests.clear()

    def has_unfinished_requests(self) -> bool:
        return len(self.scheduler) > 0

    def step(self) -> list[PoolingRequestOutput]:
        batch = list(self.scheduler.schedule())
        if not batch:
            return []
        images = [r.image for r in batch if r.image is not None]
        step = EncodeInput(
            np.concatenate([np.array(r.prompt_token_ids, np.int64) for r in batch]),
            np.array([r.num_features for r in batch], np.int32),
            [r.params.task for r in batch],
            np.concatenate([image.values for image in images]) if images else None,
            [image.grid for image in images],
        )
        try:
            found = self.executor.launch(step).result()
        except BaseException:
            self.abort_all()
            raise
        self.scheduler.remove(batch)
        for request in batch:
            del self.requests[request.request_id]
        self.stats.prompt_tokens += sum(r.num_tokens for r in batch)
        self.stats.encoded += batch
        return [
            PoolingRequestOutput(
                r.request_id,
                r.prompt,
                r.prompt_token_ids,
                PoolingOutput(self._cut(data, r.params.dimensions)),
                num_tokens=r.num_tokens,
            )
            for r, data in zip(batch, found, strict=True)
        ]
