"""The measurements of `fk-bench patch-compare`, of any model: the loads that fit, the engines and the rows.

A model of a list is measured by a process of its own: `python -m fk_bench.e2e.asked JSON` writes its rows to standard
output, and {"failed": reason} if it cannot be measured.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from fk_bench.core import machine
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.e2e import sharing
from fk_bench.e2e.comparison import Comparison, Extent
from fk_bench.e2e.loads import BLOCK, EMBED, GENERATE, Load, room_for
from fk_bench.e2e.media import NO_MEDIA, Media, MediaPlace, placed
from fk_bench.e2e.ratios import COMMAND
from fk_bench.offline.host import HostFailed, make_row

# The rows of another of these are another comparison.
CHOSEN = {
    "before_construction": False, "no_table": False, "with_engine": False, "kv_cache_dtype": "auto", "loads": "",
    "task": GENERATE, "images": "", "audio": 0.0, "graph_sizes": "all",
}  # fmt: skip
GRAPHED_TOKENS = 512  # of the largest step that vLLM runs in a graph by default
KV_CACHE = {"vllm": "fp8", "sglang": "fp8_e4m3", "fastkernels": "fp8"}  # the hosts' names of float8_e4m3
GPU_SHARE, CPU_SHARE = 0.9, 0.3


class Prepared(NamedTuple):
    """A model that can be measured: the folder of its config, its loads, what a prompt has next to text, and its memory
    if engines share the GPU.
    """

    path: str
    loads: list[Load]
    place: MediaPlace
    need: sharing.Need | None


@dataclass(frozen=True)
class Asked:
    """The measurements that were requested, for any model.

    loads    the text of --loads
    presets  loads of a preset, which are skipped if they do not fit a model; it is refused if others do not fit
    task     one of loads.TASKS; media: of each request
    graph_sizes  'all': the host's CUDA graphs; 'loads': those of the loads only, for a start that takes less time
    """

    host: str
    python: str
    folder: Path
    timeout: float
    before_construction: bool
    ops: Sequence[str] | None
    env: Mapping[str, str]
    dtype: str
    kv_cache_dtype: str
    load_format: str
    tensor_parallel: int
    gpu_share: float
    engine_args: Mapping[str, Any]
    with_engine: bool
    loads: str
    presets: frozenset[Load]
    extent: Extent
    seed: int
    task: str = GENERATE
    media: Media = NO_MEDIA
    graph_sizes: str = "all"

    def to_json(self, models: Sequence[str]) -> str:
        fields = {**vars(self), "folder": str(self.folder), "presets": [str(load) for load in self.presets]}
        fields["extent"] = {**asdict(self.extent), "loads": [str(load) for load in self.extent.loads]}
        fields["media"] = asdict(self.media)
        return json.dumps({"models": list(models), **fields})

    @classmethod
    def from_json(cls, text: str) -> tuple[Asked, list[str]]:
        fields = json.loads(text)
        models = fields.pop("models")
        extent = {**fields["extent"], "loads": [Load.parse(load) for load in fields["extent"]["loads"]]}
        presets = frozenset(map(Load.parse, fields["presets"]))
        fields |= {"folder": Path(fields["folder"]), "presets": presets, "extent": Extent(**extent)}
        fields["media"] = Media(**fields["media"])
        return cls(**fields), models

    @property
    def gpu(self) -> bool:
        return machine.machine().gpus > 0

    @property
    def copies(self) -> int:
        """Processes of a model that share a memory: its engines, on a CPU with all ranks of each."""
        return (1 + self.with_engine) * (1 if self.gpu else self.tensor_parallel)

    def case(self) -> dict[str, Any]:
        return {
            "before_construction": self.before_construction, "no_table": bool(self.env),
            "with_engine": self.with_engine, "dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype,
            "load_format": self.load_format, "tensor_parallel": self.tensor_parallel, "loads": self.loads,
            "routing": "uniform" if self.load_format == "dummy" else "trained",  # see random_weights
            "task": self.task, **self.media.case(), "graph_sizes": self.graph_sizes,
        }  # fmt: skip

    def row(self, model: str, status: Status, reason: str, **case: Any) -> Row:
        """A row of a model without a measurement."""
        return make_row(
            self.host, {"kind": "toggled", **self.case(), **case}, {}, command=COMMAND,
            subject=Subject(model=model, host=self.host), versions=machine.interpreter(self.python).versions,
            status=status, reason=reason,
        )  # fmt: skip

    def prepared(self, model: str, at_once: int = 1) -> tuple[Prepared, dict[Load, str]]:
        """A model with the loads that fit, and why others do not.

        Raises ModelError and ValueError for a config that cannot be used, and for loads that the model or the memory
        has no room for.
        """
        path, place = placed(
            model, self._folder_of(model), self.folder, self.extent.loads, self.task, self.media,
            self.load_format == "dummy",
        )  # fmt: skip
        self._check_ranks(path)
        kept, skipped = list[Load](), dict[Load, str]()
        shared = at_once > 1 or self.with_engine
        limit = sharing.limit(self.gpu)  # of the memory, when nothing else runs
        for load in self.extent.loads:
            why = too_long(model, path, load, place)
            if not why and not shared:
                why = self._too_large(model, path, [*kept, load], limit, place)
            if why and load not in self.presets:
                raise ValueError(why)
            if why:
                skipped[load] = why
            else:
                kept.append(load)
        if not shared:
            if not kept:
                raise ValueError("; ".join(skipped.values()))
            return Prepared(path, kept, place, None), skipped
        one = self._need(model, path, kept, place)
        while self.copies * one.total > limit and (largest := self._largest(kept)) is not None:
            skipped[largest] = f"{largest}: {self._needs_more(one, limit)}"
            kept.remove(largest)
            one = self._need(model, path, kept, place)
        if not kept or self._over(one, limit):
            raise ValueError(next(iter(skipped.values())) if skipped else self._needs_more(one, limit))
        return Prepared(path, kept, place, one), skipped

    def _largest(self, loads: Sequence[Load]) -> Load | None:
        """The load of a preset that takes most of the memory, which is the first one to be skipped."""
        preset = [load for load in loads if load in self.presets]
        return max(preset, key=lambda load: room_for([load]), default=None)

    def _folder_of(self, model: str) -> str:
        from fk_bench.e2e.model_configs import sizes_of

        return sizes_of(model, self.folder) if self.load_format == "dummy" else model

    def _over(self, one: sharing.Need, room: int) -> bool:
        return self.copies * (one.weights + one.kv) > room

    def _needs_more(self, one: sharing.Need, room: int) -> str:
        return sharing.too_large(one, room, 1 + self.with_engine, self.tensor_parallel)

    def _check_ranks(self, path: str) -> None:
        """Raise ValueError if our engine cannot share the model between so many ranks."""
        from fastkernels.models.common.configs import checks
        from fastkernels.models.common.plans import build

        if self.with_engine and self.tensor_parallel > 1:
            checks.check_ranks(build.load_config(Path(path)), self.tensor_parallel)

    def _need(self, model: str, path: str, loads: Sequence[Load], place: MediaPlace) -> sharing.Need:
        most = most_requests(loads)
        own = room_for(loads) + most * (place.features + place.states)
        block = 16 if self.gpu else BLOCK  # the hosts' blocks
        tokens = sharing.kv_tokens([(1, own)], _longest(loads, place), block)
        return sharing.need(
            model, path, self.dtype, tokens, self.gpu, 1 if self.kv_cache_dtype == "fp8" else None, most,
            self.tensor_parallel,
        )  # fmt: skip

    def _too_large(self, model: str, path: str, loads: Sequence[Load], limit: int, place: MediaPlace) -> str:
        """Why the last of these loads does not fit into the KV cache of an engine that has the GPU alone, or ''."""
        import fastkernels

        if self.task == EMBED:  # without a cache
            return ""
        try:
            plan, one = fastkernels.plan(path, self.dtype), self._need(model, path, loads, place)
        except ValueError:  # a model of the host's that has no plan: the host finds out
            return ""
        longest = _longest(loads, place)
        windows = plan.kv_bytes(longest) / max(
            1, longest * plan.kv_bytes_per_token
        )  # of what a sequence keeps
        share = (self.gpu_share or GPU_SHARE) if self.gpu else 1.0
        room = int(limit * share) // self.copies - one.weights - one.rest
        wanted = int((one.kv - one.states) * min(1.0, windows)) + one.states
        if wanted <= room:
            return ""
        each = f", on each of {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        return (
            f"{loads[-1]}: {model} needs {wanted / sharing.GIB:.1f} GiB of keys and values for {one.tokens} tokens, and"
            f" {max(0, room) / sharing.GIB:.1f} GiB are left for them next to {one.weights / sharing.GIB:.1f} GiB of"
            f" weights{each}: give shorter or fewer --loads"
        )

    def measure(
        self, models: Sequence[str], at_once: int, late: float, failed: dict[str, str]
    ) -> Iterable[Row]:
        """The rows of the models, in groups that share the GPU. `failed` gets the models that could not be measured.

        A model that fails next to others is tried again alone.
        """
        ready: dict[str, Prepared] = {}
        for model in models:
            try:
                ready[model], skipped = self.prepared(model, at_once)
            except (ModelError, ValueError) as error:
                yield self._refused(model, str(error), failed)
                continue
            for load, why in skipped.items():
                print(f"{model}: skipped {why}", file=sys.stderr)
                yield self.row(model, Status.SKIPPED, why, state="skipped", skipped=str(load))
        groups = [{model: ready[model]} for model in ready]
        if at_once > 1 or self.with_engine:
            groups, refused = self._groups(ready, at_once)
            for model, why in refused.items():
                yield self._refused(model, why, failed)
        while groups:
            if time.monotonic() > late:
                return
            group = groups.pop(0)
            errors: dict[str, str] = {}
            yield from self._measure_group(group, late, errors)
            for model, why in errors.items():
                if len(group) > 1:
                    print(f"{model}: {why}\n{model} is tried again alone", file=sys.stderr)
                    groups.append({model: group[model]})
                else:
                    failed[model] = why
                    print(f"{model}: {why}", file=sys.stderr)
                    yield self.row(model, Status.FAILED, why, state="failed")

    def _refused(self, model: str, why: str, failed: dict[str, str]) -> Row:
        failed[model] = why
        print(f"{model}: {why}", file=sys.stderr)
        return self.row(model, Status.UNSUPPORTED, why, state="failed")

    def _groups(
        self, ready: Mapping[str, Prepared], at_once: int
    ) -> tuple[list[dict[str, Prepared]], dict[str, str]]:
        """The models in groups that share the GPU, and why others do not fit."""
        needs = [one.need for one in ready.values() if one.need is not None]
        room = sharing.room(needs, self.copies, self.gpu)
        large = [n for n in needs if self._over(n, room)]
        refused = {n.model: self._needs_more(n, room) for n in large}
        found = sharing.waves([n for n in needs if n not in large], room, at_once, self.copies)
        for group in found:
            each = "; ".join(f"{one.model} {one}" for one in group)
            print(
                f"together, {self.copies} x: {each}; {room / sharing.GIB:.1f} GiB are free", file=sys.stderr
            )
        return [{one.model: ready[one.model] for one in group} for group in found], refused

    def _measure_group(
        self, group: Mapping[str, Prepared], late: float, errors: dict[str, str]
    ) -> Iterable[Row]:
        started: list[Comparison] = []
        ready: list[Comparison] = []
        try:
            if needs := [one.need for one in group.values() if one.need is not None]:
                sharing.room([reduce(add, needs)], self.copies, self.gpu)
            began = time.monotonic()
            for model, one in group.items():
                started.append(self._comparison(model, one))
                started[-1].start()
            for comparison in started:
                try:
                    comparison.wait()
                    ready.append(comparison)
                    comparison.took["start"] = time.monotonic() - began
                    parts = ", ".join(f"{n[8:]} {s:.0f}" for n, s in comparison.start_seconds().items())
                    print(f"{comparison.model}: start in seconds: {parts}", file=sys.stderr)
                except HostFailed as error:
                    errors[comparison.model] = str(error)
                    comparison.stop()
            print(
                f"{', '.join(one.model for one in ready)}: started in {time.monotonic() - began:.0f} s",
                file=sys.stderr,
            )
            for comparison in ready:
                if time.monotonic() > late:
                    return
                others = [other.model for other in ready if other is not comparison]
                extent = replace(self.extent, loads=group[comparison.model].loads)
                try:
                    yield from comparison.measure(extent, self.seed, {**self.case(), "resident": others})
                    print(f"{comparison.model}: {comparison.seconds()}", file=sys.stderr)
                except HostFailed as error:
                    errors[comparison.model] = str(error)
                    comparison.stop()
        finally:  # an engine that is measured stays, since its end would disturb the next one
            with ThreadPoolExecutor(max(1, len(started))) as pool:
                list(pool.map(Comparison.stop, started))

    def _comparison(self, model: str, one: Prepared) -> Comparison:
        most, need, engine = most_requests(one.loads), one.need, None
        # A recurrent state takes memory for each sequence that may run: next to another engine, for those of the loads.
        recurrent = need is not None and need.states > 0
        settings: dict[str, Any] = {
            "model": one.path, "dtype": self.dtype, "load_format": self.load_format,
            "max_model_len": longest_of(one.path, one.loads, one.place),
            "max_num_seqs": most if recurrent else max(most, 256 if self.gpu else 8),
            "kv_tokens": None, "gpu": self.gpu,
            "gpu_share": self.gpu_share or (GPU_SHARE if self.gpu else CPU_SHARE),
            "tensor_parallel": self.tensor_parallel, "engine_args": self._engine_args(one.loads, one.place),
            "task": self.task, "media": asdict(self.media) if self.media else None,
        }  # fmt: skip
        if need is not None:
            settings |= {"shared": True, "gpu_share": 0.01}  # only a check: the KV cache has its size
            settings |= {"kv_tokens": need.tokens} if self.host == "sglang" else {"kv_bytes": need.kv}
        if need is not None and self.with_engine:
            engine = {
                **settings,
                "kv_tokens": None,
                "kv_bytes": need.kv,
                "engine_args": self._cache("fastkernels"),
            }
        return Comparison(
            model, self.host, self.python, settings, self.folder, self.timeout, self.before_construction, self.ops,
            self.env, one.place, self.media, engine,
        )  # fmt: skip

    def _engine_args(self, loads: Sequence[Load], place: MediaPlace) -> dict[str, Any]:
        """The host's arguments in every state, with the sizes of its CUDA graphs if these are chosen."""
        made = {**self._cache(self.host), **self.engine_args}
        if self.graph_sizes == "all":
            return made
        sizes = graph_sizes(loads, place.features)
        if self.host == "sglang":
            return {"cuda_graph_bs": sizes, **made}
        compilation = {"cudagraph_capture_sizes": sizes, **made.get("compilation_config", {})}
        return {**made, "compilation_config": compilation}

    def _cache(self, host: str) -> dict[str, Any]:
        return {} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": KV_CACHE[host]}


def most_requests(loads: Sequence[Load]) -> int:
    return max((load.requests + load.arriving for load in loads), default=1)


def graph_sizes(loads: Sequence[Load], features: int = 0) -> list[int]:
    """The tokens of these loads' steps that a host runs in CUDA graphs: decodes, and prompts that are short enough.

    features  tokens of a prompt for its media, more than a load names
    """
    found = set[int]()
    for load in loads:
        found |= {load.requests, load.requests + load.arriving} if load.output_len else set()
        prompt = load.input_len - load.held + features
        found |= {n for n in (prompt, load.requests * prompt) if n <= GRAPHED_TOKENS}
    return sorted(found) or [1]


def _longest(loads: Sequence[Load], place: MediaPlace) -> int:
    return max((load.longest for load in loads), default=0) + place.features + 16


def longest_of(path: str, loads: Sequence[Load], place: MediaPlace) -> int:
    """The max_model_len of an engine for these loads: with some room, if the model's context has it."""
    return min(_longest(loads, place), context_of(path) or sys.maxsize)


def context_of(path: str) -> int | None:
    """The tokens of the longest sequence of a model, None if its config has no limit."""
    from fastkernels.models.common.checkpoints import weights
    from fastkernels.models.common.configs import length
    from fastkernels.models.common.plans import build

    return length.longest(build.load_config(weights.resolve(path)))


def too_long(model: str, path: str, load: Load, place: MediaPlace) -> str:
    """Why a load does not fit into the model's context, or ''."""
    limit, longest = context_of(path), load.longest + place.features
    if limit is None or longest <= limit:
        return ""
    images = f", {place.features} of them for images" if place.features else ""
    return (
        f"{load}: its longest sequence has {longest} tokens{images}, and the context of {model} has {limit}: give"
        " shorter --loads"
    )


def measure_one(text: str) -> Iterator[str]:
    """The lines of a process that measures one model: rows, and why it failed."""
    asked, models = Asked.from_json(text)
    failed: dict[str, str] = {}
    for row in asked.measure(models, 1, float("inf"), failed):
        yield row.to_json()
    for reason in failed.values():
        yield json.dumps({"failed": reason})


def _end_with_parent() -> None:
    sys.stdin.read()  # until it is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines are stopped
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for line in measure_one(sys.argv[1]):
        print(line, flush=True)
