"""Requests to our engine by runner and input, and the numbers of their answers. All values follow from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Draw = np.random.Generator
RESERVED = 10  # ids below are special in most vocabularies
WORDS = (
    "red",
    "bicycle",
    "brick",
    "wall",
    "lighthouse",
    "night",
    "painting",
    "bowl",
    "ripe",
    "cherries",
    "boat",
)
SPOTS = 8  # of an image's side: large enough to survive the first convolutions
SAMPLED = 64  # rows and columns of a mask that are compared, at most
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
BANDS, SPECTRUM, HOP = 80, 1024, 256  # of mel spectrograms of speech


class Sent(NamedTuple):
    """make: one request, of an LLM, its sizes (`Model.request` of a suite) and a generator; answer: one array each."""

    make: Callable[[Any, Mapping[str, Any], Draw], Any]
    answer: Callable[[Any, Sequence[Any]], list[np.ndarray]]


def _model(llm: Any) -> Any:
    return llm.llm_engine.runner.model


def _picture(draw: Draw, width: int, height: int) -> Any:
    from PIL import Image

    spots = draw.integers(0, 256, (SPOTS, SPOTS, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.BILINEAR)


def _ids(draw: Draw, count: int, vocabulary: int) -> list[int]:
    return draw.integers(RESERVED, vocabulary, count).tolist()


def _seed(draw: Draw) -> int:
    return int(draw.integers(1 << 31))


def medium(kind: str, sizes: Mapping[str, Any], draw: Draw) -> Any:
    """An image, the frames of a video, or the samples of an audio."""
    if kind == "audio":
        return draw.normal(0.0, 0.1, int(16000 * float(sizes["seconds"]))).astype(np.float32)
    if kind == "video":
        return [
            _picture(draw, int(sizes["width"]), int(sizes["height"])) for _ in range(int(sizes["frames"]))
        ]
    return _picture(draw, int(sizes["width"]), int(sizes["height"]))


# -- encoders


def _text(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> list[int]:
    return _ids(draw, int(sizes["tokens"]), llm.llm_engine.hf_config.vocab_size)


def _image(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    """An image; for a segmenter, with the tokens of a text. For one that follows objects, a clip with a text."""
    if _follows(llm):
        return {"video": _scene(sizes, draw), "text": str(draw.choice(WORDS))}
    image = medium("image", sizes, draw)
    if not llm.llm_engine.segments:
        return image
    return {"image": image, "prompt_token_ids": _ids(draw, int(sizes["tokens"]), _model(llm).vocab_size)}


def _follows(llm: Any) -> bool:
    from fastkernels.models.common.interfaces.segmenter import ClipSegmenter

    return isinstance(_model(llm), ClipSegmenter)


def _scene(sizes: Mapping[str, Any], draw: Draw) -> list[Any]:
    """Frames in which one picture moves over another."""
    width, height, count = (int(sizes[name]) for name in ("width", "height", "frames"))
    back, front = _picture(draw, width, height), _picture(draw, width // 3, height // 3)
    made = [back.copy() for _ in range(count)]
    for i, frame in enumerate(made):
        frame.paste(front, (width * i // (2 * count), height // 4))
    return made


def _video(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    return medium("video", sizes, draw)


def _encoded(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """Boxes, scores and labels of a detector, in shares of the image; logits of classes; or vectors."""
    from fastkernels.engine.sampling.pooling import PoolingParams

    engine = llm.llm_engine
    if engine.detects:
        found = llm.detect(list(requests), threshold=0.0, use_tqdm=False)
        return [_rows(image, o.outputs.data) for image, o in zip(requests, found, strict=True)]
    if _follows(llm):
        params = PoolingParams("segment")
        return [_labels(o.outputs.frames) for o in llm.segment(list(requests), params, use_tqdm=False)]
    if engine.segments:
        params = PoolingParams("segment", threshold=0.0)
        found = llm.segment(list(requests), params, use_tqdm=False)
        return [_objects(given["image"], o.outputs) for given, o in zip(requests, found, strict=True)]
    late = getattr(_model(llm), "scored_by", "") == "late-interaction"
    params = PoolingParams("token_embed" if late else "embed")
    if engine.num_labels:
        params = PoolingParams("classify", use_activation=False)
    return [np.asarray(o.outputs.data) for o in llm._run(list(requests), [params] * len(requests), False)]


def _rows(image: Any, rows: np.ndarray) -> np.ndarray:
    """[detections, 6]: a box's left, top, right and bottom, its score and its label."""
    made = np.array(rows, np.float32)
    made[:, 0:4:2] /= image.width
    made[:, 1:4:2] /= image.height
    return made


def _objects(image: Any, found: Any) -> np.ndarray:
    """The same of objects with masks, whose shares of the image are in place of the labels: [objects, 6]."""
    shares = [sum(runs[1::2]) / (image.width * image.height) for runs in found.runs]
    rows = np.concatenate((found.data, np.array(shares, np.float32).reshape(-1, 1)), 1)
    return _rows(image, rows)


def _labels(frames: Sequence[Any]) -> np.ndarray:
    """The number of the best object at some pixels of each frame, from 1 on, and 0 outside: [frames, rows, columns]."""
    width, height = frames[0].size
    rows, columns = (np.linspace(0, n - 1, min(n, SAMPLED)).astype(int) for n in (height, width))
    made = np.zeros((len(frames), len(rows), len(columns)), np.float32)
    for labels, frame in zip(made, frames, strict=True):
        for i in np.argsort(frame.scores):  # the best one is the last
            labels[frame.masks[i][rows][:, columns]] = frame.object_ids[i] + 1
    return made


# -- recommenders and points


def _impression(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
    """An impression; with `rows` in sizes, so many in one request."""
    model, bag = _model(llm), int(sizes.get("bag", 4))
    rows = (int(sizes["rows"]),) if "rows" in sizes else ()
    sparse = {name: draw.integers(0, count, (*rows, bag)) for name, _, count in model.features}
    return {"dense": draw.normal(size=(*rows, model.dense_size)), "sparse": sparse}


def _user(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
    """A user with items; with `rows` in sizes, so many users in one request."""
    model = _model(llm)
    rows = (int(sizes["rows"]),) if "rows" in sizes else ()
    items = draw.integers(0, model.num_items, (*rows, int(sizes.get("items", 100))))
    return {"user": draw.integers(0, model.num_users, rows or 1), "items": items}


def _scored(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """Scores before the activation, which would hide small differences."""
    from fastkernels.engine.sampling.pooling import PoolingParams

    params = PoolingParams("classify", use_activation=False)
    found = llm._run(list(requests), [params] * len(requests), False)
    return [np.asarray(o.outputs.data) for o in found]


def _cloud(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
    """Points on the faces of a room, several of them in a cell of the grid."""
    count, side = int(sizes["points"]), float(sizes.get("side", 4.0))
    coord = draw.random((count, 3)) * side
    coord[np.arange(count), draw.integers(0, 3, count)] = 0.0
    feat = draw.normal(size=(count, _model(llm).in_channels))
    return {"coord": coord.astype(np.float32), "feat": feat.astype(np.float32), "grid_size": 0.05}


def _segmented(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    found = llm.segment(list(requests), use_activation=False, use_tqdm=False)
    return [np.asarray(o.outputs.data) for o in found]


# -- policies


def _points(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    model, config = _model(llm), _model(llm).config
    cloud = draw.normal(size=(config.n_obs_steps, int(sizes["points"]), model.point_size))
    state = draw.normal(size=(config.n_obs_steps, config.agent_pos))
    return {"point_cloud": cloud.astype(np.float32), "state": state.astype(np.float32)}, _seed(draw)


def _seen(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    config = _model(llm).config
    images = [medium("image", sizes, draw) for _ in range(int(sizes["cameras"]))]
    prompt = _ids(draw, int(sizes["tokens"]), config.vlm_config.text_config.vocab_size // 2)
    return {
        "images": images,
        "state": draw.normal(size=config.max_state_dim).tolist(),
        "prompt": prompt,
    }, _seed(draw)


def _acted(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    from fastkernels.engine.scheduling.acting import ActionParams

    params = [ActionParams(seed=seed) for _, seed in requests]
    return [o.actions for o in llm.act([given for given, _ in requests], params, use_tqdm=False)]


# -- images, videos and frames


def _camera(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
    import torch

    from fastkernels.overrides.geometry.cases import cameras

    width, height = int(sizes["width"]), int(sizes["height"])
    views, intrinsics = cameras(1, width, height, torch.Generator().manual_seed(_seed(draw)))
    return {
        "width": width, "height": height, "K": intrinsics[0].numpy(), "viewmat": views[0].numpy(),
    }  # fmt: skip


def _rendered(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    from fastkernels.engine.scheduling.rendering import RenderParams

    return [o.array for o in llm.render(list(requests), RenderParams(raw=True), use_tqdm=False)]


def _prompt(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    return " ".join(draw.choice(WORDS, 8)), dict(sizes), _seed(draw)


def _pictured(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    from fastkernels.engine.scheduling.denoising import ImageParams, VideoParams

    video = llm.llm_engine.kind == "DenoiseVideo"
    cls, method = (VideoParams, llm.generate_videos) if video else (ImageParams, llm.generate_images)
    params = []
    for _, sizes, seed in requests:
        names = {"height": "height", "width": "width", "num_inference_steps": "steps"}
        names |= {"num_frames": "frames"} if video else {}
        given: dict[str, Any] = {name: int(sizes[own]) for name, own in names.items()}
        params.append(cls(seed=seed, **given))
    found = method([prompt for prompt, _, _ in requests], params, use_tqdm=False)
    return [np.asarray(o.arrays[0], np.float32) / 255 for o in found]


def _walk(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    height, width = _model(llm).size
    actions = draw.random((int(sizes["frames"]), _model(llm).num_actions)).astype(np.float32)
    return {"images": [_picture(draw, width, height)], "actions": actions}, int(sizes["steps"]), _seed(draw)


def _rolled_out(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    from fastkernels.engine.scheduling.rollout import FrameParams

    params = [FrameParams(num_inference_steps=steps, seed=seed) for _, steps, seed in requests]
    found = llm.generate_frames([given for given, _, _ in requests], params, use_tqdm=False)
    return [np.asarray(np.stack(o.arrays), np.float32) / 255 for o in found]


# -- speech and structures


def _line(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    """A text, a voice and the frames of its mel spectrogram that are compared."""
    from fastkernels.engine.speech.voices import Voice

    model = _model(llm)
    flow, count = model.flow.config, int(sizes["voice"])
    tokens = draw.integers(0, model.speech_tokens, count)
    frames = draw.normal(size=(flow.ratio * count, flow.mel))
    voice = Voice.of("voice", " ".join(draw.choice(WORDS, 4)), tokens, frames, draw.normal(size=flow.speaker))
    return " ".join(draw.choice(WORDS, int(sizes["words"]))), voice, int(sizes["frames"])


def _spoken(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """Mel spectrograms of the likeliest speech: [frames, BANDS] each, 0 behind its end."""
    from fastkernels.engine.scheduling.speaking import SpeechParams

    params = [SpeechParams(voice=voice, temperature=0.0, seed=0) for _, voice, _ in requests]
    found = llm.speak([text for text, _, _ in requests], params, use_tqdm=False)
    return [_mel(o.samples, o.rate, frames) for o, (_, _, frames) in zip(found, requests, strict=True)]


def _mel(samples: np.ndarray, rate: int, frames: int) -> np.ndarray:
    """Square roots of the energies in bands: [frames, BANDS] float32."""
    padded = np.zeros(SPECTRUM + HOP * (frames - 1))
    padded[: len(samples)] = samples[: len(padded)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, SPECTRUM)[::HOP] * np.hanning(SPECTRUM)
    energy = np.abs(np.fft.rfft(windows)) ** 2
    at = np.linspace(0, 2595 * np.log10(1 + rate / 2 / 700), BANDS + 2)
    edges = 700 * (10 ** (at / 2595) - 1)
    bins = np.linspace(0, rate / 2, SPECTRUM // 2 + 1)
    rise = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    return np.sqrt(energy @ np.clip(np.minimum(rise, fall), 0, None).T).astype(np.float32)


def _chain(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    letters = "".join(draw.choice([*RESIDUES], int(sizes["residues"])))
    return {"chains": [{"sequence": letters}]}, dict(sizes), _seed(draw)


def _folded(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """Positions of the atoms and their confidences, [atoms, 4] each. The same noise needs no alignment."""
    from fastkernels.engine.scheduling.folding import FoldParams

    params = [
        FoldParams(
            num_samples=1, num_recycles=int(sizes["recycles"]), num_steps=int(sizes["steps"]), seed=seed
        )
        for _, sizes, seed in requests
    ]
    found = [o.structures for o in llm.fold([given for given, _, _ in requests], params, use_tqdm=False)]
    return [np.concatenate((s.positions[0], s.plddt[0][:, None]), 1) for s in found]


# -- diffusion language models


def _unmasked(llm: Any, requests: Sequence[Any]) -> list[np.ndarray]:
    """The tokens of answers that few steps make: each step is one forward pass."""
    from fastkernels.engine.sampling.unmask_params import UnmaskParams

    sizes: dict[str, Any] = {
        name: int(requests[0][1][own]) for name, own in (("max_tokens", "new"), ("steps", "steps"))
    }
    params = UnmaskParams(temperature=0, ignore_eos=True, detokenize=False, **sizes)
    found = llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    return [np.asarray(o.outputs[0].token_ids, np.float32) for o in found]


def _masked(llm: Any, sizes: Mapping[str, Any], draw: Draw) -> Any:
    config = llm.llm_engine.hf_config
    ids = [i for i in _text(llm, sizes, draw) if i != config.mask_token_id]
    return ids, dict(sizes)


# (runner, `inputs` of the architecture): what is sent. A new runner or input has one line here.
SENT: dict[tuple[str, str], Sent] = {
    ("Encode", "tokens"): Sent(_text, _encoded),
    ("Encode", "images"): Sent(_image, _encoded),
    ("Encode", "videos"): Sent(_video, _encoded),
    ("Score", "samples"): Sent(_impression, _scored),
    ("Score", "nodes"): Sent(_user, _scored),
    ("Segment", "points"): Sent(_cloud, _segmented),
    ("Act", "points"): Sent(_points, _acted),
    ("Act", "cameras"): Sent(_seen, _acted),
    ("Render", "cameras"): Sent(_camera, _rendered),
    ("Denoise", "prompts"): Sent(_prompt, _pictured),
    ("DenoiseVideo", "prompts"): Sent(_prompt, _pictured),
    ("Rollout", "frames"): Sent(_walk, _rolled_out),
    ("Unmask", "tokens"): Sent(_masked, _unmasked),
    ("Speak", "text"): Sent(_line, _spoken),
    ("Fold", "chains"): Sent(_chain, _folded),
}
