"""`fk-bench eval`: the score of sets of candidates over a suite of whole models in real hosts."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from fastkernels.core import registry
from fastkernels.core.registry import UnknownName
from fk_bench.core import machine, rows
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.core.terminal.text import NAME, NAME_RULE
from fk_bench.evaluate import own_model
from fk_bench.evaluate.adapters.sets import CandidateSet, SetError, read_set
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import results, selftest
from fk_bench.evaluate.run.results import Context
from fk_bench.evaluate.suites import HOSTS, Entry, Suite, SuiteError, load, of_model
from fk_bench.track import store

SELFTEST = selftest.NAME


def eval_command(
    suite: Annotated[str, typer.Argument(help="smoke, default, or a .toml file of the same form")] = "smoke",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=DIR", help="a folder of candidates OP.py; repeatable"),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="only the suite's items of this model; or a checkpoint's folder or hub id, which gets the hosts and"
            " workloads that the suite has for its kind"
        ),
    ] = "",
    host: Annotated[
        str, typer.Option(help="only the suite's items in this host; the others count as not run")
    ] = "",
    item: Annotated[str, typer.Option(help="only this item of the suite; the others count as not run")] = "",
    self_test: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="first a set of trivial subclasses: every item must be 1 within its interval; alone without --set",
        ),
    ] = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="also measure without the candidates that are slower by themselves; unranked"
        ),
    ] = False,
    no_kernels: Annotated[
        bool, typer.Option("--no-kernels", help="skip the judge: no composition gap")
    ] = False,
    python: Annotated[list[str] | None, typer.Option(help="HOST=PATH of its interpreter")] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="print minutes per item; nothing runs")
    ] = False,
    cluster: Annotated[
        str,
        typer.Option(
            help="run items on the machines of a Ray cluster: auto, or its address (default: all GPUs of this machine)"
        ),
    ] = "",
    no_cage: Annotated[
        bool, typer.Option("--no-cage", help="run the hosts as this user, without a cage")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="continue a run of another commit, chip, versions, suite or set")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="folder of the run (default: fk-bench-runs/eval-TIME); with rows, it is continued"),
    ] = None,
    track: Annotated[
        bool, typer.Option("--track", help="log the run into MLflow (also with MLFLOW_TRACKING_URI)")
    ] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """Score sets of candidates on whole models in real hosts: speedups against the same host without the set,
    correctness and coverage, each with an interval.

    Candidates that break a model are dropped and named; slower ones stay. Finished items of --out are not run again.
    """
    with ExitStack() as stack:
        try:
            chosen = load(suite)
            if model:
                chosen = _of_model(chosen, model, not no_cage)
            if host and host not in {e.item.host for e in chosen.entries}:
                raise UnknownName("host of the suite", host, sorted({e.item.host for e in chosen.entries}))
            if item and item not in (items := [e.name for e in chosen.entries]):
                raise UnknownName("item of the suite", item, items)
            wanted = [e for e in chosen.entries if host in ("", e.item.host) and item in ("", e.name)]
            if not wanted:
                raise ConfigError(f"--item {item} is not in --host {host}: leave one of them out")
            pythons = _pythons(python or ())
            if cluster and best:
                raise ConfigError(
                    "--best runs on this machine alone: leave --cluster out, and continue --out"
                )
            if estimate:
                _estimate(chosen, wanted, [_read_set(t) for t in sets or ()], not no_kernels, json_only)
                return
            if not self_test and not sets:
                raise ConfigError(
                    "give --set NAME=DIR, or --selftest; `fk-bench stubs` makes a folder of candidates"
                )
            if chosen.device == "cuda" and not machine.machine().gpus:
                raise ConfigError(f"suite {chosen.name} needs a GPU, and there is none here: use smoke")
            found = [_read_set(text) for text in sets or ()]
            named = [s.name for s in found]
            if twice := next((n for n in named if named.count(n) > 1), None):
                folders = " and ".join(str(s.folder) for s in found if s.name == twice)
                raise ConfigError(f"--set: {folders} are both named {twice!r}; give each another NAME=DIR")
        except (ConfigError, SuiteError, UnknownName, SetError) as error:
            fail(str(error))
        if self_test:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fk-selftest-")))
            folder.chmod(0o755)
            found = [CandidateSet(SELFTEST, folder, ()), *found]
        run = out or Path("fk-bench-runs") / time.strftime("eval-%Y%m%d-%H%M%S")
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--out {run}: {error.strerror}; give a folder")
        evaluation = Evaluation(chosen, found, run, pythons, not no_cage, not no_kernels, best)
        try:
            evaluation.resume(force)
        except ConfigError as error:
            fail(str(error))
        try:
            evaluation.run(wanted, cluster, suite, _everywhere(model, chosen))
        except ConfigError as error:
            fail(str(error))
        except KeyboardInterrupt:
            print(f"interrupted: finished items are kept; continue with --out {run}", file=sys.stderr)
            raise SystemExit(130) from None
        ok = evaluation.finish(wanted, json_only, self_test)
        if store.wanted(track):
            store.track(run)
    if not ok:
        raise SystemExit(1)


def _of_model(suite: Suite, model: str, caged: bool) -> Suite:
    """The items of one model: of the suite, else of a checkpoint. Raises SuiteError, UnknownName, ConfigError."""
    if any(e.item.model == model for e in suite.entries):
        return of_model(suite, model)
    if not own_model.is_checkpoint(model):
        known = sorted({e.item.model for e in suite.entries})
        hint = own_model.elsewhere(model, suite.name) or "A checkpoint is given by its folder or hub id."
        raise UnknownName("model of the suite", model, known, hint)
    made = own_model.of_checkpoint(suite, model)
    folder = Path(made.entries[0].model.path)
    if caged and (closed := own_model.unreadable(folder)):
        raise ConfigError(
            f"--model {model}: the user of the cage cannot read {closed}: chmod -R o+rX {folder}, or give --no-cage"
        )
    return made


def _everywhere(model: str, suite: Suite) -> str:
    """`--model` for a process that runs in another folder."""
    own = model and suite.entries[0].model.path and Path(model).expanduser().is_dir()
    return str(Path(model).expanduser().resolve()) if own else model


def _pythons(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if name not in HOSTS or not equals:
            raise ConfigError(f"--python {text!r}: give HOST=PATH, HOST one of {', '.join(HOSTS)}")
        found[name] = machine.absolute(path)
        try:
            there = machine.interpreter(found[name]).versions
        except ValueError as error:
            raise ConfigError(f"--python {text}: {error}") from error
        if name not in there:
            raise ConfigError(f"--python {text}: {name} is not installed in this interpreter")
    return found


def _read_set(text: str) -> CandidateSet:
    name, equals, folder = text.partition("=")
    if not equals or not name or not folder:
        raise ConfigError(f"--set {text!r}: give NAME=DIR")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--set {text!r}: {name!r} is no name: {NAME_RULE}")
    if name == SELFTEST:
        raise ConfigError(f"--set {text!r}: {SELFTEST} is the set of --selftest; choose another name")
    path = Path(folder).expanduser()
    return read_set(name, path.resolve() if path.is_dir() else path, blocks=True)


def _digests(files: Mapping[str, str]) -> dict[str, str]:
    """{op: digest of its candidate}."""
    return {op: digest_of(Path(file)) for op, file in files.items()}


def _estimate(
    suite: Suite, entries: Sequence[Entry], sets: Sequence[CandidateSet], kernels: bool, json_only: bool
) -> None:  # fmt: skip
    """Print the minutes of these items; the host alone is measured again with each further set."""
    from fk_bench.evaluate.run.composition import estimated_minutes

    count = max(len(sets), 1)
    minutes = {e.name: e.minutes * count for e in entries}
    lines = [[e.name, e.item.category, minutes[e.name]] for e in entries]
    alone = {s.name: estimated_minutes(s.files, suite.kernels, suite.device) for s in sets if kernels}
    lines += [[f"kernels of {name}", "", found] for name, found in alone.items()]
    if not json_only:
        table(f"{suite.name}: minutes for {count} set(s)", ["item", "category", "minutes"], lines)
        unknown = "" if sets or not kernels else ", without the kernels of sets: name them with --set"
        print(f"{sum(minutes.values()) + sum(alone.values()):.1f} minutes{unknown}")
    last_line(
        {
            "command": results.COMMAND,
            "ok": True,
            "suite": suite.name,
            "digest": suite.digest,
            "minutes": minutes,
            "minutes_of_kernels": alone,
        }
    )


class Evaluation:
    """One run: its rows are appended as they are made, so that it can be continued."""

    def __init__(
        self, suite: Suite, sets: Sequence[CandidateSet], folder: Path, pythons: dict[str, str], caged: bool,
        kernels: bool, best: bool,
    ):  # fmt: skip
        self.suite, self.sets, self.folder = suite, sets, folder
        self.pythons, self.caged, self.kernels, self.best = pythons, caged, kernels, best
        self.path = folder / "rows.jsonl"
        versions = dict(machine.interpreter(sys.executable).versions)
        for name, python in pythons.items():
            versions |= {k: v for k, v in machine.interpreter(python).versions.items() if k == name}
        self.context = Context(
            uuid4().hex[:12], machine.commit(), machine.machine(), versions, suite.name, suite.digest,
            {s.name: results.digest_of(s.folder, s.files) for s in sets},
        )  # fmt: skip
        self.rows: list[Row] = []
        self.seed = secrets.randbits(48)

    def resume(self, force: bool) -> None:
        """Read the rows of an earlier run. Raises ConfigError if they are of another evaluation."""
        if not self.path.exists():
            return
        found, warnings = rows.read(self.path)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        why = next((w for r in found if (w := self.context.differs(r))), "")
        if why and not force:
            raise ConfigError(
                f"--out {self.folder} holds another evaluation: {why}. Use another folder, or --force"
            )
        self.rows = [r for r in found if not self.context.differs(r)]

    def add(self, made: Sequence[Row]) -> None:
        rows.append(self.path, made)
        self.rows += made

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def run(self, entries: Sequence[Entry], cluster: str, suite: str, model: str) -> None:
        """Measure these items, here or on a cluster. Raises ConfigError for a cluster that does not answer."""
        from fk_bench.core.gpus import visible
        from fk_bench.evaluate.run.side import Launcher

        for one in self.sets:
            for file in one.declined:
                self.say(f"{one.name}: {file.path} is for no op: {file.reason}")
        gpus = visible(machine.machine().gpus) if self.suite.device == "cuda" and not self.best else []
        apart = bool(cluster) or (len(gpus) > 1 and len(self.sets) * len(entries) > 1)
        if apart:
            self._apart(entries, cluster, gpus, suite, model)
        memory = int(self.suite.memory_gib * 2**30)
        with Launcher(
            self.pythons,
            memory,
            self.suite.threads,
            self.caged,
            bool(machine.machine().gpus),
            self.folder / "logs",
        ) as launcher:
            for one in self.sets:
                if self.kernels and one.name != SELFTEST:
                    self._kernels(one)
                for entry in () if apart else entries:
                    self._item(launcher, one, entry)

    def _apart(
        self, entries: Sequence[Entry], address: str, gpus: Sequence[str], suite: str, model: str
    ) -> None:  # fmt: skip
        """Measure items in processes of their own: on a cluster, or on all GPUs of this machine."""
        from fk_bench.evaluate.run import cluster
        from fk_bench.evaluate.run.gpus import run as run_on_gpus
        from fk_bench.evaluate.run.items import Measured

        text = Path(suite).read_text(encoding="utf-8") if suite.endswith(".toml") else ""
        options = [word for name, python in self.pythons.items() for word in ("--python", f"{name}={python}")]
        options += ["--model", model] * bool(model) + ["--no-cage"] * (not self.caged)
        jobs, places = [], {}
        for one in self.sets:
            own = one.name == SELFTEST and not one.files
            sent = {} if own or not one.folder.is_dir() else cluster.contents(one.folder)
            for entry in entries:
                if entry.item in results.items_done(self.rows, one.name):
                    continue
                job = cluster.Job(
                    entry.name, text or suite, Path(suite).name if text else "", "" if own else one.name, sent,
                    "" if sent or own else str(one.folder), tuple(options), max(self.suite.threads, 1),
                    entry.item.ranks if self.suite.device == "cuda" else 0,
                )  # fmt: skip
                jobs.append(job)
                places[id(job)] = one, entry

        def arrived(job: cluster.Job, found: list[Row] | cluster.Lost) -> None:
            one, entry = places[id(job)]
            if not isinstance(found, cluster.Lost):
                mine = [r for r in found if r.kind in (results.ITEM, results.ROUND)]
                why = next((w for r in mine if (w := self.context.differs(r))), "")
                if mine and not why:
                    where = "on the cluster" if address else "on a GPU of its own"
                    self.say(f"{one.name}: {entry.name} was measured {where}")
                    self.add(mine)
                    return
                found = cluster.Lost(f"it was measured elsewhere: {why}" if why else "no rows came back")
            self.say(f"{one.name}: {entry.name} failed: {found}")
            lost = Measured(entry, reason=Reason.RUN_TIME, text=str(found))
            self.add(results.item_rows(self.context, one.name, lost, "record", {}))

        if jobs and not address:
            run_on_gpus(jobs, gpus, arrived)
        elif jobs:
            with cluster.connected(address) as ray:
                cluster.run(ray, jobs, arrived)

    def _item(self, launcher: Any, one: CandidateSet, entry: Entry) -> None:
        from fk_bench.evaluate.run.items import ItemRun
        from fk_bench.evaluate.run.side import set_files

        dtype = machine.fast_dtype() if self.suite.dtype == "auto" else self.suite.dtype
        files, name = one.files, one.name
        if name == SELFTEST and not files:
            files = selftest.write(entry.item.host, one.folder, entry.workload.kind)
        readable = set_files(sorted({one.folder, *(Path(p).parent for p in files.values())}))
        if entry.item not in results.items_done(self.rows, name):
            began = time.monotonic()
            found = ItemRun(entry, self.suite, launcher, dtype, self.seed, self.say).measure(files, readable)
            extra = {
                "digests": _digests(files), "dtype": dtype, "seed": self.seed, "cage": launcher.cage,
                "seconds": round(time.monotonic() - began, 1),
            }  # fmt: skip
            self.add(results.item_rows(self.context, name, found, "record", extra))
        done = results.items_done(self.rows, name)[entry.item]
        if self.best and entry.item not in results.items_done(self.rows, name, "best"):
            slow = results.slower(self.rows, name) & {*done.case["kept"]}
            rest = {op: files[op] for op in done.case["kept"] if op not in slow}
            if slow and rest:
                found = ItemRun(entry, self.suite, launcher, dtype, self.seed, self.say).measure(
                    rest, readable
                )
                self.add(results.item_rows(self.context, name, found, "best", {"left_out": sorted(slow)}))

    def _kernels(self, one: CandidateSet) -> None:
        from fk_bench.evaluate.run import composition

        if any(r.kind == results.OP and r.case.get("set") == one.name for r in self.rows):
            return
        device = "cuda" if machine.machine().gpus else "cpu"
        made: list[Row] = []

        digests = _digests(one.files)

        def add(row: Row, how: str) -> None:
            speed = row.metrics.get("speedup_geomean", "")
            mark = " (provisional, no score)" if row.provisional else ""
            self.say(f"{one.name}: {row.subject.op} {how}: {row.status.value} {speed}{mark}")
            op = str(row.subject.op)
            ran = {op} if how == composition.ALONE else registry.reached(op, parts=True)
            of = {n: d for n, d in digests.items() if n in ran}
            made.append(self.context.row(
                one.name, {"kind": results.OP, "how": how, "digests": of}, row.subject, status=row.status,
                reason=row.reason, metrics=row.metrics, ci95=row.ci95, provisional=row.provisional,
            ))  # fmt: skip

        model = composition.model_of(self.suite)
        composition.judged(one.files, self.suite.kernels, device, self.caged, add, model)
        self.add(made)  # all or none, so that a continued run judges again what was interrupted

    def finish(self, entries: Sequence[Entry], json_only: bool, self_test: bool) -> bool:
        """Print the tables and the score, write the page, end with JSON. Returns whether these items ran right."""
        from fk_bench.evaluate.run import report

        scored, lines = {}, []
        selftests = results.selftest_of(self.suite, self.rows)
        for one in self.sets:
            found = results.scores(self.suite, self.rows, one.name)
            scored[one.name] = found
            gap = results.gap_of(self.rows, one.name)
            row = results.score_row(self.context, one.name, found, gap, selftests)
            self.add([row])
            declined = {str(d.path): d.reason for d in one.declined}
            unscored = {
                str(r.subject.op): r.provisional for r in report.ops_of(self.rows, one.name) if r.provisional
            }
            parts = {
                "ci95": row.ci95,
                "parts": row.case["parts"],
                "declined": declined,
                "provisional": unscored,
            }
            lines.append({"set": one.name, **row.metrics, **parts})
        page = report.write(self.folder, self.suite, self.rows, scored)
        if not json_only:
            report.show(self.suite, self.rows, scored)
            print(f"rows: {self.path}; page: {page}\n")
        wanted = [results.items_done(self.rows, s.name).get(e.item) for s in self.sets for e in entries]
        ok = all(r is not None and r.status in (Status.OK, Status.SKIPPED) for r in wanted)
        if self_test:
            done = results.items_done(self.rows, SELFTEST)
            outside = selftest.outside([done[e.item] for e in entries if e.item in done])
            for text in outside:
                print(f"selftest: {text}", file=sys.stderr)
            ok = ok and not outside
        last_line({
            "command": results.COMMAND, "ok": ok, "suite": self.suite.name, "digest": self.suite.digest,
            "results": lines, "selftest": selftests, "rows": str(self.path), "report": str(page),
        })  # fmt: skip
        return ok
