"""The architectures, their cases and the lanes that are compared. Models are those of the suite `full`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

from fk_bench.evaluate import suites
from fk_bench.tables.architectures import OURS, PATCHED, PLAIN

LIBRARY, COMPILED, KEPT = "library", "library, compiled", "library, embeddings kept"
POLICIES = "policies"  # a lane whose rows have names of their own
CAP = 100_000  # rows of a table of the 26 of Criteo, as in the cases of embedding_bag
BLOCKS = "blocks"
LARGE = 512  # pixels of the larger images of encoders
FIRST, LATER, LAST = 0, 1, 2  # waves: all lanes of a wave run before those of the next one
Case = dict[str, int]


@dataclass(frozen=True)
class Lane:
    """One process of a subject.

    run      the name of its function in references.RUNS
    needs    the module that must be installed
    mode     of torch.compile; '': not compiled; BLOCKS: repeated blocks are, and the model runs in a CUDA graph
    patched  whether our kernels are put in, before the model is compiled
    """

    name: str
    run: str
    needs: str = "torch"
    mode: str = ""
    wave: int = FIRST
    patched: bool = False

    @property
    def with_ours(self) -> Lane:
        """The same lane with our kernels in the reference."""
        return replace(self, name=self.name + PATCHED, patched=True)

    @property
    def installed(self) -> bool:
        return find_spec(self.needs) is not None


@dataclass(frozen=True)
class Subject:
    """An architecture, and what is timed.

    model   of the suite, or another one
    cases   {batch, and fields of the request}; the smallest first
    config  fields of the configuration that differ from the suite's
    dtype   of all lanes
    tiny    fields that make it small, for a model without a probe
    options of our engine
    other   the suite's model of a library with the same sizes
    arguments, renamed, fixed: of that library's model: arguments that differ, {field of our request: its field}, and
            further fields of its request
    prepared  references take prepared inputs: tensors of images. Ours are then compared from checked requests on
    limit   seconds of a lane, over the default
    """

    model: str | suites.Model
    cases: Sequence[Case]
    lanes: Sequence[Lane] = ()
    config: Mapping[str, Any] | None = None
    dtype: str = "auto"
    tiny: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    other: str = ""
    arguments: Mapping[str, Any] | None = None
    renamed: Mapping[str, str] | None = None
    fixed: Mapping[str, int] | None = None
    prepared: bool = False
    limit: float = 1.0

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Ours, those of references, and PyTorch's ops: early where no reference is installed."""
        others = any(lane.installed for lane in self.lanes)
        return (Lane(OURS, "engine"), *self.lanes, Lane(PLAIN, "engine", wave=LAST if others else FIRST))


# Seconds that lanes need on an H200. A lane that was ended has the seconds that its other cases would have taken, too.
NEEDS: dict[tuple[str, str], float] = {
    ("mobilenetv4", OURS): 140.0, ("efficientnetv2", OURS): 82.0, ("efficientnetv2", "timm, compiled"): 110.0,
    ("convnextv2", OURS): 140.0, ("yolov10", OURS): 220.0, ("yolov10", COMPILED): 200.0,
    ("yolov10", COMPILED + PATCHED): 200.0, ("rwkv7", OURS): 74.0, ("rwkv7", "fla"): 100.0,
    ("rwkv7", "fla, graph"): 220.0, ("rwkv7", f"fla, graph{PATCHED}"): 220.0,
    ("retnet", "fla, graph"): 150.0, ("gla", "fla, graph"): 150.0, ("whisper", "transformers, compiled"): 150.0,
}  # fmt: skip


def declared(name: str | suites.Model) -> suites.Model:
    if isinstance(name, suites.Model):
        return name
    return _models()[name]


@cache
def _models() -> dict[str, suites.Model]:
    return {e.item.model: e.model for e in suites.load("full").entries}


def model_of(subject: Subject, tiny: bool) -> suites.Model:
    """The model that our engine runs."""
    model = declared(subject.model)
    if tiny and subject.tiny is not None:
        small = replace(model, config={**model.config, **subject.tiny}, layers=0)
        return small.small if model.probe else small
    if tiny:
        return model.small
    return replace(model, config={**model.config, **(subject.config or {})}, layers=0)


def sizes_of(subject: Subject, case: Case, tiny: bool) -> dict[str, Any]:
    """The fields of a request."""
    model = model_of(subject, tiny)
    own = {k: v for k, v in case.items() if k != "batch"}
    others = OF_SOUNDS if "width" in case else OF_IMAGES if "seconds" in case else ()
    given = {k: v for k, v in model.request.items() if k not in others}  # of a model that reads several media
    return {**own, **TINY_TEXT, **given} if tiny else {**given, **own}


OF_SOUNDS, OF_IMAGES = ("seconds",), ("width", "height", "frames")
TINY_TEXT = {"tokens": 12, "new": 4}  # of a prompt of a small model, and of its answer


def criteo() -> list[int]:
    from fastkernels.core import registry

    case = next(c for c in registry.get("embedding_bag").cases if c.name == "dlrm_one_2048")
    return [min(int(rows), CAP) for rows in case.dims["tables"]]


def _batches(*numbers: int, **sizes: int) -> list[Case]:
    return [{"batch": n, **sizes} for n in numbers]


def _texts(*numbers: tuple[int, int, int]) -> list[Case]:
    return [{"batch": n, "tokens": tokens, "new": new} for n, tokens, new in numbers]


def _host(host: str, *modes: tuple[str, int], run: str = "host") -> tuple[Lane, ...]:
    """Lanes of a host by torch.compile's modes and waves. Without a compiler, the lane has the host's name."""
    names = {"": host, "max-autotune": f"{host}, autotuned"}
    return tuple(Lane(names.get(mode, f"{host}, compiled"), run, host, mode, wave) for mode, wave in modes)


def _fla(model: str, tiny: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Subject:
    graph = Lane("fla, graph", "fla", "fla", "graph")
    return Subject(
        model,
        _texts((1, 512, 128), (4, 16384, 128), (32, 512, 128), (64, 1024, 128)),
        (graph, graph.with_ours, Lane("fla", "fla", "fla", wave=LATER)),
        config,
        "bfloat16",
        tiny,
    )


PARTS, GRAPHS, TUNED, EAGER = (
    (BLOCKS, FIRST),
    ("reduce-overhead", FIRST),
    ("max-autotune", LATER),
    ("", LATER),
)
LIBRARIES = {"dlrmv2": "torchrec", "lightgcn": "torch_geometric", "gaussians": "gsplat", "openfold3": "openfold3",
             "yolov10": "ultralytics"}  # fmt: skip


def _library(name: str, *lanes: str) -> tuple[Lane, ...]:
    """LIBRARY runs in the first wave where nothing faster is named. All but KEPT are there with our kernels, too."""
    made = [
        Lane(lane, "library", LIBRARIES[name], "reduce-overhead" if lane == COMPILED else "",
             LATER if lane == LIBRARY and len(lanes) > 1 else FIRST)
        for lane in lanes
    ]  # fmt: skip
    return (*made, *(lane.with_ours for lane in made if lane.name != KEPT))


def subjects() -> dict[str, Subject]:
    """Subjects by name; quick ones that had no figure first."""
    rows, view = criteo(), {"width": 1920, "height": 1080}
    tables = [{"name": f"t{i}", "num_embeddings": n} for i, n in enumerate(rows)]
    pooled = (Lane("vllm", "pooling", "vllm", wave=LATER),)
    large = {"max_num_batched_tokens": 1 << 17}  # a batch is one step
    images: dict[str, Any] = {"dtype": "bfloat16", "prepared": True, "options": large}
    half: dict[str, Any] = {"dtype": "float16", "options": large}
    picture = {"width": 1024, "height": 1024, "tokens": 1500}
    policies = Lane(POLICIES, "policies", "transformers")
    encoders = {
        "mobilenetv4": Subject(
            "mobilenetv4-ours", _batches(1, 8, 32), _host("timm", GRAPHS, TUNED), **images
        ),
        "efficientnetv2": Subject(
            "efficientnetv2-ours", _batches(1, 8, 32), _host("timm", GRAPHS, TUNED), limit=1.5, **images
        ),
        "convnextv2": Subject("convnextv2-ours", _batches(1, 8, 32), _host("timm", GRAPHS, TUNED), **images),
    }
    return {
        **encoders,
        **{
            f"{name}-512": replace(
                given, config={"pretrained_cfg": {"input_size": [3, LARGE, LARGE], "crop_pct": 1.0}},
                cases=_batches(1, 8, 32, width=LARGE, height=LARGE),
            )
            for name, given in encoders.items()
        },
        "bge-m3": Subject(
            "bge-m3", _batches(1, 32, 256, tokens=512), (*_host("transformers", PARTS, run="texts"), *pooled),
            **half,
        ),
        "colbertv2": Subject(
            "colbertv2", _batches(1, 32, 256, tokens=300), (*_host("transformers", PARTS, run="texts"), *pooled),
            **half,
        ),
        "bge-reranker": Subject(
            "bge-reranker", _batches(1, 32, 256, tokens=512), (*_host("transformers", PARTS, run="texts"), *pooled),
            **half,
        ),
        "dlrmv2": Subject(
            "dlrmv2", _batches(1, 32, 2048, bag=1), _library("dlrmv2", LIBRARY, COMPILED), {"tables": tables},
            other="dlrmv2-torchrec", arguments={"rows": rows}, prepared=True,
        ),
        "lightgcn": Subject(
            "lightgcn", _batches(1, 32, 512, items=1000), _library("lightgcn", LIBRARY, COMPILED, KEPT),
            other="lightgcn-pyg",
        ),
        "rtdetrv2": Subject(
            "rtdetrv2-r50", _batches(1, 4, 32), _host("transformers", GRAPHS, EAGER), dtype="float16",
            prepared=True, options=large,
        ),
        "yolov10": Subject(
            "yolov10-b", _batches(1, 4, 32), _library("yolov10", LIBRARY, COMPILED), dtype="float16",
            other="yolov10-b-ultralytics", prepared=True, options=large,
        ),
        "dp3": Subject(
            "dp3", _batches(1, 8, 100), (Lane(POLICIES, "policies", "diffusers"),), prepared=True,
            limit=2.0,
        ),
        "ptv3": Subject("ptv3", _batches(1, 8, points=100_000), ()),
        "gaussians": Subject(
            "gaussians", _batches(1, 4, **view), _library("gaussians", LIBRARY), other="gaussians-gsplat"
        ),
        "instant-ngp": Subject("instant-ngp", _batches(1, **view), ()),
        "gla": _fla("gla", {
            "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 128,
        }),
        "retnet": _fla("retnet", {
            "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 128,
        }),
        "rwkv7": _fla("rwkv7", {
            "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "decay_low_rank_dim": 16,
            "gate_low_rank_dim": 16, "a_low_rank_dim": 16, "v_low_rank_dim": 16, "vocab_size": 128,
        }),
        "whisper": Subject(
            "whisper-large-v3", [{"batch": n, "seconds": 30, "tokens": 4, "new": 128} for n in (1, 32)],
            (*_host("transformers", GRAPHS, ("", LAST), run="whisper"), Lane("vllm", "vllm", "vllm", wave=LATER)),
            dtype="float16",
        ),
        "sam3": Subject(
            "sam3-ours", _batches(1, 4), _host("transformers", PARTS, EAGER), dtype="bfloat16",
            options=large,
        ),
        "sam3-video": Subject(
            "sam3-video", _batches(1, frames=16), (), dtype="bfloat16", options=large, limit=2.0
        ),
        "oasis": Subject(
            "oasis", [{"batch": 1, "frames": 16}, {"batch": 4, "frames": 16}, {"batch": 8, "frames": 32}], ()
        ),
        "pi0": Subject(
            "pi0", [{"batch": 1, "cameras": n} for n in (1, 3)], (policies, policies.with_ours), prepared=True,
            limit=2.0,
        ),
        "llada": Subject(
            "llada-8b", [{"batch": n, "tokens": 256, "new": 256, "steps": 64} for n in (1, 8)],
            _host("transformers", PARTS, run="unmask"), {"n_layers": 32}, "bfloat16",
        ),
        "cosyvoice3": Subject("cosyvoice3", _batches(1, 8), ()),
        "qwen2-vl": Subject(
            "qwen2-vl-7b", [{"batch": n, "new": 128, **picture, "text": 64} for n in (1, 8, 32)],
            (Lane("vllm", "vllm", "vllm"),), dtype="bfloat16", limit=2.0,
        ),
        "qwen3-vl": Subject(
            "qwen3-vl-8b", [{"batch": n, "new": 128, **picture, "text": 64} for n in (1, 8, 32)],
            (Lane("vllm", "vllm", "vllm"),), dtype="bfloat16", limit=2.0,
        ),
        "qwen3-vl-moe": Subject(
            "qwen3-vl-30b", [{"batch": n, "new": 128, **picture, "text": 64} for n in (1, 8, 32)],
            (Lane("vllm", "vllm", "vllm"),), dtype="bfloat16", limit=2.0,
        ),
        "qwen2.5-omni": Subject(
            "qwen2_5-omni-7b", [{"batch": n, "new": 128, **picture, "text": 64} for n in (1, 8, 32)],
            (), dtype="bfloat16", limit=2.0,
        ),
        "qwen2.5-omni-audio": Subject(
            "qwen2_5-omni-7b", [{"batch": n, "new": 128, "seconds": 30, "text": 64} for n in (1, 8, 32)],
            (), dtype="bfloat16", limit=2.0,
        ),
        "ttt-e2e": Subject(
            "ttt_e2e", _texts((1, 2048, 128), (8, 2048, 128)), (), {"mini_batch_size": 1024}, "bfloat16", {
                "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
                "num_attention_heads": 2, "mini_batch_size": 8, "sliding_window_size": 16, "suffix_len": 2,
            },
        ),
        "openfold3": Subject(
            "openfold3", [{"batch": 1, "residues": n} for n in (150, 400, 700)],
            _library("openfold3", LIBRARY, COMPILED), other="openfold3-library",
            renamed={"residues": "tokens"}, fixed={"rows": 1, "templates": 1},
        ),
        "sdxl": Subject(
            "sdxl-pipeline", [{"batch": n, "steps": steps} for n in (1, 4) for steps in (4, 50)],
            (Lane("diffusers, compiled", "pipeline", "diffusers", BLOCKS),), dtype="bfloat16", limit=2.0,
        ),
        "flux": Subject(
            "flux-pipeline", [{"batch": n, "steps": steps} for n in (1, 4) for steps in (4, 28)],
            (Lane("diffusers, compiled", "pipeline", "diffusers", BLOCKS),), dtype="bfloat16", limit=2.0,
        ),
        "hunyuan-video": Subject(
            "hunyuan-video",
            [{"batch": 1, "frames": frames, "steps": steps} for frames, steps in ((25, 4), (25, 30), (49, 30))],
            (
                Lane("diffusers, compiled", "pipeline", "diffusers", BLOCKS),
                Lane("diffusers", "pipeline", "diffusers", wave=LAST),
            ), dtype="bfloat16", limit=4.0,
        ),
        "siglip2": Subject(
            "siglip2-so400m", _batches(1, 8, 32), _host("transformers", PARTS), **images
        ),
        "dinov3": Subject("dinov3-l", _batches(1, 8, 32), _host("transformers", PARTS), **images),
        "swinv2": Subject("swinv2-b", _batches(1, 8, 32), _host("transformers", PARTS), **images),
        "vjepa2": Subject("vjepa2-l", _batches(1, 8), _host("transformers", PARTS), **images),
    }  # fmt: skip


def small(subject: Subject) -> Subject:
    """Its first case, with a batch of two where it has larger ones; the sizes are those of the suite's small model."""
    batch = min(2, subject.cases[-1]["batch"])
    return replace(subject, cases=[{**subject.cases[0], "batch": batch, "tiny": 1}], dtype="float32")
