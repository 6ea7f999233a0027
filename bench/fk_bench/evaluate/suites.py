"""Suites: declared items (models x workloads x hosts) as data, with a digest that every row carries.

`suites/NAME.toml` are shipped; a path to a file of the same form works, too. docs/evaluate.md describes the fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from fastkernels.core.registry import UnknownName
from fk_bench.evaluate.macro_eval import Item

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).with_name("suites")
KINDS = ("text", "images", "requests")
PROBED = ("files", "tokenizers", "draft", "request")  # tables of a model that its probe may change
MEDIA = ("image", "video", "audio")
COMPARED = ("values", "boxes", "masks", "tokens")  # of outputs of requests
DEVICES = ("any", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LIBRARIES = {  # models of run/hosts/libraries.py and their hosts
    "dlrm_dcn": "torchrec", "lightgcn": "torch_geometric", "detector": "ultralytics", "openfold3": "openfold3",
    "gaussians": "gsplat",
}  # fmt: skip
HOSTS = {  # and the kinds of workloads that they run
    "fastkernels": ("text", "requests"), "vllm": ("text",), "sglang": ("text",), "transformers": ("text", "images"),
    "timm": ("images",), "diffusers": ("images",), "fla": ("text",), **dict.fromkeys(LIBRARIES.values(), ("requests",)),
}  # fmt: skip
_T = TypeVar("_T")


class SuiteError(ValueError):
    """A suite cannot be used; the message names the entry and what it may be."""


@dataclass(frozen=True)
class Workload:
    """The work of a host in a round.

    lengths     (prompt, output) tokens of a request, repeated as needed; of text
    throughput  requests at once, or images of a call; latency: the same for the latency, usually 1
    calls       of a model in a round; of images, and of requests to a runner that makes no text
    media       'image', 'video' or 'audio': each request of text has one, too
    compare     how outputs of requests are compared: 'values', 'boxes' after matching them, 'masks' or 'tokens'
    """

    kind: str
    about: str
    throughput: int
    latency: int = 1
    rounds: int = 5
    lengths: tuple[tuple[int, int], ...] = ()
    calls: int = 8
    media: str = ""
    compare: str = "values"

    @property
    def longest(self) -> int:
        return max((a + b for a, b in self.lengths), default=0)


@dataclass(frozen=True)
class Model:
    """A model by its configuration; weights are random and the same in all hosts.

    config    fields of a configuration of transformers, with model_type; or public: the name of known sizes, or of an
              architecture of our engine, which has transformers' default sizes
    timm      a name of timm instead; arguments: of its constructor
    named     a pipeline of diffusers instead, by its name in e2e.pictures.named; steps: of denoising
    library   a model of a library instead, by its name in LIBRARIES; arguments: of it
    path      the folder of a checkpoint instead, which no suite names; see own_model
    layers    at most so many are kept; 0: all
    files     {file of JSON: its content} of the checkpoint's folder: a processor's, or those of a pipeline's parts
    tokenizers  {folder in it: most tokens, or {longest, tokens = {special token: its id}}}: tokenizers of bytes
    draft     configuration of a model that drafts three tokens of a step, in our engine
    request   sizes of a request to our engine's runner; see run/hosts/sent.py. Of a pipeline in diffusers: frames
    probe     fields that make it small, for the search for culprits; in tables, those of PROBED
    weights   'saved': a checkpoint is written once; 'dummy': each host draws its own
    """

    category: str
    config: Mapping[str, Any] = field(default_factory=dict)
    public: str = ""
    timm: str = ""
    named: str = ""
    library: str = ""
    path: str = ""
    steps: int = 1
    layers: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "saved"
    image_size: int = 0
    files: Mapping[str, Any] = field(default_factory=dict)
    tokenizers: Mapping[str, Any] = field(default_factory=dict)
    draft: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pipeline(self) -> bool:
        """Whether it is a pipeline whose parts are configurations among its files."""
        return "model_index.json" in self.files

    @property
    def small(self) -> Model:
        """The model that probes run."""
        if self.timm:
            return replace(self, arguments={**self.arguments, **self.probe})
        if self.library:
            probe = dict(self.probe)
            request = _merged(self.request, probe.pop("request", {}))
            return replace(self, arguments=_merged(self.arguments, probe), request=request)
        if self.path:
            return replace(self, layers=self.probe["layers"], weights="dummy") if self.probe else self
        if self.named:
            return replace(self, image_size=int(self.probe.get("image_size", self.image_size)))
        probe = dict(self.probe)
        size = probe.pop("image_size", self.image_size) if self.pipeline else self.image_size
        own: dict[str, Any] = {name: _merged(getattr(self, name), probe.pop(name, {})) for name in PROBED}
        return replace(self, config=_merged(self.config, probe), image_size=int(size), **own)


def _merged(given: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with the fields of other ones, in tables within them, too."""
    both = {
        k
        for k in given.keys() & more.keys()
        if isinstance(given[k], Mapping) and isinstance(more[k], Mapping)
    }
    return {**given, **more, **{k: _merged(given[k], more[k]) for k in both}}


@dataclass(frozen=True)
class _Top:
    """The fields of a suite's file outside its models, workloads and items."""

    about: str = ""
    device: str = "any"
    categories: Sequence[str] = ()
    memory_gib: float = 16.0
    threads: int = 0
    dtype: str = "auto"
    kernels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Kernels:
    """The options of the judge that a suite may give."""

    sources: Sequence[str] = ()
    rounds: int = 5
    seconds: float = 1.0
    most_cases: int = 0


@dataclass(frozen=True)
class _Served:
    """Items of all architectures that our engine serves, one for each host that has them.

    layers   of a model, at most; its first public size, or else transformers' default configuration
    minutes  {host: of an item}; the hosts of the items
    lacks    {host: architectures that it does not have}
    fields   {architecture: fields of its configuration that differ}
    categories  {category: its architectures}; the others are of `category`
    """

    category: str
    workload: str
    minutes: Mapping[str, Any]
    layers: int = 0
    timeout: float = 300.0
    lacks: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Absent:
    """An architecture that is declared and has no item: it counts as not run."""

    category: str
    reason: str


@dataclass(frozen=True)
class _Small:
    """The items of another suite in our engine whose models have a probe, with these small models.

    throughput, calls, rounds  of a workload, at most
    """

    of: str
    minutes: float
    throughput: int = 3
    calls: int = 2
    rounds: int = 3
    timeout: float = 120.0


@dataclass(frozen=True)
class Entry:
    """An item with all that is needed to measure it. minutes: expected, by the suite's own machine."""

    item: Item
    model: Model
    workload: Workload
    minutes: float
    compiled: bool
    timeout: float
    engine_args: Mapping[str, Any]

    @property
    def name(self) -> str:
        i = self.item
        return f"{i.model}/{i.workload}/{i.host}" + (f"/tp{i.ranks}" if i.ranks > 1 else "")


@dataclass(frozen=True)
class Suite:
    """All that is declared.

    memory_gib, threads  of one process; 0 threads: all cores
    kernels              options of the judge for the ops of a set
    without              declared architectures without an item
    """

    name: str
    about: str
    device: str
    categories: tuple[str, ...]
    entries: tuple[Entry, ...]
    memory_gib: float
    threads: int
    dtype: str
    kernels: Mapping[str, Any]
    digest: str
    without: Mapping[str, Absent] = field(default_factory=dict)

    @property
    def declared(self) -> list[Item]:
        """All items that the score is over: those of the entries, and one of each architecture without any."""
        absent = [Item(a.category, name, "none", "fastkernels") for name, a in self.without.items()]
        return [*(e.item for e in self.entries), *absent]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Suite:
    """Read a suite by name or path. Raises SuiteError, and UnknownName for the name."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise UnknownName("suite", name, [*names(), "a path of a .toml file"])
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SuiteError(f"suite {path}: {error}") from error
    return read(data, path.stem)


def read(data: Mapping[str, Any], name: str) -> Suite:
    """A suite from its tables. Raises SuiteError."""
    if "small" in data:
        return _small(data, name)
    if "served" in data:
        data = _with_served(data)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
    top = _top(name, {k: v for k, v in data.items() if k not in ("workloads", "models", "items", "without")})
    workloads = {k: _workload(k, v) for k, v in _table(data, "workloads").items()}
    models = {k: _model(k, v) for k, v in _table(data, "models").items()}
    items = data.get("items")
    if not isinstance(items, list) or not items:
        raise SuiteError(f"suite {name}: it needs tables [[items]], got {items!r}")
    entries = tuple(_entry(n, given, models, workloads) for n, given in enumerate(items))
    found = [e.item for e in entries]
    if twice := next((e.name for e in entries if found.count(e.item) > 1), None):
        raise SuiteError(f"suite {name}: {twice} is declared twice")
    categories = tuple(top.categories or sorted({m.category for m in models.values()}))
    given = data.get("without", {})
    absent = (
        {k: _made(f"[without.{k}]", Absent, v) for k, v in given.items()}
        if isinstance(given, Mapping)
        else {}
    )
    used = {e.item.category for e in entries} | {a.category for a in absent.values()}
    if unknown := sorted(used - {*categories}):
        raise SuiteError(
            f"suite {name}: category {unknown[0]!r} is not one of its categories: {', '.join(categories)}"
        )
    return Suite(
        name, top.about, top.device, categories, entries, float(top.memory_gib), top.threads, top.dtype,
        top.kernels, digest, absent,
    )  # fmt: skip


def _small(data: Mapping[str, Any], name: str) -> Suite:
    """The suite that [small] stands for. Raises SuiteError, UnknownName."""
    given = _made("[small]", _Small, data["small"])
    top = _top(name, {k: v for k, v in data.items() if k != "small"})
    whole = load(given.of)
    entries = []
    for e in whole.entries:
        if e.item.host != "fastkernels" or not e.model.probe:
            continue
        load_ = replace(
            e.workload, throughput=min(e.workload.throughput, given.throughput), rounds=given.rounds,
            calls=min(e.workload.calls, given.calls),
            lengths=tuple((min(a, 24), min(b, 8)) for a, b in e.workload.lengths),
        )  # fmt: skip
        entries.append(replace(
            e, model=e.model.small, workload=load_, minutes=given.minutes, timeout=given.timeout, compiled=False
        ))  # fmt: skip
    categories = tuple(c for c in whole.categories if any(e.item.category == c for e in entries))
    digest = hashlib.sha256(
        json.dumps([data, whole.digest], sort_keys=True, default=str).encode()
    ).hexdigest()[:16]
    return Suite(
        name, top.about, top.device, categories, tuple(entries), float(top.memory_gib), top.threads, top.dtype,
        top.kernels, digest,
    )  # fmt: skip


def architecture_of(model: Model) -> str:
    """The name of our model file that runs this model; '' for a model of which we have none."""
    from fastkernels.models.common.descriptions.registry import by_architecture, models
    from fk_bench.core.model_names import PUBLIC, public_name

    config = model.config
    if model.public:
        key = public_name(model.public)
        kind = PUBLIC[key][0] if key else ""
        return (
            model.public if key is None else next(n for n, m in models().items() if m.arch.model_type == kind)
        )
    if model.draft:
        return by_architecture()[model.draft["architectures"][0]].name
    given = config.get("architectures") or [model.files.get("model_index.json", {}).get("_class_name", "")]
    if given[0] in by_architecture():
        return by_architecture()[given[0]].name
    timm, own = str(config.get("architecture", "")), str(config.get("model", ""))
    return next((
        n for n, m in models().items()
        if (timm and timm.startswith(m.arch.timm or "-")) or (own and own.startswith(m.arch.ultralytics or "-"))
    ), "")  # fmt: skip


def _with_served(data: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a suite with those that [served] stands for. Raises SuiteError."""
    from fastkernels.models.common.descriptions.registry import models

    given = _made("[served]", _Served, data["served"])
    texts = (m for m in models().values() if m.arch.runner == "Generate" and m.arch.media != ("audio",))
    found = {m.name: m for m in texts}
    listed = [*given.lacks.values(), *given.categories.values()]
    named = {*given.fields, *(name for names in listed for name in names)}
    category = {name: own for own, names in given.categories.items() for name in names}
    for what, values, known in (
        ("architecture", named, found), ("host", {*given.minutes, *given.lacks}, HOSTS),
    ):  # fmt: skip
        if wrong := sorted(set(values) - {*known}):
            raise SuiteError(f"[served]: {UnknownName(what, wrong[0], known)}")
    made, items = {}, []
    for name, model in found.items():
        public = next((hub.rpartition("/")[2].lower() for hub in model.arch.public), name)
        made[name] = {
            "category": category.get(name, given.category), "public": public,
            "config": dict(given.fields.get(name, {})),
            "weights": "dummy", "layers": given.layers,
        }  # fmt: skip
        items += [
            {
                "model": name, "workload": given.workload, "host": host, "minutes": minutes, "timeout": given.timeout,
            }
            for host, minutes in given.minutes.items() if name not in given.lacks.get(host, ())
        ]  # fmt: skip
    rest = {k: v for k, v in data.items() if k != "served"}
    return {
        **rest, "models": {**made, **data.get("models", {})}, "items": [*items, *data.get("items", [])],
    }  # fmt: skip


def _top(name: str, given: Mapping[str, Any]) -> _Top:
    from fk_bench.kernels.judge.correctness.cases import SOURCES

    where = f"suite {name}"
    made = _made(where, _Top, given)
    kernels = _made(f"{where}, [kernels]", _Kernels, made.kernels)
    for what, values, known in (
        ("device", [made.device], DEVICES), ("dtype", [made.dtype], DTYPES), ("source", kernels.sources, SOURCES),
    ):  # fmt: skip
        if wrong := [v for v in values if v not in known]:
            raise SuiteError(f"{where}: {UnknownName(what, str(wrong[0]), known)}")
    if made.memory_gib <= 0 or made.threads < 0:
        raise SuiteError(f"{where}: memory_gib is above 0, and threads at least 0 (all cores)")
    if kernels.rounds < 3 or kernels.seconds <= 0 or kernels.most_cases < 0:
        raise SuiteError(
            f"{where}, [kernels]: rounds is at least 3, seconds above 0, most_cases at least 0 (all)"
        )
    return made


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    if not isinstance(found, Mapping) or not found:
        raise SuiteError(f"a suite needs a table [{key}.NAME], got {found!r}")
    return found


def _made(what: str, cls: type[_T], given: Mapping[str, Any]) -> _T:
    """An object of a table's fields. Raises SuiteError for a field that is unknown, missing or of another type."""
    if not isinstance(given, Mapping):
        raise SuiteError(f"{what}: a table of fields is needed, got {given!r}")
    hints = get_type_hints(cls)
    for key, value in given.items():
        if key not in hints:
            raise SuiteError(f"{what}: {UnknownName('field', key, hints)}")
        kind = get_origin(hints[key]) or hints[key]
        fits = isinstance(value, (int, float) if kind is float else kind) and not (
            (isinstance(value, bool) and kind is not bool) or (isinstance(value, str) and kind is not str)
        )
        if not fits:
            raise SuiteError(f"{what}: {key} = {value!r} is of another type than {kind.__name__}")
    try:
        return cls(**given)
    except TypeError as error:
        raise SuiteError(f"{what}: {error}; fields: {', '.join(hints)}") from None


def _workload(name: str, given: Mapping[str, Any]) -> Workload:
    made = _made(f"workload {name}", Workload, _with_tuples(name, given))
    if made.kind not in KINDS:
        raise SuiteError(f"workload {name}: kind {made.kind!r} is not one of {', '.join(KINDS)}")
    if (made.kind == "text") != bool(made.lengths) or min((min(p) for p in made.lengths), default=1) < 1:
        raise SuiteError(f"workload {name}: text needs lengths = [[prompt, output], ...], other kinds none")
    if made.media not in ("", *MEDIA) or (made.media and made.kind != "text"):
        raise SuiteError(
            f"workload {name}: media = {made.media!r} is none of {', '.join(MEDIA)}, of a workload of text"
        )
    if made.compare not in COMPARED:
        raise SuiteError(f"workload {name}: {UnknownName('comparison', made.compare, COMPARED)}")
    if min(made.throughput, made.latency, made.calls) < 1 or made.rounds < 3:
        raise SuiteError(f"workload {name}: throughput, latency and calls are at least 1, rounds at least 3")
    return made


def _with_tuples(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a workload with its lengths as tuples of two whole numbers. Raises SuiteError."""
    if not isinstance(given, Mapping) or "lengths" not in given:
        return given
    lengths = given["lengths"]
    if not isinstance(lengths, list) or not all(
        isinstance(p, (list, tuple)) and len(p) == 2 and all(type(n) is int for n in p) for p in lengths
    ):
        raise SuiteError(f"workload {name}: lengths is [[prompt, output], ...] in tokens, got {lengths!r}")
    return {**given, "lengths": tuple((a, b) for a, b in lengths)}


def _model(name: str, given: Mapping[str, Any]) -> Model:
    if isinstance(given, Mapping) and "path" in given:
        raise SuiteError(f"model {name}: a suite names no folder; give one with --model")
    made = _made(f"model {name}", Model, given)
    given_by = made.config or made.public or made.files, made.timm, made.named, made.library
    if sum(map(bool, given_by)) != 1:
        raise SuiteError(f"model {name}: give one of config, public, files, timm, named or library")
    if made.library and made.library not in LIBRARIES:
        raise SuiteError(f"model {name}: {UnknownName('library model', made.library, LIBRARIES)}")
    for key, content in made.files.items():
        if not isinstance(content, Mapping) or Path(key).is_absolute() or ".." in Path(key).parts:
            raise SuiteError(f"model {name}: files has tables by names of files in the folder, got {key!r}")
    if made.steps < 1 or made.layers < 0 or made.image_size < 0:
        raise SuiteError(
            f"model {name}: steps is at least 1, layers and image_size at least 0 (the model's own)"
        )
    if made.config and not made.public and "task" not in made.config:  # ultralytics' have a task
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        from fastkernels.models.common.descriptions.registry import models

        kind = made.config.get("model_type", "")
        types = {*CONFIG_MAPPING_NAMES, *(m.arch.model_type for m in models().values())}
        if kind not in types:
            raise SuiteError(f"model {name}: {UnknownName('model_type', str(kind), sorted(types))}")
    if made.public:
        from fastkernels.models.common.descriptions.registry import models
        from fk_bench.core.model_names import PUBLIC, public_name

        if public_name(made.public) is None and made.public not in models():
            raise SuiteError(
                f"model {name}: {UnknownName('public model', made.public, [*PUBLIC, *models()])}"
            )
    if made.named:
        from fk_bench.e2e.pictures.named import NAMED

        if (
            known := [n for n, (host, _) in NAMED.items() if host == "diffusers"]
        ) and made.named not in known:
            raise SuiteError(f"model {name}: {UnknownName('pipeline', made.named, known)}")
    return made


def _entry(
    n: int, given: Mapping[str, Any], models: Mapping[str, Model], workloads: Mapping[str, Workload]
) -> Entry:
    where = f"item {n + 1}"
    if not isinstance(given, Mapping):
        raise SuiteError(f"{where}: a table of fields is needed, got {given!r}")
    values = dict(given)
    for key, known in (("model", models), ("workload", workloads), ("host", HOSTS)):
        if values.get(key) not in known:
            raise SuiteError(f"{where}: {UnknownName(key, str(values.get(key)), known)}")
    ranks = values.get("ranks", 1)
    if type(ranks) is not int or ranks < 1:
        raise SuiteError(f"{where}: ranks = {ranks!r} is no whole number of at least 1")
    model, workload = models[values["model"]], workloads[values["workload"]]
    item = Item(
        model.category,
        values.pop("model"),
        values.pop("workload"),
        values.pop("host"),
        values.pop("ranks", 1),
    )
    if workload.kind not in HOSTS[item.host]:
        raise SuiteError(f"{where}: {item.host} has no workload of {workload.kind}")
    if (item.host == "timm") != bool(model.timm) or (
        bool(model.named) if item.host != "diffusers" else not (model.named or model.pipeline)
    ):
        raise SuiteError(
            f"{where}: host {item.host} and model {item.model} do not fit: timm's models are for timm, pipelines for"
            " diffusers"
        )
    wanted = LIBRARIES.get(model.library, "")
    if (wanted or item.host in LIBRARIES.values()) and item.host != wanted:
        raise SuiteError(
            f"{where}: host {item.host} and model {item.model} do not fit: "
            + (
                f"library = {model.library!r} is for {wanted}"
                if wanted
                else "it needs a model with `library`"
            )
        )
    made = _made(where, Entry, {
        "item": item, "model": model, "workload": workload, "minutes": 1.0, "compiled": False, "timeout": 300.0,
        "engine_args": {}, **values,
    })  # fmt: skip
    if not (0 < made.minutes < math.inf and 0 < made.timeout < math.inf):
        raise SuiteError(
            f"{where}: minutes = {made.minutes:g} and timeout = {made.timeout:g} (seconds) are above 0 and finite"
        )
    return made


def of_model(suite: Suite, model: str) -> Suite:
    """The part of a suite that is about one model; its digest names the part, too. Raises UnknownName."""
    kept = tuple(e for e in suite.entries if e.item.model == model)
    if not kept:
        raise UnknownName("model of the suite", model, sorted({e.item.model for e in suite.entries}))
    categories = tuple({e.item.category: None for e in kept})
    return replace(
        suite,
        name=f"{suite.name}:{model}",
        entries=kept,
        categories=categories,
        digest=f"{suite.digest}:{model}",
        without={},
    )
