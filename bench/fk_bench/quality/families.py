"""Families of models: the metric that c is made of, the discrepancy at which c is 0, and the inputs and outputs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fk_bench.core.hub import ModelError
from fk_bench.quality import text
from fk_bench.quality.forced import read_rows
from fk_bench.quality.metrics.outputs import Embeddings, Images, Scores

CORPUS = 48  # tokens of a document


@dataclass(frozen=True)
class Family:
    """bound: of the metric's discrepancy, not of its value. hosts: none, if the models come later."""

    metric: str
    bound: float
    hosts: tuple[str, ...] = ()


FAMILIES = {
    "text": Family("kl", 0.1, ("fastkernels", "vllm", "sglang", "transformers")),
    "embedding": Family("embedding_cosine", 0.1, ("fastkernels", "transformers")),
    "vision": Family("kl", 0.05, ("timm",)),
    "image": Family("latent_cosine", 0.05, ("diffusers",)),
    "detection": Family("mean_ap", 0.2),
    "segmentation": Family("mean_iou", 0.2),
    "speech": Family("word_error_rate", 0.2),
    "audio": Family("mel_cosine", 0.1),
    "policy": Family("action_error", 0.1),
    "structure": Family("rmsd", 0.1),
    "recommendation": Family("auc", 0.05),
}
HOSTS = tuple(dict.fromkeys(host for family in FAMILIES.values() for host in family.hosts))


def family_of(model: str, host: str) -> str:
    """The family of a model in a host. Raises ModelError for a model that no metric fits."""
    if host in ("timm", "diffusers"):
        return "vision" if host == "timm" else "image"
    architectures = config_of(Path(model)).get("architectures") or [""]
    if str(architectures[0]).endswith(("ForCausalLM", "LMHeadModel", "ModelLM")):
        return "text"
    if host in FAMILIES["embedding"].hosts:
        return "embedding"
    raise ModelError(
        f"{model} has {architectures[0] or 'no architecture'}: {host} measures models that generate text"
    )


def config_of(model: Path) -> dict[str, Any]:
    """Raises ModelError for a folder without a readable config.json."""
    try:
        found = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{model}: no config.json that can be read ({error}); give a checkpoint's folder"
        ) from error
    return {**found, **found.get("text_config", {}), "architectures": found.get("architectures")}


def prepare(family: str, model: str, extent: text.Extent, folder: Path) -> int:
    """Write the inputs of all runs into folder/inputs.json; return their number. Raises ValueError."""
    inputs: list[Any]
    if family == "text":
        vocabulary = config_of(Path(model))["vocab_size"]
        inputs = [asdict(s) for s in text.cut(text.tokens_of(Path(model), vocabulary), extent)]
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
        tokens = text.tokens_of(model, config_of(model)["vocab_size"], name)
        found.append(tokens[:CORPUS])
    return found


def outputs(family: str, model: str, extent: text.Extent, folder: Path, run: str) -> Any:
    """The outputs of a run as the family's metrics read them."""
    inputs, file = json.loads((folder / "inputs.json").read_text()), folder / f"{run}.f32"
    if family == "text":
        targets = torch.tensor([t for s in inputs for t in s["tokens"]])
        rows = read_rows(file, len(targets), config_of(Path(model))["vocab_size"])
        return Scores(rows, targets, [len(s["tokens"]) for s in inputs])
    rows = read_rows(file, len(inputs))
    if family == "embedding":
        half = len(rows) // 2
        return Embeddings(rows[:half], rows[half:], torch.arange(half))
    if family == "vision":
        return Scores(rows, rows.argmax(-1), [1] * len(rows))
    latents, pixels = (tuple(shape) for shape in json.loads((folder / f"{run}.json").read_text()))
    size = torch.Size(latents).numel()
    return Images(rows[:, size:].unflatten(1, pixels), rows[:, :size].unflatten(1, latents))
