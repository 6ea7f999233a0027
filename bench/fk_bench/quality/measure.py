"""One item: a model in a host, with a set's kernels, against the same host without them, on the item's own scale.

Runs of the unpatched host make the scale: twice the same, in other batches, and with sums in another order, compiled
afresh, give the noise; planted faults show whether the metric sees what is wrong. The scale is kept in the cache, by
model, host, versions and machine. A set is compared with its own engine before the patch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastkernels.core.env import Environment
from fk_bench.core import hub, machine
from fk_bench.core.hub import ModelError
from fk_bench.offline.host import HostProcess
from fk_bench.quality import faults, structured, text
from fk_bench.quality.calibration import Calibration, Quality, fitted_bound, noise_of
from fk_bench.quality.families import FAMILIES, LIBRARIES, Family, check_request, family_of, outputs, prepare
from fk_bench.quality.metrics.metric import Value, metrics, of_family

WORKER = Path(__file__).with_name("worker.py")
NEED_LIBRARY = (  # torchmetrics
    "embedding", "image", "pixels", "detection", "objects", "segmentation", "tracking", "speech", "recommendation",
)  # fmt: skip
WEIGHTS = {".safetensors", ".pt", ".pth", ".bin", ".npz", ".ply", ".ckpt", ".msgpack", ".ingp"}
BY_NAME = (
    "timm",
    "diffusers",
    "ultralytics",
    "torchrec",
    "torch_geometric",
    "openfold3",
)  # hosts of models without config.json


@dataclass(frozen=True)
class Settings:
    """How an item is measured, other than by its model, host and set."""

    python: str = sys.executable  # the host's interpreter
    device: str = ""  # cpu, cuda; '': the best one
    dtype: str = ""  # '': bfloat16, or float32 on a CPU that emulates it
    extent: text.Extent = field(default_factory=text.Extent)
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    gpu_share: float = 0.5
    image_size: int = 0  # 0: the model's own
    steps: int = 4  # of denoising
    request: Mapping[str, float] = field(default_factory=dict)  # sizes of a request; see Family.request
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of a library's model
    timeout: float = 600.0  # for a start, a run or a patch
    recalibrate: bool = False
    exact: bool = False  # also the distances from float32, by transformers


class Item:
    """A model in a host. All runs share a folder of inputs and outputs.

    tell  is called with a line about each start of an engine, which may take minutes
    """

    def __init__(
        self,
        model: str,
        host: str,
        settings: Settings,
        folder: Path,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.host, self.settings, self.folder, self.tell = host, settings, folder, tell
        self.family_name = family_of(model, host)
        self.family: Family = FAMILIES[self.family_name]
        if host not in self.family.hosts:
            raise ModelError(
                f"{model}: {host} does not run models of {self.family_name}; {', '.join(self.family.hosts)} do"
            )
        if self.family_name in NEED_LIBRARY and find_spec("torchmetrics") is None:
            raise ModelError(
                f"metrics of {self.family_name} need torchmetrics: pip install 'fastkernels[quality]'"
            )
        self.name, self.model = model, model
        self.answers = self.family.request is not None
        self.in_place = self.answers or host in BY_NAME  # faults are planted in the running engine
        if not self.in_place and not any(Path(model).glob("*.safetensors")):
            if self.family_name != "text":
                raise ModelError(
                    f"{model} has no *.safetensors; random weights are drawn for models of text only"
                )
            self.model = str(structured.checkpoint(Path(model), folder / "random"))
        self.count = prepare(self.family_name, self.model, settings.extent, folder)

    @cached_property
    def device(self) -> str:
        return machine.torch_device(self.settings.device)

    @contextlib.contextmanager
    def started(self, model: str, log: str, env: Mapping[str, str] | None = None) -> Iterator[Running]:
        """An engine of the host. Raises HostFailed."""
        s, extent = self.settings, self.settings.extent
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        if "FASTKERNELS" in os.environ:  # the reference is the unpatched host
            hidden["FASTKERNELS"] = "0"
        options = {
            "family": self.family_name, "model": model, "folder": str(self.folder), "engine_args": dict(s.engine_args),
            "dtype": s.dtype or machine.fast_dtype(), "batch": extent.batch, "longest": extent.longest,
            "tokens": max(extent.batch * extent.longest, 512), "gpu_share": s.gpu_share, "image_size": s.image_size,
            "steps": s.steps, "load_format": "dummy" if self.random else "auto", "requests": self.answers,
            "request": {**(self.family.request or {}), **s.request}, "arguments": dict(s.arguments),
        }  # fmt: skip
        self.tell(f"{self.host} starts for the run {log!r}")
        process = HostProcess(
            self.host, s.python, options, self.folder, script=WORKER, env={**hidden, **(env or {})}, log=log
        )
        try:
            process.answer(s.timeout)
            yield Running(self, process)
        finally:
            process.stop()

    @property
    def random(self) -> bool:
        """Whether a model that runs in place has random weights: it was not given as a folder with weights."""
        kinds = {file.suffix for file in Path(self.model).rglob("*.*")}
        return self.in_place and not kinds & WEIGHTS

    def read(self, run: str) -> Any:
        """The outputs of a run, whose file is removed."""
        found = outputs(self.family_name, self.model, self.settings.extent, self.folder, run)
        (self.folder / f"{run}.f32").unlink()
        return found

    def float32(self, folder: Path) -> Any:
        """The outputs of the model in float32, by transformers. Raises ModelError for a host of images."""
        if "transformers" not in self.family.hosts:
            raise ModelError(f"{self.name}: transformers does not run models of {self.family_name}")
        folder.mkdir()
        settings = replace(self.settings, python=sys.executable, dtype="float32", engine_args={})
        item = Item(self.model, "transformers", settings, folder, self.tell)
        with item.started(self.model, "float32") as running:
            return running.outputs("float32")

    def digest(self) -> str:
        """A hash of all that the scale depends on."""
        path, s = Path(self.name), self.settings
        files = [f for f in sorted(path.rglob("*")) if f.is_file()] if path.is_dir() else []
        found = {
            "files": [_stamp(f) for f in files],
            "model": path.name, "host": self.host, "versions": machine.interpreter(s.python).versions,
            "machine": machine.machine().model_dump(), "device": self.device, "family": asdict(self.family),
            "commit": machine.commit() if self.host == "fastkernels" or self.name in LIBRARIES else "",
            "settings": {**asdict(s), "timeout": 0, "recalibrate": 0, "exact": 0}, "dtype": machine.fast_dtype(),
        }  # fmt: skip
        return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def calibration(self) -> Calibration:
        """The item's scale, from the cache if it is there. Raises HostFailed."""
        kept = Path(Environment.read().cache) / "quality" / f"{self.digest()}.json"
        if kept.is_file() and not self.settings.recalibrate:
            return Calibration(**json.loads(kept.read_text()))
        found = self.calibrate()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".new").write_text(json.dumps(asdict(found)))
        os.replace(kept.with_suffix(".new"), kept)
        return found

    def calibrate(self) -> Calibration:
        """Measure the scale. Raises HostFailed."""
        metric = metrics()[self.family.metric]
        noise: dict[str, float] = {}
        found: dict[str, float] = {}
        unplanted: dict[str, str] = {}
        plants = (faults.REORDER, *faults.FAULTS)
        fresh = {"VLLM_DISABLE_COMPILE_CACHE": "1", "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}

        def compare(running: Running, run: str, order: bool = False) -> None:
            made = metric.measure(running.outputs(run, order), reference).discrepancy
            (found if run in faults.FAULTS else noise)[run] = made

        with self.started(self.model, "reference") as running:
            reference = running.outputs("reference")
            compare(running, "again")
            compare(running, "batches", order=True)
            for fault in plants if self.in_place else ():
                answer = running.ask({"fault": fault})
                if answer["planted"]:
                    compare(running, fault)
                    running.ask({"fault": ""})
                elif answer["concerns"]:
                    unplanted[fault] = answer["reason"]
        for fault in plants if not self.in_place else ():
            try:
                faulty = faults.faulty_checkpoint(Path(self.model), fault, self.folder / f"model-{fault}")
            except faults.NoHeads:
                continue
            except faults.CannotPlant as error:
                unplanted[fault] = str(error)
                continue
            with self.started(str(faulty), fault, fresh if fault == faults.REORDER else None) as running:
                compare(running, fault)
            shutil.rmtree(faulty)
        if self.in_place or faults.REORDER in unplanted:
            with self.started(self.model, "fresh", fresh) as running:
                compare(running, "fresh")
        unplanted.pop(faults.REORDER, None)  # no fault
        own, bound = noise_of([*noise.values()]), self.family.bound
        if self.answers:  # metrics of tasks are coarse
            bound = fitted_bound(bound, own, found)
        return Calibration(own, bound, found, unplanted, noise)


def _stamp(file: Path) -> tuple[str, int, int | str]:
    """A file's name, size, and time, or a small one's content: configs are written anew for each run."""
    size = file.stat().st_size
    small = size < 1 << 16
    return (
        file.name,
        size,
        hashlib.sha256(file.read_bytes()).hexdigest() if small else file.stat().st_mtime_ns,
    )


def of_suite(model: str, host: str, settings: Settings) -> tuple[str, Settings]:
    """The model and settings for SUITE/MODEL, a model of `fk-bench list workloads`; any other name as it is.

    Raises ModelError for a model that the suite does not have in this host.
    """
    from fk_bench.evaluate import checkpoints, suites

    suite, _, name = model.partition("/")
    if suite not in suites.names() or Path(model).exists():
        return model, settings
    found = [e for e in suites.load(suite).entries if e.item.host == host]
    known = {e.item.model: e for e in found}
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        meant = (
            f" Did you mean {' or '.join(map(repr, near))}?"
            if near
            else f" It has {', '.join(sorted(known))}."
        )
        raise ModelError(f"the suite {suite} has no model {name!r} in {host}.{meant if known else ''}")
    entry = known[name]
    own = entry.model
    request = {k: v for k, v in own.request.items() if isinstance(v, (int, float))}
    settings = replace(
        settings, request={**request, **settings.request}, arguments=own.arguments,
        dtype=settings.dtype or str(own.config.get("dtype", "")),
        engine_args={**entry.engine_args, **settings.engine_args},
    )  # fmt: skip
    by_name = own.timm or own.named or own.library
    return by_name or str(checkpoints.folder(own, entry.workload.kind)), settings


def folder_of(model: str, folder: Path) -> str:
    """The folder of a checkpoint: a path, a model of the hub, or a public name as llama-3.2-1b, of which only the sizes
    are known. Raises ModelError.
    """
    from fk_bench.e2e.model_configs import sizes_of

    if Path(model).expanduser().exists():
        return str(Path(model).expanduser())
    if (known := sizes_of(model, folder)) != model:
        return known
    if not hub.is_id(model):
        raise ModelError(f"model {model!r} is neither a folder, nor a public name, nor a hub id (OWNER/NAME)")
    from fastkernels.models.common.checkpoints.checkpoint import resolve

    hub.check(model)
    return str(resolve(model))


@dataclass
class Running:
    """An engine of an item that runs."""

    item: Item
    process: HostProcess

    def ask(self, work: Mapping[str, Any]) -> dict[str, Any]:
        self.process.tell(dict(work))
        return self.process.answer(self.item.settings.timeout)

    def outputs(self, run: str, order: bool = False) -> Any:
        batches = text.batches(self.item.count, self.item.settings.extent.batch, order)
        self.ask({"run": run, "batches": batches})
        return self.item.read(run)


def measure(
    model: str,
    host: str,
    candidates: Mapping[str, str] | None = None,
    device: str = "",
    settings: Settings | None = None,
    ops: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Quality:
    """The quality of one item.

    model       a checkpoint's folder or hub id; a folder with only a config.json, or a public name, gets random
                weights; for timm a name, for diffusers a pipeline's folder; or SUITE/MODEL, see of_suite
    candidates  {op: file}, which alone are patched; None: our own overrides, those of `ops` (None: the default ones)
    device      cpu, cuda; '': the settings'
    tell        is called with a line about each start of an engine

    Raises ModelError for a model that cannot be measured, and HostFailed if an engine does not start, run or take the
    patch.
    """
    settings = settings or Settings()
    settings = replace(settings, python=machine.absolute(settings.python))
    if device:
        settings = replace(settings, device=device)
    name, sizes = Path(model).name, settings.request
    model, settings = of_suite(model, host, settings)
    with tempfile.TemporaryDirectory(prefix="fk-quality-") as scratch:
        path = model if host in BY_NAME else folder_of(model, Path(scratch))
        item = Item(path, host, settings, Path(scratch), tell)
        check_request(item.family_name, sizes)
        calibration = item.calibration()
        with item.started(item.model, "set") as running:
            reference = running.outputs("reference")
            chosen = list(candidates) if candidates is not None else list(ops) if ops else None
            rows = running.ask(
                {"patch": chosen, "candidates": dict(candidates) if candidates is not None else None}
            )
            found = running.outputs("patched")
            calls = running.ask({"calls": True})["calls"]
        exact = {}
        if settings.exact:
            wide = item.float32(Path(scratch) / "float32")
            metric = metrics()[item.family.metric]
            exact = {
                "host": metric.measure(reference, wide).value,
                "patched": metric.measure(found, wide).value,
            }
        values: dict[str, Value] = {m.name: m.measure(found, reference) for m in of_family(item.family_name)}
    left = {op: why for op, state, why in rows["rows"] if state != "active"}
    return Quality(name, host, item.family.metric, values, calibration, calls, left, exact)
