"""Offline inference: LLM(model).generate(prompts, SamplingParams(...)), embed, score, generate_images, render, ..."""

from __future__ import annotations

import itertools
import os
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeAlias
from urllib.parse import unquote

from fastkernels.core import local_files
from fastkernels.core.registry import UnknownName
from fastkernels.engine import scoring
from fastkernels.engine.engines.engine import is_integer, make_engine
from fastkernels.engine.engines.recognition import Options, Recognition, Transcript
from fastkernels.engine.execution import threads
from fastkernels.engine.execution.follow import Followed, follow
from fastkernels.engine.inputs.images import READERS, is_image
from fastkernels.engine.inputs.media import data_of
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.pooling import PoolingParams
from fastkernels.engine.sampling.sampling_params import RequestOutputKind, SamplingParams
from fastkernels.engine.scheduling.acting import ActionParams, ActionRequestOutput
from fastkernels.engine.scheduling.denoising import ImageParams, ImageRequestOutput, VideoParams
from fastkernels.engine.scheduling.encoding import PoolingRequestOutput
from fastkernels.engine.scheduling.folding import FoldParams, FoldRequestOutput
from fastkernels.engine.scheduling.rendering import RenderParams, RenderRequestOutput
from fastkernels.engine.scheduling.request import RequestOutput
from fastkernels.engine.scheduling.rollout import FrameParams, FrameRequestOutput
from fastkernels.engine.scheduling.speaking import SpeechOutput, SpeechParams
from fastkernels.engine.speech.files import recording

Prompt: TypeAlias = "str | Sequence[int] | dict[str, Any]"
Progress: TypeAlias = "bool | Callable[..., Any]"
THREADS = min(8, os.cpu_count() or 1)  # that read the media of prompts
MEDIA_PARTS = {  # {type of a content part: kind of medium}
    "image_pil": "image", "image_url": "image", "video_url": "video", "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip


class LLM:
    """A model in this process, and in workers with tensor_parallel_size; `shutdown` ends those.

    Keyword arguments are the fields of EngineConfig.

        with LLM(model) as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    Raises CheckpointError for a checkpoint that cannot be loaded, UnknownName for an unknown architecture, TypeError
    for an unknown option, ValueError for invalid values and for a model that does not fit, and WorkerDied if a worker
    ends.

    With nnodes from 2 on, each node makes one. On node 0 it has the engine. On the others it returns when that has
    ended, or raises why, and cannot be used.
    """

    def __init__(self, model: str | os.PathLike[str], **config: Any):
        if not isinstance(model, str | os.PathLike):
            raise ValueError(f"model must be a checkpoint's folder or hub id, got {reprlib.repr(model)}")
        options = {field.name for field in fields(EngineConfig)}
        if unknown := [name for name in config if name not in options]:
            raise TypeError(str(UnknownName("option of LLM", unknown[0], options)))
        made = EngineConfig(model=os.fspath(model), **config)
        if made.node_rank:
            follow(made)
        self.llm_engine: Any = Followed(made) if made.node_rank else make_engine(made)
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the processes of other ranks. An LLM with such processes cannot be used afterwards. Safe to repeat."""
        self.llm_engine.shutdown()

    def get_tokenizer(self) -> Any:
        """The model's transformers tokenizer; None with skip_tokenizer_init."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Generate text. Returns one output for each prompt, in order.

        prompts          text, token ids, {'prompt': text}, {'prompt_token_ids': ids}, or a list of these; for a model
                         that reads media, with 'multi_modal_data': {'image': a PIL image, or a list of them}, and
                         'video' and 'audio' in the same way (MediaReader.read)
        sampling_params  one for all prompts, or one for each (default: SamplingParams(), 16 tokens at most, or
                         UnmaskParams() for a diffusion language model)
        use_tqdm         whether to show progress on standard error, or a callable that makes the progress bar, such
                         as functools.partial(tqdm, leave=False)

        Raises ValueError for an unsupported request before anything runs. A step that fails ends all requests, and so
        does Ctrl-C.
        """
        self._check_kind("generate", "Generate", "Unmask")
        listed = _as_list(prompts, media=True)
        params = sampling_params if sampling_params is not None else self.llm_engine.params()
        each = _for_each(params, len(listed), "prompts", SamplingParams, "sampling_params")
        final = {id(s): replace(s, output_kind=RequestOutputKind.FINAL_ONLY) for s in each}
        return self._run(listed, [final[id(s)] for s in each], use_tqdm)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: Progress = True
    ) -> list[PoolingRequestOutput]:
        """Encode each prompt to one vector: `outputs.embedding` is a list of floats, `outputs.data` an array [H].

        prompts, use_tqdm: as in `generate`; PIL images for a model of images; lists of PIL images, the frames, for one
        of videos, where an image is a video, too. Raises ValueError for an unsupported request before anything runs.
        """
        return self.encode(prompts, "embed", use_tqdm=use_tqdm)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: Progress = True
    ) -> list[PoolingRequestOutput]:
        """Probabilities of the classes of each prompt: `outputs.probs` is a list of floats. See `embed`."""
        return self.encode(prompts, "classify", use_tqdm=use_tqdm)

    def detect(
        self,
        images: Any,
        threshold: float | None = None,
        max_detections: int | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput]:
        """Find objects in PIL images: `outputs.boxes`, `scores` and `labels` of each, the best first.

        images          one or a list. A box is left, top, right and bottom in the image's pixels
        threshold       the least score of an object, from 0 to 1 (default: 0.5)
        max_detections  of an image (default: all that the model gives)

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("detect", "Encode")
        listed = [images] if is_image(images) else _listed(images)
        params = PoolingParams("detect", threshold=threshold, max_detections=max_detections)
        return self._run(listed, [params] * len(listed), use_tqdm)

    def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput]:
        """Score documents: `outputs.score` is a number, larger for a better match.

        queries, documents  one query for all documents, or as many as documents. Texts, for a cross-encoder; token ids
                            are possible for other models. Of a recommender, `queries` are its samples, dicts, and
                            there are no documents: `outputs.scores` are its numbers, `outputs.item_ids` the items that
                            it has chosen

        A cross-encoder reads each pair, a model of late interaction compares tokens by MaxSim, and other encoders give
        the cosine of two vectors. Raises ValueError for an unsupported request.
        """
        if self.llm_engine.kind == "Score":
            return self._score_samples(queries, documents, use_tqdm)
        self._check_kind("score", "Encode")
        if documents is None:
            raise ValueError(f"score: {self.llm_engine.config.model} scores documents for queries: give both")
        engine, asked, given = self.llm_engine, _as_list(queries), _as_list(documents)
        matched, how = scoring.pairs(asked, given), engine.scored_by
        if how == "cross-encoder":
            made = [engine.pair_request(str(next(self._ids)), asked[q], given[d]) for q, d in matched]
            return self._complete(made, use_tqdm)
        if how == "late-interaction":
            own = [PoolingParams("token_embed", role="query")] * len(asked)
            vectors = [o.outputs.data for o in self._run(asked, own, use_tqdm)]
            each = [PoolingParams("maxsim", role="document", query=vectors[q]) for q, _ in matched]
            return self._run(given, each, use_tqdm)
        found = self._run([*asked, *given], [PoolingParams()] * (len(asked) + len(given)), use_tqdm)
        outputs = found[len(asked) :]
        for (q, _), output in zip(matched, outputs, strict=True):
            output.outputs.data = scoring.cosine(found[q].outputs.data, output.outputs.data)
        return outputs

    def _score_samples(self, samples: Any, documents: Any, use_tqdm: Progress) -> list[PoolingRequestOutput]:
        if documents is not None:
            raise ValueError(f"score: {self.llm_engine.config.model} scores samples: it takes no documents")
        listed = [samples] if isinstance(samples, dict) else samples
        if not isinstance(listed, (list, tuple)):
            raise ValueError(f"score: samples must be a dict or a list of dicts, got {reprlib.repr(samples)}")
        return self._run(listed, [PoolingParams("classify")] * len(listed), use_tqdm)

    def segment(
        self,
        inputs: Any = None,
        params: PoolingParams | None = None,
        *,
        video: Any = None,
        text: str | Sequence[str] | None = None,
        use_activation: bool = True,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput]:
        """Classify the points of clouds, or find the objects that prompts name in images.

        inputs          one, or a list. Clouds are {"coord": [points, 3], "feat": [points, in_channels], "grid_size":
                        side of a cell}, with lists, arrays or tensors; see the model's file. Images with prompts are
                        {"image": a PIL image, "text": what to find, "boxes": [[left, top, right, bottom], ...] of
                        examples in pixels, "box_labels": [1, or 0 for what is not wanted, ...]}, with text, boxes or
                        both; for SAM 3's tracker {"image": a PIL image, "points": [[x, y], ...], "point_labels":
                        [1, or 0 for outside of the object, ...], "box": [left, top, right, bottom], "mask": bools or
                        logits [height, width]}, which mark one object. Prompts on the same image share the work on
                        it. Clips are {"video": frames or the bytes
                        of a file, "text": what to follow, or a list of texts}
        video, text     of one clip, instead of inputs
        params          of images: PoolingParams("segment", threshold=..., ...)
        use_activation  of clouds: `outputs.data` is [points, classes] of probabilities; False: of logits. Without a
                        head it is the features, and `outputs.items` is None
        use_tqdm        as in `generate`

        Of clouds, `outputs.items` is an array [points] of classes, `outputs.data` their numbers. Of images,
        `outputs.boxes`, `scores` and `masks` [n, height, width] are those of the objects, the best first, and `rles`
        the masks in COCO's form. Of marks, they are the masks that these can mean, `scores` are predicted overlaps with
        the object, and `presence` is the probability that it is there. Of clips, `outputs.frames` has these of each
        frame, and `object_ids`, which are the same for an object in all frames. Raises ValueError for an unsupported
        request before anything runs.
        """
        self._check_kind("segment", "Segment", "Encode")
        clouds = self.llm_engine.kind == "Segment"
        if (video is None) == (inputs is None):
            raise ValueError("segment: give inputs, or the video of a clip and its text")
        if video is not None:
            inputs = {"video": video, "text": text}
        elif text is not None:
            raise ValueError("segment: text belongs to video; the text of other inputs is in their dicts")
        listed = [inputs] if isinstance(inputs, dict) else inputs
        if not isinstance(listed, (list, tuple)):
            what = "clouds" if clouds else "inputs"
            raise ValueError(f"segment: {what} must be a dict or a list of dicts, got {reprlib.repr(inputs)}")
        if clouds:
            if params is not None:
                raise ValueError("segment: params apply to images, not to clouds")
            params = PoolingParams("classify", use_activation=use_activation)
        params = params or PoolingParams("segment")
        return self._run(listed, [params] * len(listed), use_tqdm)

    def lexical_weights(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: Progress = True
    ) -> list[dict[int, float]]:
        """{token id: weight} of each prompt, for a model with lexical weights such as BGE-M3. See `embed`."""
        found = self.encode(prompts, "token_classify", use_tqdm=use_tqdm)
        tokenizer = self.get_tokenizer()
        special = () if tokenizer is None else tuple(tokenizer.all_special_ids)
        return [scoring.lexical_weights(o.kept_token_ids, o.outputs.data, special) for o in found]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_task: str = "token_embed",
        *,
        use_tqdm: Progress = True,
    ) -> list[PoolingRequestOutput]:
        """Encode each prompt: `outputs.data` is an array [tokens, H], or [H] with pooling_task 'embed'.

        prompts, use_tqdm: as in `generate`. Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("embed", "Encode")
        listed = _as_list(prompts)
        return self._run(listed, [PoolingParams(pooling_task)] * len(listed), use_tqdm)

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        sampling_params: SamplingParams | None = None,
    ) -> list[Transcript]:
        """Recognize speech, of any length: the texts, their segments with times, and the language.

        audio            a path, the bytes of a file, samples [n] of one channel at the model's rate, (samples, rate in
                         Hz), or a list of these, which run in one batch
        language         of the speech, as a code ('de') or an English name (default: detected)
        task             'transcribe', or 'translate' to English
        prompt           a text that would come before the audio
        sampling_params  temperature and so on (default: greedy, and higher temperatures for a text that is repetitive
                         or unlikely)

        Raises ValueError for audio that cannot be read, and MissingPackage, an ImportError, without the extra `audio`.
        """
        self._check_kind("transcribe", "Generate")
        recognizer = self.llm_engine.recognizer
        given = list(audio) if isinstance(audio, list) else [audio]
        options = Options(task, language, prompt, sampling_params or SamplingParams(temperature=0.0))
        made: list[Transcript] = []
        for at in range(0, len(given), self.llm_engine.config.max_num_seqs):
            some = given[at : at + self.llm_engine.config.max_num_seqs]
            runs = [recognizer.start(recording(a, recognizer.rate), options) for a in some]
            self._recognize(runs)
            made += [r.transcript for r in runs]
        return made

    def _recognize(self, runs: Sequence[Recognition]) -> None:
        """Run recognitions to their ends. Each step of all of them is one batch."""
        waiting = [(run, run.advance()) for run in runs]
        while waiting := [(run, jobs) for run, jobs in waiting if jobs is not None]:
            flat = [job for _, jobs in waiting for job in jobs]
            outputs = iter(self._run([j.prompt for j in flat], [j.params for j in flat], use_tqdm=False))
            waiting = [(run, run.advance([next(outputs) for _ in jobs])) for run, jobs in waiting]

    def generate_images(
        self,
        prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        params: ImageParams | Sequence[ImageParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[ImageRequestOutput]:
        """Generate images: `images` of each output are PIL images, `arrays` their pixels, `seeds` their seeds.

        prompts   texts, or {"prompt": text, "image": a PIL image that it changes}
        params    one for all prompts, or one for each (default: ImageParams(), one image of the model's size)
        use_tqdm  as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("generate_images", "Denoise")
        return self._generate_pictures(prompts, params if params is not None else ImageParams(), use_tqdm)

    def generate_videos(
        self,
        prompts: str | Sequence[str],
        params: VideoParams | Sequence[VideoParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[ImageRequestOutput]:
        """Generate videos: `arrays` of each output are their pixels [frames, height, width, 3], `seeds` their seeds.

        params, use_tqdm: as in `generate_images`, with VideoParams. Raises ValueError for an unsupported request before
        anything runs.
        """
        self._check_kind("generate_videos", "DenoiseVideo")
        return self._generate_pictures(prompts, params if params is not None else VideoParams(), use_tqdm)

    def _generate_pictures(
        self, prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]], given: Any, use_tqdm: Progress
    ) -> list[ImageRequestOutput]:
        listed = _listed(prompts)
        each = _for_each(given, len(listed), "prompts", ImageParams)
        made = [
            self.llm_engine.make_requests(str(next(self._ids)), prompt, one)
            for prompt, one in zip(listed, each, strict=True)
        ]
        found = iter(self._complete([request for requests in made for request in requests], use_tqdm))
        outputs = []
        for requests in made:
            first, *rest = [next(found) for _ in requests]
            first.arrays += [array for output in rest for array in output.arrays]
            first.seeds += [seed for output in rest for seed in output.seeds]
            first.steps_reused += [count for output in rest for count in output.steps_reused]
            outputs.append(first)
        return outputs

    def act(
        self,
        observations: dict[str, Any] | Sequence[dict[str, Any]],
        params: ActionParams | Sequence[ActionParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[ActionRequestOutput]:
        """Compute a robot's next actions: `actions` of each output is an array [actions, numbers].

        observations  one for each robot. Of Pi0: {'images': PIL images, one for each camera, 'state': numbers,
                      'prompt': text or token ids}; of DP3: {'point_cloud': [observations, points, 3],
                      'state': [observations, numbers]}
        params        one for all observations, or one for each (default: ActionParams())
        use_tqdm      as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("act", "Act")
        listed = [observations] if isinstance(observations, dict) else observations
        if not isinstance(listed, (list, tuple)):
            raise ValueError(
                f"act: observations must be a dict or a list of dicts, got {reprlib.repr(observations)}"
            )
        given = params if params is not None else ActionParams()
        return self._run(listed, _for_each(given, len(listed), "observations", ActionParams), use_tqdm)

    def render(
        self,
        cameras: Any,
        params: RenderParams | Sequence[RenderParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[RenderRequestOutput]:
        """Render a scene: `array` of each output is an image [height, width, 3] of uint8, `image` the same for PIL.

        cameras   one camera, or a list: {"width": W, "height": H, "K": 3 x 3 intrinsics in pixels, "viewmat": 4 x 4,
                  world to camera, or "pose", its inverse, "background": (red, green, blue) from 0 to 1}, with OpenCV's
                  axes; matrices are lists, arrays or tensors
        params    one for all cameras, or one for each: RenderParams(raw=True) returns float32 [height, width, 4], with
                  opacity
        use_tqdm  as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("render", "Render")
        listed = _listed(cameras)
        given = params if params is not None else RenderParams()
        return self._run(listed, _for_each(given, len(listed), "cameras", RenderParams), use_tqdm)

    def fold(
        self,
        inputs: dict[str, Any] | Sequence[dict[str, Any]],
        params: FoldParams | Sequence[FoldParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[FoldRequestOutput]:
        """Predict structures: `structures` of each output has positions and confidences, `text()` gives mmCIF or PDB.

        inputs    one, or a list: {"chains": [{"sequence": letters, "kind": "protein", "rna" or "dna",
                  "count": copies}]}, or {"features": arrays by the names of openfold3's batch}
        params    one for all inputs, or one for each (default: FoldParams())
        use_tqdm  as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("fold", "Fold")
        listed = _listed(inputs)
        given = params if params is not None else FoldParams()
        return self._run(listed, _for_each(given, len(listed), "inputs", FoldParams), use_tqdm)

    def generate_frames(
        self,
        prompts: dict[str, Any] | Sequence[dict[str, Any]],
        params: FrameParams | Sequence[FrameParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[FrameRequestOutput]:
        """Generate the frames that follow from actions: `images` of each output are PIL images, `arrays` their pixels.

        prompts   {'images': a PIL image or a list of them, the first frames; 'actions': one for each frame to make;
                  'prompt_actions': one for each image (default: no action)}, or a list of these
        params    one for all prompts, or one for each (default: FrameParams())
        use_tqdm  as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("generate_frames", "Rollout")
        listed = _listed(prompts)
        given = params if params is not None else FrameParams()
        return self._run(listed, _for_each(given, len(listed), "prompts", FrameParams), use_tqdm)

    def speak(
        self,
        texts: str | Sequence[str],
        params: SpeechParams | Sequence[SpeechParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[SpeechOutput]:
        """Speak texts: `samples` of each output are float32 at `rate` Hz, and output.file("wav") is a file of them.

        texts     a text, or a list of them
        params    one for all texts, or one for each: SpeechParams(voice="anna") (default: the engine's only voice)
        use_tqdm  as in `generate`

        Raises ValueError for an unsupported request before anything runs.
        """
        self._check_kind("speak", "Speak")
        listed = _listed(texts)
        given = params if params is not None else SpeechParams()
        return self._run(listed, _for_each(given, len(listed), "texts", SpeechParams), use_tqdm)

    def _check_kind(self, method: str, *kinds: str) -> None:
        engine = self.llm_engine
        if engine.kind not in kinds:
            raise ValueError(f"{method}: {engine.config.model} is for {engine.use}")

    def _run(self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: Progress) -> list[Any]:
        engine = self.llm_engine
        ids = [str(next(self._ids)) for _ in prompts]
        with threads.one(engine.runner.device):  # new threads have the number of the last one that set it
            if len(prompts) > 1 and (engine.inputs in READERS or any(map(_has_media, prompts))):
                with ThreadPoolExecutor(
                    min(len(prompts), THREADS), initializer=threads.use_one, initargs=(engine.runner.device,)
                ) as pool:
                    prompts = list(pool.map(engine.read, prompts, params))
            # All requests are checked before the first is queued, so that a bad prompt leaves nothing behind.
            requests = [engine.make_request(i, p, s) for i, p, s in zip(ids, prompts, params, strict=True)]
        return self._complete(requests, use_tqdm)

    def _complete(self, requests: Sequence[Any], use_tqdm: Progress) -> list[Any]:
        """The outputs of checked requests, in order."""
        with threads.one(self.llm_engine.runner.device):
            return self._outputs(requests, use_tqdm)

    def _outputs(self, requests: Sequence[Any], use_tqdm: Progress) -> list[Any]:
        engine, done = self.llm_engine, dict[str, Any]()
        waiting = list(reversed(requests))
        bar = ProgressBar(use_tqdm, len(requests))
        try:
            while waiting or engine.has_unfinished_requests():
                while waiting and engine.has_room(waiting[-1]):
                    request = waiting.pop()
                    engine.add_request(request.request_id, request)
                ended = []
                for output in engine.step():
                    if output.request_id in done and isinstance(output, (FrameRequestOutput, SpeechOutput)):
                        output = done[output.request_id].joined(output)
                    done[output.request_id] = output
                    ended += [output] * output.finished
                bar.add(ended)
                engine.take_stats()  # unused here, and they would accumulate
        except BaseException:
            engine.abort_all()  # a step may have been scheduled and not run, so that its blocks hold nothing
            raise
        finally:
            bar.close()
        return [done[request.request_id] for request in requests]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        add_generation_prompt: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Continue conversations.

        use_tqdm  as in `generate`
        messages  one conversation, [{'role': ..., 'content': ...}, ...], or a list of them. Parts of a content may be
                  media, for a model that reads them: {'type': 'image_pil', 'image_pil': a PIL image}, or
                  {'type': 'image_url', 'image_url': {'url': a data or file URL}}; video_url, audio_url and input_audio,
                  too
        template  keyword arguments of the tokenizer's chat template

        Raises ValueError for an unsupported request before anything runs.
        """
        tokenizer = self.get_tokenizer()
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate")
        prompts: list[Any] = []
        for conversation in _conversations(messages):
            given, media = _with_media_apart(conversation)
            made = tokenizer.apply_chat_template(
                given,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=True,
                **template,
            )["input_ids"]
            data = {"multi_modal_data": media} if media else {}
            prompts.append({"prompt_token_ids": made, **data} if data else made)
        return self.generate(prompts, sampling_params, use_tqdm)


class ProgressBar:
    """vLLM's bar: finished prompts, and the input and output tokens per second of those."""

    def __init__(self, use_tqdm: Progress, total: int):
        self._bar: Any = None
        if use_tqdm:
            from tqdm.auto import tqdm

            make = use_tqdm if callable(use_tqdm) else tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
        self._started = time.perf_counter()
        self._read = self._made = 0

    def add(self, outputs: Sequence[Any]) -> None:
        """Count finished requests."""
        if self._bar is None or not outputs:
            return
        for output in outputs:
            self._read += len(output.prompt_token_ids)
            if isinstance(output, RequestOutput):
                self._made += sum(o.num_tokens for o in output.outputs)
        seconds = max(time.perf_counter() - self._started, 1e-9)
        speed = f"input: {self._read / seconds:.2f} tok/s, output: {self._made / seconds:.2f} tok/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update(len(outputs))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _listed(given: Any) -> list[Any]:
    """Prompts as a list: one alone, or several of any iterable."""
    one = isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable)
    return [given] if one else list(given)


def _for_each(params: Any, count: int, what: str, kind: type, name: str = "params") -> list[Any]:
    """The params of each of `count` prompts. Raises ValueError for another number of them, and for other objects."""
    each = [params] * count if isinstance(params, kind) else _listed(params)
    for one in each:
        ours = type(one).__module__.startswith(
            "fastkernels."
        )  # of another kind of model: its engine says which
        if not isinstance(one, kind) and not ours:
            raise ValueError(f"{name} must be {kind.__name__}, got {reprlib.repr(one)}")
    if len(each) != count:
        raise ValueError(f"{count} {what} and {len(each)} {name}: give one, or one for each")
    return each


def _has_media(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data"))


def _as_list(prompts: Any, media: bool = False) -> list[Any]:
    """media: leave prompts with media as they are."""
    if isinstance(prompts, (str, dict)) or is_image(prompts):
        prompts = [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be text, token ids or a list of these, got {reprlib.repr(prompts)}")
    listed = list(prompts)
    if listed and is_integer(listed[0]):
        listed = [listed]
    return [
        p if media and isinstance(p, dict) and p.get("multi_modal_data") else _unwrapped(p) for p in listed
    ]


def _unwrapped(prompt: Any) -> Any:
    """The text, token ids, image or video of a prompt given as vLLM's TextPrompt or TokensPrompt."""
    if isinstance(prompt, dict):
        data = prompt.get("multi_modal_data") or {}
        for kind in ("image", "video"):
            if data.get(kind) is not None:
                return data[kind]
        return next((prompt[k] for k in ("prompt_token_ids", "prompt") if k in prompt), prompt)
    return prompt


def _with_media_apart(conversation: Sequence[Any]) -> tuple[list[Any], dict[str, list[Any]]]:
    """(the messages with {'type': kind} in place of each medium, the media by kind). Raises ValueError."""
    media: dict[str, list[Any]] = {}
    made = []
    for message in conversation:
        content = message.get("content")
        if not isinstance(content, (list, tuple)):
            made.append(message)
            continue
        parts = []
        for part in content:
            name = part.get("type") if isinstance(part, dict) else None
            if name not in MEDIA_PARTS:
                parts.append(part)
                continue
            kind, given = MEDIA_PARTS[name], part.get(name)
            own = media.setdefault(kind, [])
            if isinstance(given, dict):
                audio = name == "input_audio"
                given = given.get("data" if audio else "url")
                given = f"data:audio/wav;base64,{given}" if audio and given is not None else given
            if given is None:
                raise ValueError(f"{kind} {len(own)} of the conversation is empty: {reprlib.repr(part)}")
            own.append(_of_url(given, f"{kind} {len(own)}") if isinstance(given, str) else given)
            parts.append({"type": kind})
        made.append({**message, "content": parts})
    return made, media


def _of_url(url: str, name: str) -> bytes:
    """The bytes of a data URL, or of a file of this machine. Raises ValueError."""
    if not url.startswith("file://"):
        return data_of(url, name)
    try:
        return local_files.read(unquote(url.removeprefix("file://")))
    except local_files.FileError as error:
        raise ValueError(f"{name} {error}") from error


def _conversations(messages: Any) -> list[Any]:
    if not isinstance(messages, (list, tuple)):
        raise ValueError(
            f"messages must be a list of messages, or of such lists, got {reprlib.repr(messages)}"
        )
    listed = [messages] if messages and isinstance(messages[0], dict) else list(messages)
    for conversation in listed:
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise ValueError(f"a conversation must be a list of messages, got {reprlib.repr(conversation)}")
        for message in conversation:
            if not isinstance(message, dict) or "role" not in message:
                raise ValueError(
                    f"a message must be {{'role': ..., 'content': ...}}, got {reprlib.repr(message)}"
                )
    return listed
