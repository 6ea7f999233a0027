"""Families of models: the metric that c is made of, the discrepancy at which c is 0, and the inputs and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fk_bench.core.hub import ModelError
from fk_bench.quality import text
from fk_bench.quality.forced import read_rows
from fk_bench.quality.metrics.outputs import (
    Actions,
    Detections,
    Embeddings,
    Images,
    Masks,
    Ratings,
    Scores,
    Spectrograms,
    Structures,
    Transcripts,
)

CORPUS = 48  # tokens of a document


@dataclass(frozen=True)
class Family:
    """bound: of the metric's discrepancy, not of its value.

    request  default sizes of a request to the model's runner (evaluate/run/hosts/sent.py); none: other inputs
    """

    metric: str
    bound: float
    hosts: tuple[str, ...]
    request: Mapping[str, float] | None = None


FAMILIES = {
    "text": Family("kl", 0.1, ("fastkernels", "vllm", "sglang", "transformers")),
    "embedding": Family("embedding_cosine", 0.1, ("fastkernels", "transformers")),
    "vision": Family("kl", 0.05, ("timm",)),
    "image": Family("latent_cosine", 0.05, ("diffusers",)),
    "encoding": Family(
        "score_error", 0.05, ("fastkernels",), {"tokens": 64, "width": 224, "height": 224, "frames": 8}
    ),
    "pixels": Family("psnr", 0.05, ("fastkernels",), {"width": 256, "height": 256, "frames": 5, "steps": 4}),
    "objects": Family("mean_ap", 0.2, ("fastkernels",), {"width": 640, "height": 480, "tokens": 5}),
    "tracking": Family("mean_iou", 0.2, ("fastkernels",), {"width": 320, "height": 240, "frames": 5}),
    "detection": Family("mean_ap", 0.2, ("fastkernels", "ultralytics"), {"width": 640, "height": 480}),
    "segmentation": Family("mean_iou", 0.2, ("fastkernels",), {"points": 20000, "side": 8.0}),
    "speech": Family("word_logprobs", 0.1, ("fastkernels",), {"seconds": 5.0, "new": 24}),
    "audio": Family("mel_cosine", 0.1, ("fastkernels",), {"words": 2, "voice": 25, "frames": 200}),
    "policy": Family(
        "action_error", 0.1, ("fastkernels",),
        {"points": 512, "cameras": 2, "tokens": 8, "width": 224, "height": 224},
    ),
    "structure": Family(
        "rmsd", 0.1, ("fastkernels", "openfold3"),
        {"residues": 48, "recycles": 1, "steps": 8, "tokens": 48, "rows": 16, "templates": 1},
    ),
    "recommendation": Family(
        "score_error", 0.05, ("fastkernels", "torchrec", "torch_geometric"), {"bag": 8, "items": 200}
    ),
}  # fmt: skip
# Families of our engine's runners, by (runner, inputs).
RUNNERS = {
    ("Score", "samples"): "recommendation", ("Score", "nodes"): "recommendation", ("Segment", "points"): "segmentation",
    ("Act", "points"): "policy", ("Act", "cameras"): "policy", ("Speak", "text"): "audio",
    ("Fold", "chains"): "structure", ("Denoise", "prompts"): "pixels", ("DenoiseVideo", "prompts"): "pixels",
    ("Rollout", "frames"): "pixels", ("Render", "cameras"): "pixels",
}  # fmt: skip
LIBRARIES = {
    "detector": "detection", "dlrm_dcn": "recommendation", "lightgcn": "recommendation", "openfold3": "structure",
}  # fmt: skip
HOSTS = tuple(dict.fromkeys(host for family in FAMILIES.values() for host in family.hosts))


def family_of(model: str, host: str) -> str:
    """The family of a model in a host. Raises ModelError for a model that no metric fits."""
    if host in ("timm", "diffusers"):
        return "vision" if host == "timm" else "image"
    if model in LIBRARIES:
        return LIBRARIES[model]
    if host == "fastkernels" and (found := _of_runner(Path(model))):
        return found
    architectures = config_of(Path(model)).get("architectures") or [""]
    if str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel", "ModelLM")):
        return "text"
    if host in FAMILIES["embedding"].hosts:
        return "embedding"
    raise ModelError(
        f"{model} has {architectures[0] or 'no architecture'}: {host} measures models that generate text"
    )


def _of_runner(model: Path) -> str:
    """The family of a checkpoint by its runner in our engine; '' for a checkpoint that our engine does not know.

    Raises ModelError for a runner without a family.
    """
    from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
    from fastkernels.models.common.descriptions import registry
    from fastkernels.models.common.plans import build

    try:
        config = build.load_config(model)
        found = registry.find(build.architecture_of(config, model), config)
    except (CheckpointError, LookupError, OSError, ValueError):
        return ""
    arch = found.arch
    if arch.runner == "Generate" and arch.media == ("audio",) and hasattr(config, "decoder_start_token_id"):
        return "speech"
    if arch.runner in ("Generate", "Unmask"):
        return "text"
    if arch.runner == "Encode" and (family := _of_encoder(model, registry.load(found.path), arch.inputs)):
        return family
    if (arch.runner, arch.inputs) in RUNNERS:
        return RUNNERS[arch.runner, arch.inputs]
    raise ModelError(
        f"{model}: no metric reads what the runner {arch.runner} makes of {arch.inputs} for {found.name}; families:"
        f" {', '.join(FAMILIES)}"
    )


def _of_encoder(model: Path, cls: type, inputs: str) -> str:
    """The family of a model of the runner Encode; '' for one that is sent other requests than a suite can send."""
    from fastkernels.models.common.interfaces.detector import Detector
    from fastkernels.models.common.interfaces.segmenter import ClipSegmenter, ImageSegmenter, Segmenter

    for kind, family in (
        (Detector, "detection"), (ClipSegmenter, "tracking"), (Segmenter, "objects"), (ImageSegmenter, ""),
    ):  # fmt: skip
        if issubclass(cls, kind):
            return family
    one_vector = not hasattr(cls, "scored_by") and not cls.__name__.endswith("Classification")
    embeds = (
        inputs == "tokens" and one_vector and any(model.glob("*.safetensors"))
    )  # which texts can be compared in
    return "embedding" if embeds else "encoding"


def check_request(family: str, sizes: Mapping[str, Any]) -> None:
    """Raise ModelError for a size that requests of the family do not have."""
    known = FAMILIES[family].request or {}
    if unknown := [name for name in sizes if name not in known]:
        which = f"; it has {', '.join(known)}" if known else ""
        raise ModelError(f"--request: a request to a model of {family} has no {unknown[0]!r}{which}")


def config_of(model: Path) -> dict[str, Any]:
    """Raises ModelError for a folder without a readable config.json."""
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no config.json that can be read ({error}); give a checkpoint's folder"
        ) from error
    return {**found, **found.get("text_config", {}), "architectures": found.get("architectures")}


def vocabulary(model: str | Path) -> int:
    """The number of tokens of a model of text. Raises ModelError for other models."""
    found = config_of(Path(model)).get("vocab_size")
    if not isinstance(found, int):
        raise ModelError(f"{model}: config.json has no vocab_size, so it is no model of text")
    return found


def prepare(family: str, model: str, extent: text.Extent, folder: Path) -> int:
    """Write the inputs of all runs into folder/inputs.json; return their number. Raises ValueError."""
    inputs: list[Any]
    if family == "text":
        inputs = [asdict(s) for s in text.cut(text.tokens_of(Path(model), vocabulary(model)), extent)]
    elif family == "embedding":
        inputs = [*map(list, _searches(Path(model), extent))]
    else:
        inputs = list(range(extent.sequences))  # seeds
    (folder / "inputs.json").write_text(json.dumps(inputs))
    return len(inputs)


def _searches(model: Path, extent: text.Extent) -> list[list[int]]:
    """Queries, then as many documents: titles and contents of Python's help topics; document i answers query i."""
    from pydoc_data.topics import topics

    names, found = sorted(topics)[: extent.sequences], []
    for name in (*names, *(topics[n] for n in names)):
        tokens = text.tokens_of(model, vocabulary(model), name)
        found.append(tokens[:CORPUS])
    return found


def outputs(family: str, model: str, extent: text.Extent, folder: Path, run: str) -> Any:
    """The outputs of a run as the family's metrics read them."""
    inputs, file = json.loads((folder / "inputs.json").read_text()), folder / f"{run}.f32"
    if family == "text":
        targets = torch.tensor([t for s in inputs for t in s["tokens"]])
        rows = read_rows(file, len(targets), vocabulary(model))
        return Scores(rows, targets, [len(s["tokens"]) for s in inputs])
    rows = read_rows(file, len(inputs))
    if FAMILIES[family].request is not None:
        shape = json.loads((folder / f"{run}.json").read_text())
        return _ANSWERS[family](rows.unflatten(1, shape))
    if family == "embedding":
        half = len(rows) // 2
        return Embeddings(rows[:half], rows[half:], torch.arange(half))
    if family == "vision":
        return Scores(rows, rows.argmax(-1), [1] * len(rows))
    latents, pixels = (tuple(shape) for shape in json.loads((folder / f"{run}.json").read_text()))
    size = torch.Size(latents).numel()
    return Images(rows[:, size:].unflatten(1, pixels), rows[:, :size].unflatten(1, latents))


MOST = 100  # boxes of an image, as in COCO
MOST_NUMBERS = 64  # of objects in a clip, with 0 for none


def _detections(rows: torch.Tensor) -> Detections:
    """Of [n, boxes, 6]: corners, score and label."""
    images = []
    for found in rows:
        best = found[found[:, 4].argsort(descending=True, stable=True)[:MOST]]
        images.append({"boxes": best[:, :4], "scores": best[:, 4], "labels": best[:, 5].round().long()})
    return Detections(images)


def _objects(rows: torch.Tensor) -> Detections:
    """Of [n, objects, 6]: corners, score and the mask's share of the image. All are of one class."""
    return _detections(torch.cat((rows[..., :5], torch.zeros_like(rows[..., :1])), -1))


def _tracks(rows: torch.Tensor) -> Masks:
    """Of [n, frames, rows, columns]: the number of the object at a pixel, 0 outside."""
    return Masks(rows.nan_to_num().clamp(0, MOST_NUMBERS - 1).long(), MOST_NUMBERS)


def _pixels(rows: torch.Tensor) -> Images:
    """Of [n, (frames,) height, width, channels]."""
    found = rows.flatten(0, -4).movedim(-1, -3)[:, :3]
    return Images(found, found.new_zeros(len(found), 0))


def _values(rows: torch.Tensor) -> Ratings:
    """Vectors, logits or scores, as numbers."""
    return Ratings(rows.flatten(), torch.zeros(rows.numel(), dtype=torch.long))


def _ratings(rows: torch.Tensor) -> Ratings:
    """The better half of a run's own scores counts as taken."""
    scores = rows.flatten()
    return Ratings(scores, (scores > scores.median()).long())


def _actions(rows: torch.Tensor) -> Actions:
    """The range of a dimension is that of a run's own actions."""
    values = rows.flatten(1, -2) if rows.dim() > 3 else rows
    low = values.amin((0, 1))
    return Actions(values, low, torch.maximum(values.amax((0, 1)), low + 1e-6))  # a constant one has no range


def _transcripts(rows: torch.Tensor) -> Transcripts:
    """Of [n, words, 2]: a token and its log probability."""
    return Transcripts([" ".join(str(int(t)) for t in row) for row in rows[..., 0]], rows[..., 1])


# {family: the outputs of answers [n, ...]}
_ANSWERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "encoding": _values,
    "pixels": _pixels,
    "objects": _objects,
    "tracking": _tracks,
    "detection": _detections,
    "segmentation": lambda rows: Masks(rows.argmax(-1), rows.shape[-1]),
    "speech": _transcripts,
    "audio": lambda rows: Spectrograms(rows.mT),
    "policy": _actions,
    "structure": lambda rows: Structures(rows[..., :3]),
    "recommendation": _ratings,
}
