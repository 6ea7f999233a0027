"""The engine of encoders: whole sequences, images or videos in, one forward pass, vectors or probabilities out."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fastkernels.engine.engines.budget_engine import BudgetEngine
from fastkernels.engine.execution.runners.encode import EncodeInput
from fastkernels.engine.execution.runners.segmenting import Followed, NextFrames, Objects, Wanted
from fastkernels.engine.inputs import tokenizer
from fastkernels.engine.inputs.images import READERS, ImageReader, Patches, is_image, is_video
from fastkernels.engine.inputs.tokenizer import encode_pair
from fastkernels.engine.objects import detection, segmentation
from fastkernels.engine.objects.marks import Marks
from fastkernels.engine.objects.segmentation import CLIP_FRAMES
from fastkernels.engine.sampling.pooling import PoolingOutput, PoolingParams
from fastkernels.engine.scheduling.encoding import BudgetScheduler, EncodeRequest, PoolingRequestOutput
from fastkernels.models.common.interfaces.detector import Detector
from fastkernels.models.common.interfaces.retrieval import Form
from fastkernels.models.common.interfaces.segmenter import (
    ClipSegmenter,
    ImageSegmenter,
    MarkSegmenter,
    Segmenter,
)

FINDING = {"detect": "detects no objects", "segment": "finds no objects that a prompt names"}


class EncodeEngine(BudgetEngine):
    """See Engine. Each step encodes as many waiting sequences as max_num_seqs and max_num_batched_tokens allow."""

    kind = "Encode"
    request_class = EncodeRequest
    scheduler: BudgetScheduler[EncodeRequest]
    requests: dict[str, EncodeRequest]

    def _start(self) -> None:
        super()._start()
        tokenizer.lower(self.tokenizer, self.folder)
        self.images: ImageReader | None = None
        if self.inputs in READERS:
            self.images = READERS[self.inputs](self.folder, self.hf_config, self.runner.model)
        if self.images is not None and self.segments:
            if isinstance(self.runner.model, Segmenter) and not self.config.skip_tokenizer_init:
                self.tokenizer = tokenizer.load(self.config.tokenizer or self.folder)
            self.prompts = segmentation.PromptReader(self.images, self.runner.model, self.tokenizer)

    def read(self, prompt: Any, params: Any) -> Any:
        """See Engine."""
        if self.images is None or self.segments or isinstance(prompt, Patches):
            return prompt
        return self.images.patches(prompt)

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: PoolingParams | None = None,
        priority: int = 0,
        token_type_ids: Sequence[int] | None = None,
    ) -> EncodeRequest:
        """See Engine. prompt: text, token ids, a PIL image, a list of frames, or what PromptReader.read takes.

        params          default: PoolingParams(), of a detector with the task 'detect', of a segmenter with 'segment'
        token_type_ids: of token ids, 1 for the second text of a pair.
        """
        if params is not None and not isinstance(params, PoolingParams):
            raise ValueError(f"an encoder takes PoolingParams, got {type(params).__name__}")
        params = params or PoolingParams(self._only or "embed")
        if self._only not in ("", params.task) or (not self._only and params.task in FINDING):
            only = f"is for the task {self._only!r} only" if self._only else FINDING[params.task]
            raise ValueError(f"task {params.task!r} is not available: {self.config.model} {only}")
        if params.task == "classify" and not self.num_labels:
            raise ValueError(
                f"task 'classify' needs a model with a classifier, which {self.config.model} has not"
            )
        missing = getattr(self.runner.model, "missing", {})
        if params.task == "token_classify" and not hasattr(self.runner.model, "token_classify"):
            raise ValueError(
                f"task 'token_classify' needs a model with lexical weights, which {self.config.model} has not"
            )
        if params.task in missing:
            raise ValueError(
                f"task {params.task!r} needs the head in {missing[params.task]}, which {self.config.model} has not"
            )
        if params.dimensions is not None:
            if params.task not in ("embed", "token_embed"):
                raise ValueError(
                    f"dimensions apply to vectors, got {params.dimensions} for task {params.task!r}"
                )
            self._check_dimensions(params.dimensions)
        if self.segments and isinstance(prompt, Mapping) and "video" in prompt:
            request = self._clip_request(request_id, prompt, params, priority)
        elif self.segments:
            image, concept = self.prompts.read(prompt, params.masks or params.semantic)
            _check_target(params, concept)
            ids = list(concept.input_ids)
            request = EncodeRequest(
                request_id, concept.name, ids, params, priority, image=image, concept=concept
            )
        elif self.images is not None:
            image = self.read(prompt, params)
            request = EncodeRequest(request_id, None, [], params, priority, image=image)
        elif is_image(prompt) or is_video(prompt):
            raise ValueError("the prompt must be text or token ids: this model takes no images")
        else:
            text, ids = self.token_ids_of(prompt)
            types = token_type_ids if getattr(self.hf_config, "type_vocab_size", 1) > 1 else None
            request = EncodeRequest(request_id, text, ids, params, priority, token_type_ids=types)
            self._shape(request)
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"the prompt has {request.num_tokens} tokens, and the maximum input length is"
                f" {self.max_model_len} tokens"
            )
        return request

    def _clip_request(
        self, request_id: str, prompt: Mapping[str, Any], params: PoolingParams, priority: int
    ) -> EncodeRequest:
        if not self.follows:
            raise ValueError(f"the prompt has a video, and {self.config.model} takes images only")
        for name, default in (
            ("mask_threshold", None),
            ("max_detections", None),
            ("semantic", False),
            ("multimask_output", True),
        ):
            if (value := getattr(params, name)) != default:
                raise ValueError(f"{name} applies to images, not to a video, got {value!r}")
        clip = self.prompts.read_clip(prompt, params.masks)
        ids = [i for text in clip.texts for i in text]
        return EncodeRequest(request_id, ", ".join(clip.names), ids, params, priority, clip=clip)

    def pair_request(
        self, request_id: str, query: Any, document: Any, params: PoolingParams | None = None
    ) -> EncodeRequest:
        """A request of a cross-encoder for two texts. Raises ValueError, as make_request does."""
        for text in (query, document):
            if not isinstance(text, str):
                raise ValueError(f"a cross-encoder scores pairs of texts, got {reprlib.repr(text)}")
        if self.tokenizer is None:
            raise ValueError("a pair of texts needs a tokenizer, which skip_tokenizer_init left out")
        ids, types = encode_pair(self.tokenizer, query, document)
        return self.make_request(request_id, ids, params or PoolingParams("classify"), token_type_ids=types)

    def _shape(self, request: EncodeRequest) -> None:
        """Give the request's tokens the form of its role, and choose the vectors that count. Raises ValueError."""
        params, ids = request.params, request.prompt_token_ids
        if params.task == "token_classify":  # weights of words: the special tokens around them do not count
            config = self.hf_config
            request.kept = np.ones(len(ids), bool)
            request.kept[0] = ids[0] != config.bos_token_id
            request.kept[-1] &= ids[-1] != config.eos_token_id
        if params.task not in ("token_embed", "maxsim"):
            if params.role:
                raise ValueError(
                    f"role {params.role!r} applies to vectors for MaxSim, the task 'token_embed', got {params.task!r}"
                )
            return
        if (form := self.forms.get(params.role)) is not None:
            shaped = form.shape(ids)
            request.prompt_token_ids, request.seen, request.kept = shaped.ids, shaped.seen, shaped.kept
        elif params.role or params.task == "maxsim":
            head = getattr(self.runner.model, "missing", {}).get("late_interaction")
            needed = f"the head in {head}" if head else "a model of late interaction"
            if self.tokenizer is None and not head:
                needed += " with its tokenizer"
            raise ValueError(
                f"role {params.role!r}, vectors for MaxSim, needs {needed}, which {self.config.model} has not"
            )

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """The forms of texts by role, for a model of late interaction; {} for others. Raises ValueError."""
        make = getattr(self.runner.model, "forms", None)
        return {} if make is None or self.tokenizer is None else make(self.tokenizer)

    @property
    def scored_by(self) -> str:
        """How scores of texts are computed: 'cross-encoder', 'late-interaction' or 'bi-encoder', as vLLM says.

        Raises ValueError for a model without scores of texts.
        """
        if self.num_labels > 1 or self.images is not None:
            what = (
                f"a classifier of {self.num_labels} labels"
                if self.num_labels > 1
                else f"{self.inputs}, not texts"
            )
            raise ValueError(
                f"scores need a model of texts with one label or none; {self.config.model} has {what}"
            )
        return "cross-encoder" if self.num_labels else getattr(self.runner.model, "scored_by", "bi-encoder")

    @property
    def detects(self) -> bool:
        """Whether the model finds objects in images."""
        return isinstance(self.runner.model, Detector)

    @property
    def segments(self) -> bool:
        """Whether the model finds what a prompt names or marks in images."""
        return isinstance(self.runner.model, ImageSegmenter)

    @property
    def names(self) -> bool:
        """Whether the model finds what a text or example boxes name."""
        return isinstance(self.runner.model, Segmenter)

    @property
    def marks(self) -> bool:
        """Whether the model finds the object that points, a box or a mask mark."""
        return isinstance(self.runner.model, MarkSegmenter)

    @property
    def follows(self) -> bool:
        """Whether the model also follows such objects through videos."""
        return isinstance(self.runner.model, ClipSegmenter)

    @property
    def _only(self) -> str:
        """The only task of a model that finds objects; '' for others."""
        return "detect" if self.detects else "segment" if self.segments else ""

    @property
    def use(self) -> str:
        embeds, detects, segments = super().use.split(", or ")
        return {"detect": detects, "segment": segments}.get(self._only, embeds)

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

    def _cut(self, data: np.ndarray, params: PoolingParams) -> np.ndarray:
        """The first values of vectors, as many as params.dimensions; of length 1 again if the model's vectors are."""
        if params.dimensions is None:
            return data
        data = data[..., : params.dimensions]
        if not self.runner.pooling.normalize or params.use_activation is False:
            return data
        return data / np.maximum(np.linalg.norm(data, axis=-1, keepdims=True), 1e-12)

    def _output(self, request: EncodeRequest, data: Any) -> PoolingOutput:
        if request.concept is not None and request.image is not None:
            return _segmented(data, request.concept, request.image)
        if request.params.task == "detect" and request.image is not None:
            names = getattr(self.hf_config, "id2label", None)
            return detection.detected(data, request.image, request.params, names)
        return PoolingOutput(self._cut(_kept(request, data), request.params))

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        begun = any(i in self.requests and self.requests[i].done for i in ids)
        found = super().abort_request(ids)
        if begun and not any(r.done for r in self.requests.values()):
            self._launch(EncodeInput.of_clips([]))  # frees what is known of them
        return found

    def abort_all(self) -> None:
        begun = any(r.clip is not None for r in self.requests.values())
        super().abort_all()
        if begun and self.executor.lost_rank is None:
            self.executor.launch(EncodeInput.of_clips([]))

    def step(self) -> list[PoolingRequestOutput]:
        batch = list(self.scheduler.schedule())
        clips = [r for r in batch if r.clip is not None]
        others = [r for r in batch if r.clip is None] if clips else batch
        return [*(self._forward(others) if others else ()), *(self._follow(clips) if clips else ())]

    def _follow(self, batch: Sequence[EncodeRequest]) -> list[PoolingRequestOutput]:
        """Compute the next frames of each clip."""
        found = self._launch(EncodeInput.of_clips([_next_frames(r) for r in batch]))
        outputs = []
        for request, frames in zip(batch, found, strict=True):
            assert request.clip is not None
            request.done += CLIP_FRAMES
            if frames is not None:
                self._remove([request])
                self.stats.prompt_tokens += request.all_tokens
                self.stats.encoded.append(request)
                outputs.append(
                    PoolingRequestOutput(
                        request.request_id, request.prompt, request.prompt_token_ids,
                        _clip_output(frames, request.clip), num_tokens=request.all_tokens,
                    )
                )  # fmt: skip
        return outputs

    def _forward(self, batch: list[EncodeRequest]) -> list[PoolingRequestOutput]:
        batch, found = self._compute(batch, _step_of)
        self._remove(batch)
        self.stats.prompt_tokens += sum(r.num_tokens for r in batch)
        self.stats.encoded += batch
        return [
            PoolingRequestOutput(
                r.request_id,
                r.prompt,
                r.prompt_token_ids,
                self._output(r, data),
                num_tokens=r.num_tokens,
                kept=r.kept,
            )
            for r, data in zip(batch, found, strict=True)
        ]


def _step_of(batch: list[EncodeRequest]) -> EncodeInput:
    images = [r.image for r in batch if r.image is not None]
    return EncodeInput(
        np.concatenate([np.array(r.prompt_token_ids, np.int64) for r in batch]),
        np.array([r.num_features for r in batch], np.int32),
        [(r.params.task, r.params.use_activation is not False) for r in batch],
        [image.values for image in images] or None,
        [image.grid for image in images],
        **_more(batch),
    )


def _check_target(params: PoolingParams, target: segmentation.Concept | Marks) -> None:
    """Raise ValueError for settings that do not apply to a text, or to marks."""
    marked = isinstance(target, Marks)
    if marked and params.semantic:
        raise ValueError("semantic applies to texts, not to points, boxes and masks: leave it out")
    if not marked and not params.multimask_output:
        raise ValueError("multimask_output applies to points, boxes and masks, not to texts: leave it out")


def _wanted(request: EncodeRequest) -> Wanted:
    """A request for the task 'segment' as the runner takes it."""
    assert request.concept is not None and request.image is not None
    params = request.params
    threshold, mask_threshold = params.threshold, params.mask_threshold
    if threshold is None:
        threshold = 0.0 if isinstance(request.concept, Marks) else segmentation.THRESHOLD
    return Wanted(
        request.concept, request.image.size, threshold,
        segmentation.MASK_THRESHOLD if mask_threshold is None else mask_threshold, params.max_detections, params.masks,
        params.semantic, params.multimask_output,
    )  # fmt: skip


def _segmented(
    found: Objects, concept: segmentation.Concept | Marks, image: Patches
) -> segmentation.SegmentationOutput:
    return segmentation.SegmentationOutput(
        found.rows, found.runs, found.semantic, concept.name, image.size, found.presence
    )


def _next_frames(request: EncodeRequest) -> NextFrames:
    clip, params = request.clip, request.params
    assert clip is not None
    frames = clip.take(request.done)
    return NextFrames(
        request.request_id, clip.texts, np.stack([frame.values for frame in frames]), len(clip), clip.size,
        params.masks, params.threshold or 0.0,
    )  # fmt: skip


def _clip_output(found: Sequence[Followed], clip: segmentation.ClipPrompt) -> segmentation.ClipOutput:
    frames, rows = [], []
    for i, frame in enumerate(found):
        texts = [clip.names[prompt] for prompt in frame.prompts]
        frames.append(
            segmentation.FrameOutput(
                frame.rows, frame.runs, size=clip.size, object_ids=frame.numbers, texts=texts
            )
        )
        known = np.array([(i, number) for number in frame.numbers], np.float32).reshape(-1, 2)
        rows.append(np.concatenate((known, frame.rows), 1))
    return segmentation.ClipOutput(np.concatenate(rows), frames, list(clip.names), clip.size)


def _kept(request: EncodeRequest, data: np.ndarray) -> np.ndarray:
    """The rows of a task with one for each token that count."""
    by_token = request.kept is not None and request.params.task in ("token_embed", "token_classify")
    return data[request.kept] if by_token else data


def _more(batch: Sequence[EncodeRequest]) -> dict[str, Any]:
    """The fields of EncodeInput that only some tasks need."""
    made: dict[str, Any] = {}
    if batch[0].concept is not None:
        made["wanted"] = [_wanted(r) for r in batch]
    if any(r.token_type_ids is not None for r in batch):
        made["token_type_ids"] = np.concatenate(
            [
                np.zeros(r.num_features, np.int64) if r.token_type_ids is None else r.token_type_ids
                for r in batch
            ]
        )
    if any(r.seen is not None for r in batch):
        made["seen"] = np.array([r.num_features if r.seen is None else r.seen for r in batch], np.int64)
    if any(r.params.query is not None for r in batch):
        found = {id(r.params.query): r.params.query for r in batch if r.params.query is not None}
        places = {key: i for i, key in enumerate(found)}
        made |= {
            "queries": list(found.values()), "query_of": [places.get(id(r.params.query), -1) for r in batch],
            "kept": np.concatenate([np.ones(r.num_features, bool) if r.kept is None else r.kept for r in batch]),
        }  # fmt: skip
    return made
