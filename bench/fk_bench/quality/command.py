"""`fk-bench quality`: whether a model's outputs stay right when kernels are replaced in a host."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from fk_bench.core import machine, rows
from fk_bench.core.hub import ModelError
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.terminal.flags import ConfigError, comma_list, json_object
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.offline.host import HostFailed
from fk_bench.quality.calibration import THRESHOLD, Quality
from fk_bench.quality.families import HOSTS
from fk_bench.quality.measure import Settings, measure
from fk_bench.quality.text import Extent

COMMAND = "quality"
DTYPES = ("auto", "bfloat16", "float16", "float32")
OURS = "ours"  # the set that is measured without --set


def quality_command(
    model: Annotated[
        str,
        typer.Argument(
            help="a checkpoint's folder or hub id (default: a tiny random Llama); a public name as llama-3.2-1b, or a"
            " folder with only a config.json, gets random weights; for timm a name, for diffusers a pipeline's folder;"
            " SUITE/MODEL as small/dp3 for a model of `fk-bench list workloads`"
        ),
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="NAME=DIR or DIR of candidates, alone patched (default: our own overrides)"
        ),
    ] = None,
    hosts: Annotated[str, typer.Option(help=f"comma-separated: {', '.join(HOSTS)}")] = "transformers",
    python: Annotated[list[str] | None, typer.Option(help="HOST=PATH of its interpreter")] = None,
    ops: Annotated[
        str, typer.Option(help="of our overrides, comma-separated (default: what patch() chooses)")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda (default: cuda if there is one)")] = "",
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = "auto",
    sequences: Annotated[int, typer.Option(help="texts, or images")] = Extent.sequences,
    batch: Annotated[int, typer.Option(help="sequences or images that run together")] = Extent.batch,
    prompts: Annotated[str, typer.Option(help="lengths of the prompts, in turn")] = ",".join(
        map(str, Extent.prompts)
    ),
    new: Annotated[int, typer.Option(help="tokens that are forced after each prompt")] = Extent.new,
    image_size: Annotated[int, typer.Option(help="images: pixels of a side (0: the model's own)")] = 0,
    steps: Annotated[int, typer.Option(help="images: denoising steps")] = Settings.steps,
    request: Annotated[
        str,
        typer.Option(help='JSON of the sizes of a request, such as {"width": 640} (default: the family\'s)'),
    ] = "",
    engine_args: Annotated[list[str] | None, typer.Option(help="HOST=JSON of more engine arguments")] = None,
    gpu_share: Annotated[
        float, typer.Option(help="share of the GPU's memory for a host")
    ] = Settings.gpu_share,
    timeout: Annotated[float, typer.Option(help="seconds for a start, a run or a patch")] = Settings.timeout,
    exact: Annotated[
        bool, typer.Option("--exact", help="also the distances of host and patched host from float32")
    ] = False,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="measure the scale again")] = False,
    out: Annotated[Path | None, typer.Option(help="folder of the rows (default: a new one)")] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Correctness c of a model's outputs in a host with a set's kernels: 1 up to the host's own noise, 0 at the bound.

    fk-bench quality FOLDER --set mine=candidates/ --hosts vllm --python vllm=.venv-vllm/bin/python

    Tokens are forced, so that every run has the same context. An item is valid if c is at least 0.9 and the item saw
    all planted faults. The first run of an item measures its scale, which is kept.
    """
    try:
        names = comma_list("--hosts", hosts, str)
        if not names or (unknown := [h for h in names if h not in HOSTS]):
            raise ConfigError(
                f"--hosts: unknown host {unknown[0] if names else hosts!r}. Known: {', '.join(HOSTS)}"
            )
        pythons, extra = _by_host("--python", python), _by_host("--engine-args", engine_args)
        extent = Extent(sequences, batch, tuple(comma_list("--prompts", prompts, int)), new)
        arguments = {host: json_object("--engine-args", text) for host, text in extra.items()}
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if device not in ("", "cpu", "cuda"):
            raise ConfigError(f"--device {device!r} is not cpu or cuda")
        if timeout <= 0 or not 0 < gpu_share <= 1:
            raise ConfigError(f"--timeout {timeout:g} and --gpu-share {gpu_share:g}: above 0, and at most 1")
        candidates = _candidates(sets or [])
        if ops and candidates:
            raise ConfigError("--ops are of our overrides: leave it out with --set")
        if "fastkernels" in names and not candidates:
            raise ConfigError(
                "--hosts fastkernels: our engine runs our overrides already; give candidates with --set"
            )
        if not model and not set(names) <= {"fastkernels", "vllm", "sglang", "transformers"}:
            raise ConfigError("give a model: a name of timm, or a pipeline's folder for diffusers")
        if "timm" in names:
            _check_timm(model)
        sizes = json_object("--request", request) if request else {}
        if wrong_size := next(
            (k for k, v in sizes.items() if not isinstance(v, (int, float)) or v <= 0), None
        ):
            raise ConfigError(f"--request: {wrong_size} is {sizes[wrong_size]!r}, give a number above 0")
        settings = {
            host: Settings(
                machine.absolute(pythons.get(host, sys.executable)), device, "" if dtype == "auto" else dtype, extent,
                arguments.get(host, {}), gpu_share, image_size, steps, sizes, {}, timeout, recalibrate, exact,
            )
            for host in names
        }  # fmt: skip
        versions = {host: _installed(host, s.python) for host, s in settings.items()}
        folder = out or Path("fk-bench-runs") / time.strftime(f"{COMMAND}-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    if not model:
        from fk_bench.core.small_model import small_model

        model = str(small_model())
    made: list[Row] = []
    run = uuid4().hex[:12]
    measured: dict[str, Mapping[str, str] | None] = {**candidates} if candidates else {OURS: None}
    for name, files in measured.items():
        for host in names:
            print(f"{Path(model).name} in {host}, {name} ...", file=sys.stderr, flush=True)
            chosen = comma_list("--ops", ops, str) if ops else None
            try:
                found: Quality | str = measure(
                    model, host, files, settings=settings[host], ops=chosen, tell=_tell
                )
            except (ModelError, HostFailed, ValueError) as error:
                found = str(error)
            row = row_of(found, model, host, name, run, versions[host])
            rows.append(folder / "rows.jsonl", [row])
            made.append(row)
    if not json_only:
        show(made)
        print(f"rows: {folder / 'rows.jsonl'}\n")
    wrong = [r for r in made if r.status is not Status.OK]
    last_line({
        "command": COMMAND, "ok": not wrong, "rows": str(folder / "rows.jsonl"),
        "results": [{"host": r.subject.host, "set": r.subject.candidate, "status": r.status.value, "reason": r.reason,
                     **r.metrics} for r in made],
    })  # fmt: skip
    if wrong:
        raise SystemExit(1)


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def row_of(
    found: Quality | str, model: str, host: str, name: str, run: str, versions: Mapping[str, str]
) -> Row:
    """The row of an item; a string is the reason why it could not be measured."""
    common: dict[str, Any] = {
        "run_id": run, "command": COMMAND, "machine": machine.machine(), "commit": machine.commit(),
        "subject": Subject(model=Path(model).name, host=host, candidate=name), "baseline": host,
        "versions": dict(versions),
    }  # fmt: skip
    if isinstance(found, str):
        return Row(**common, status=Status.FAILED, reason=found, case={"kind": COMMAND})
    scale = found.calibration
    metrics = {"c": found.c, "noise": scale.noise, "bound": scale.bound}
    for value in found.values.values():
        metrics |= {value.metric: value.value, f"{value.metric}_discrepancy": value.discrepancy}
    metrics |= {f"fault_{fault}_c": scale.correctness(d) for fault, d in scale.faults.items()}
    metrics |= {f"{found.metric}_{run}_from_float32": value for run, value in found.exact.items()}
    status, reason = Status.OK, ""
    if not any(found.calls.values()):
        left = "; ".join(dict.fromkeys(f"{op}: {why}" for op, why in found.left.items()))
        status, reason = Status.FAILED, f"no kernel of the set ran{f' ({left})' if left else ''}"
    elif not scale.sensitive:
        status, reason = Status.INVALID, f"insensitive: {insensitive(found)}"
    elif found.c < THRESHOLD:
        status, reason = Status.WRONG, f"c is {found.c:.3f}, at least {THRESHOLD} is needed"
    case = {
        "kind": COMMAND, "metric": found.metric, "sensitive": found.sensitive, "unseen": list(scale.unseen),
        "unplanted": dict(scale.unplanted), "noise_of": dict(scale.runs), "calls": dict(found.calls),
        "left": dict(found.left),
    }  # fmt: skip
    finite = {n: v for n, v in metrics.items() if v == v and abs(v) != float("inf")}
    return Row(**common, status=status, reason=reason, case=case, metrics=finite)


def insensitive(found: Quality) -> str:
    scale = found.calibration
    parts = [
        f"the planted fault {f} gives c = {scale.correctness(scale.faults[f]):.3f}" for f in scale.unseen
    ]
    parts += [f"{fault} could not be planted: {why}" for fault, why in scale.unplanted.items()]
    if scale.noise >= scale.bound:
        parts.append(f"the noise {scale.noise:.4f} is not below the bound {scale.bound:g}")
    return "; ".join(parts) or "no fault was planted"


def show(made: list[Row]) -> None:
    def cell(row: Row, name: str, how: str = ".4f") -> str:
        return f"{row.metrics[name]:{how}}" if name in row.metrics else "-"

    columns = ["host", "set", "c", "metric", "value", "discrepancy", "noise", "bound", "faults' c", "status"]
    shown, others = [], []
    for row in made:
        metric = str(row.case.get("metric", ""))
        faults = [f"{n.split('_')[1]} {v:.2f}" for n, v in row.metrics.items() if n.startswith("fault_")]
        shown.append([
            row.subject.host, row.subject.candidate, cell(row, "c", ".3f"), metric, cell(row, metric, ".3g"),
            cell(row, f"{metric}_discrepancy"), cell(row, "noise"), cell(row, "bound", "g"), ", ".join(faults),
            row.status.value + (f": {row.reason.splitlines()[-1]}" if row.reason else ""),  # of a traceback
        ])  # fmt: skip
        for name in row.metrics:
            if (base := name.removesuffix("_discrepancy")) != name:
                others.append(
                    [row.subject.host, row.subject.candidate, base, cell(row, base, ".5g"), cell(row, name)]
                )
        if f"{metric}_host_from_float32" in row.metrics:
            host, patched = (cell(row, f"{metric}_{run}_from_float32", ".3e") for run in ("host", "patched"))
            name = f"{metric} from float32, host's {host}"
            others.append([row.subject.host, row.subject.candidate, name, patched, "-"])
    table(str(made[0].subject.model), columns, shown)
    if others:
        table("All metrics", ["host", "set", "metric", "value", "discrepancy"], others)


def _check_timm(model: str) -> None:
    """Raise ConfigError for a name that the timm of this environment, if there is one, does not know."""
    from fk_bench.e2e.pictures.named import NAMED

    try:
        import timm
    except ImportError:
        return
    elsewhere = ":" in model or Path(model).expanduser().exists()  # a model of the hub, a folder
    if not elsewhere and model not in NAMED and not timm.is_model(model):
        close = difflib.get_close_matches(model, timm.list_models(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown model of timm {model!r}.{hint} timm.list_models() has all names")


def _candidates(sets: list[str]) -> dict[str, Mapping[str, str]]:
    """{name: {op: file}}. Raises ConfigError."""
    from fk_bench.evaluate.adapters.sets import SetError, read_set

    found: dict[str, Mapping[str, str]] = {}
    for given in sets:
        name, equals, folder = given.partition("=")
        path = Path(folder if equals else given).expanduser()
        name = name if equals else path.name
        if name in found:
            raise ConfigError(f"--set: two sets have the name {name!r}; give another one as NAME=DIR")
        try:
            found[name] = read_set(name, path, blocks=True).files
        except SetError as error:
            raise ConfigError(str(error)) from error
    return found


def _installed(host: str, python: str) -> dict[str, str]:
    """The versions in a host's interpreter. Raises ConfigError if the host is not installed there."""
    try:
        found = machine.interpreter(python).versions
    except ValueError as error:
        raise ConfigError(f"--python: {error}") from error
    if host not in found:
        raise ConfigError(
            f"{host} is not installed in {python}: give its interpreter with --python {host}=PATH"
        )
    return found


def _by_host(flag: str, given: list[str] | None) -> dict[str, str]:
    pairs = [item.partition("=") for item in given or ()]
    for host, equals, _ in pairs:
        if host not in HOSTS or not equals:
            raise ConfigError(f"{flag} {host}: give HOST=VALUE with a host of {', '.join(HOSTS)}")
    return {host: value for host, _, value in pairs}
