"""A checkpoint of a user as the model of a suite: the suite's hosts and workloads for models of its kind."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastkernels.models.common.descriptions import registry
from fk_bench.core import hub
from fk_bench.evaluate.suites import Entry, Model, Suite, SuiteError, architecture_of, load, names

PROBE_LAYERS = 2  # of a text model's probe, which has random weights
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".ply", ".ckpt", ".msgpack", ".ingp")
SAMPLED = 1 << 16  # bytes of a file of weights that its digest reads
COPIES = 4  # memory of a process, in sizes of the files: bfloat16 becomes float32, and layers are packed
TEXT = ("ForCausalLM", "LMHeadModel")  # ends of architectures that generate text
AUDIO = ("audio",)  # `media` of a model that generates no text from tokens alone


@dataclass(frozen=True)
class Checkpoint:
    """A folder with what is known of it. own: the model file of our engine; None if it has none."""

    folder: Path
    name: str
    architecture: str
    config: Any
    own: registry.Model | None

    @property
    def text(self) -> bool:
        """Whether it continues prompts of tokens."""
        return self.architecture.endswith(TEXT) if self.own is None else _generates(self.own)

    @property
    def pictures(self) -> bool:
        """Whether transformers has its class, whose main input are images."""
        import transformers

        return (
            getattr(getattr(transformers, self.architecture, None), "main_input_name", "") == "pixel_values"
        )


def is_checkpoint(model: str) -> bool:
    """Whether `--model` is a folder or an id of the hub, rather than a name of the suite."""
    return Path(model).expanduser().is_dir() or hub.is_id(model)


def of_checkpoint(suite: Suite, model: str) -> Suite:
    """The items of a checkpoint: for each host of the suite, those of the suite's first model of its kind.

    model  a folder, or an id of the hub; without a file of weights, they are random

    Raises SuiteError for a checkpoint that cannot be read, and for one of a kind that the suite has not.
    """
    found = _read(model)
    templates = list(_templates(suite, found))
    if not templates:
        others = [s for s in names() if s != suite.name and any(_templates(load(s), found))]
        where = f"; these suites have one: {', '.join(others)}" if others else "; no suite has one"
        raise SuiteError(
            f"--model {model}: the suite {suite.name} has no item for a model such as {found.architecture}{where}"
        )
    weights = _weights(found.folder)
    layers = getattr(found.config, "num_hidden_layers", 0) or 0
    probe = {}
    if found.text and layers > PROBE_LAYERS and not getattr(found.config, "quantization_config", None):
        probe = {"layers": PROBE_LAYERS}
    entries = []
    for template in templates:
        made = Model(
            template.model.category, path=str(found.folder), request=template.model.request, probe=probe,
            weights="saved" if weights else "dummy",
        )  # fmt: skip
        item = replace(template.item, model=found.name, category=made.category)
        entries.append(replace(template, item=item, model=made))
    gib = COPIES * sum(f.stat().st_size for f in weights) / 2**30
    return replace(
        suite, name=f"{suite.name}:{found.name}", entries=tuple(entries),
        categories=tuple({e.item.category: None for e in entries}), without={},
        digest=f"{suite.digest}:{found.name}:{_digest(found.folder, weights)}",
        memory_gib=max(suite.memory_gib, gib),
    )  # fmt: skip


def unreadable(folder: Path) -> Path | None:
    """The first file or folder of a checkpoint that the user of a cage cannot read."""
    for path in filter(Path.exists, (folder, *sorted(folder.rglob("*")))):  # not links to nothing
        mode = path.stat().st_mode
        if not mode & 0o004 or (path.is_dir() and not mode & 0o001):
            return path
    return None


def elsewhere(model: str, but: str) -> str:
    """The shipped suites that have a model of this name, for an error; '' if none has."""
    found: dict[str, str] = {}
    for suite in names():
        for known in {e.item.model for e in load(suite).entries} if suite != but else ():
            found.setdefault(_plain(known), f"fk-bench eval {suite} --model {known}")
    near = difflib.get_close_matches(_plain(model), found, 1, cutoff=0.9)
    return f"It is in another suite: {found[near[0]]}" if near else ""


def _plain(name: str) -> str:
    """A name without its case and punctuation: 'Llama-3.1-8B' and 'llama-3_1-8b' are the same model."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read(model: str) -> Checkpoint:
    from fastkernels.models.common.checkpoints.checkpoint import resolve
    from fastkernels.models.common.descriptions.description import Unsupported
    from fastkernels.models.common.plans import build

    given = Path(model).expanduser()
    try:
        if not given.is_dir():
            hub.check(model)
        folder = resolve(model).resolve()
        config = build.load_config(folder)
        architecture = build.architecture_of(config, folder)
    except (ValueError, OSError, LookupError, Unsupported) as error:
        raise SuiteError(f"--model {model}: {error}") from error
    name = folder.name if given.is_dir() else model.partition("@")[0].rpartition("/")[2]
    return Checkpoint(folder, name, architecture, config, registry.by_architecture().get(architecture))


def _generates(model: registry.Model) -> bool:
    return model.arch.runner == "Generate" and model.arch.media != AUDIO


def _templates(suite: Suite, found: Checkpoint) -> Iterator[Entry]:
    """An entry of each host of the suite whose workload fits the checkpoint."""
    for host in dict.fromkeys(e.item.host for e in suite.entries):
        mine = [e for e in suite.entries if e.item.host == host and e.item.ranks == 1]
        if host == "fastkernels" and (found.own is None or not found.text):
            fitting = _like(mine, found.own) if found.own is not None else []
        elif host == "transformers" and not found.text:
            fitting = [e for e in mine if found.pictures and e.workload.kind == "images"]
        elif host in ("fastkernels", "vllm", "sglang", "transformers") and found.text:
            alone = host != "transformers" or found.own is None or not found.own.arch.media
            fitting = [e for e in mine if alone and e.workload.kind == "text" and not e.workload.media]
        else:  # hosts that know models by a name alone
            fitting = []
        yield from fitting[:1]


def _like(entries: list[Entry], own: registry.Model) -> list[Entry]:
    """Entries of our engine for models of the same kind, those of the same architecture first."""
    known = [(registry.models()[name], e) for e in entries if (name := architecture_of(e.model))]
    same = [e for m, e in known if m.name == own.name]
    return [*same, *(e for m, e in known if own.arch.runner != "Generate" and _kind(m) == _kind(own))]


def _kind(model: registry.Model) -> tuple[str, str, str]:
    """Runner, input, and the sort of answer of a model of images."""
    from fastkernels.models.common.interfaces.detector import Detector
    from fastkernels.models.common.interfaces.segmenter import ClipSegmenter, ImageSegmenter, Segmenter

    sort = ""
    if model.arch.runner == "Encode":
        cls = registry.load(model.path)
        kinds = (Detector, ClipSegmenter, Segmenter, ImageSegmenter)
        sort = next((k.__name__ for k in kinds if isinstance(cls, type) and issubclass(cls, k)), "")
    return model.arch.runner, model.arch.inputs, sort


def _weights(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.rglob("*")) if f.suffix in WEIGHTS and f.is_file()]


def _digest(folder: Path, weights: list[Path]) -> str:
    """Of the configuration, and of the names, the sizes, the beginnings and the ends of the files of weights."""
    made = hashlib.sha256()
    for file in sorted({*filter(Path.is_file, folder.rglob("*.json")), *weights}):
        made.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        with file.open("rb") as read:
            made.update(read.read(SAMPLED))
            read.seek(max(file.stat().st_size - SAMPLED, 0))
            made.update(read.read(SAMPLED))
    return made.hexdigest()[:16]
