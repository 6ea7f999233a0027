"""Choices for the shapes of a model that no table lists: kept from an earlier start, or measured now."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from fastkernels.core import kept_files, registry, tuning
from fastkernels.core.dispatch import OPS
from fastkernels.core.env import Environment
from fastkernels.core.spec import OpSpec
from fastkernels.core.tuning import Chip, Entry, Table
from fastkernels.patch import Request
from fastkernels.verify import cache, measure, phases
from fastkernels.verify.measure import Point
from fastkernels.verify.phases import Seconds, timed
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import NAME as GATED
from fk_integrations.core.journal import Journal
from fk_integrations.core.ranks import agree
from fk_integrations.patching import gated_products, seam_interface

log = logging.getLogger("fastkernels")
OF_TOKENS = ("M",), ("tokens",)  # Key.sizes of ops whose size is the number of tokens of a step
SECONDS = 85.0  # of a measurement, with compiling
WAIT_S = SECONDS + 60  # that other ranks wait for it


@dataclass
class Verified:
    """The outcome for one model.

    measured  {op: lines for the report}
    seconds   of each phase, in the rank that measures
    """

    measured: dict[str, list[str]] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=dict)


def verify(
    adapter: Adapter, model: Any, request: Request, device: torch.device, journal: Journal | None = None
) -> Verified:
    """Use the verified choices for the model's shapes in this process, in all ranks the same.

    With FASTKERNELS_VERIFY=0 only those that are kept. A failure leaves these shapes to the host, with a warning. The
    journal gets the way back to the choices before; without one they stay.
    """
    wanted = Environment.read().verify
    if device.type != "cuda" and wanted is None:
        return Verified()
    seconds: Seconds = {}
    try:
        with timed(seconds, "find shapes"):
            chip = tuning.chip_of(device.type)
            points = points_of(adapter, model, request, chip)
        text = agree(adapter.ranks(), lambda: _choices(adapter, points, device, chip, wanted), WAIT_S)
    except Exception as error:
        log.warning("shapes without a table entry stay with the host: %s: %s", type(error).__name__, error)
        return Verified()
    found = json.loads(text)
    entries = [Entry(**{**raw, "ci95": tuple(raw["ci95"])}) for raw in found["entries"]]
    if adapter.own:  # there may be more engines of ours in this process
        new = {entry.point for entry in entries}
        entries += [entry for entry in tuning.verified(chip) if entry.point not in new]
    use(chip, entries, journal or Journal())
    return Verified(found["lines"], {**seconds, **found["seconds"]})


def use(chip: str, entries: list[Entry], journal: Journal) -> None:
    """Put choices into the tables of this process."""
    before = tuning.verified(chip)

    def put(several: Any) -> None:
        tuning.set_verified(chip, several)
        for op in OPS.values():
            op.forget()

    journal.add(lambda: put(before))
    put(entries)


def points_of(adapter: Adapter, model: Any, request: Request, chip: str) -> list[Point]:
    """Shapes of the modules that ours may replace and that no table lists for this chip, with the key's sizes.

    Most important sizes come first, for all shapes. LM heads come last: their weights may not leave enough memory.
    """
    found: dict[tuple[str, tuple[Any, ...]], list[Any]] = {}
    heads: dict[tuple[str, tuple[Any, ...]], list[Any]] = {}
    for name in registry.op_names():
        spec = registry.get(name)
        op = spec.tuned_by
        if op is None or op.key is None or op.key.propose is None or settled(adapter, request, spec):
            continue
        with _only_this_op(op.name):
            own = modules_of(adapter, model, spec)
            here = adapter.of(op.name)
            more = [(m, here.whole_shape(op, m)) for m in here.heads(model)] if name == op.name else []
            for into, several in ((found, own), (heads, more)):
                for module, shape in several:
                    if shape is not None:
                        into.setdefault((op.name, shape), []).append(module)
    last = {place: modules for place, modules in heads.items() if place not in found}
    points = []
    for part in (found, last):
        for (name, shape), modules in part.items():
            with _only_this_op(name):
                here, op = adapter.of(name), registry.get(name).op
                most = adapter.largest_batch() if op.key.sizes in OF_TOKENS else None
                live = here.live(op, shape, modules)
                listed = {e.place for e in tuning.entries(name, chip)} if here.in_tables else set()
                # Prompts do not run the product, or not apart from its activation, or gained nothing by it (H200).
                apart = part is last or (GATED, shape) in found or not Environment.read().verify
                for i, sizes in enumerate(here.points(op)):
                    point = Point(name, shape, sizes, tuple(modules), live)
                    entry = Entry(name, *point.named(), None, "", "")
                    left = entry.place in listed or (name == "linear" and apart and entry.of_prompts)
                    if not left and (most is None or sizes[0] <= most):
                        points.append((part is last, i, point))
    return [point for *_, point in sorted(points, key=lambda each: each[:2])]


@contextmanager
def _only_this_op(name: str) -> Iterator[None]:
    """Leave an op to the host, with a warning, if the host's part in its measurement fails."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("%s is not measured and stays with the host: %s", name, text)


def settled(adapter: Adapter, request: Request, spec: OpSpec) -> bool:
    """Whether nothing is to be chosen for this op: the user has, or it is not to run."""
    names = {spec.name, spec.tuned_by.name}
    chosen = {*request.candidates, *request.disable, *Environment.read().provider}
    listed = request.ops is None or bool(names & set(request.ops))
    if spec.name == GATED and gated_products.settled(adapter, request) is not None:
        return True
    return bool(names & chosen) or not listed or bool(adapter.batch_invariant() and not spec.batch_invariant)


def modules_of(adapter: Adapter, model: Any, spec: OpSpec) -> list[tuple[Any, tuple[Any, ...]]]:
    """The modules that the op can replace, and its layers, each with the values of the key's shape."""
    found = []
    for target in adapter.targets(spec, model):
        place, host_class = seam_interface.find(target.seam), seam_interface.host_class(target)
        if not place.live or host_class is None:
            continue
        supports = getattr(registry.target_class(target), "supports", None)
        for module in place.modules(adapter, model, spec.name, host_class):
            if supports is not None and supports(module) is not None:
                continue
            shape = adapter.of(spec.tuned_by.name).whole_shape(spec.tuned_by, module)
            if shape is not None:
                found.append((module, shape))
    here = adapter.of(spec.name)
    for layer in here.layers(spec.op, model) if spec.op is not None else ():
        if (shape := here.whole_shape(spec.op, layer)) is not None:
            found.append((layer, shape))
    return found


def _choices(
    adapter: Adapter, points: list[Point], device: torch.device, chip: str, wanted: bool | None
) -> str:
    """The entries, the report's lines and the seconds for these points, as JSON. Measures what is not kept."""
    if not points:
        return json.dumps({"entries": [], "lines": {}, "seconds": {}})
    seconds: Seconds = {}
    with timed(seconds, "read choices"):
        facts = kept_files.facts(chip, adapter.host, adapter.version)
        table = cache.kept(facts)
    kept = {e.point for e in table.entries}
    missing = [p for p in points if Entry(p.op, *p.named(), None, "", "").point not in kept]
    lines: dict[str, list[str]] = {}
    if missing and wanted is not False:
        outcome, table = _measure(adapter, missing, device, facts, table)
        seconds |= outcome.seconds
        if outcome.bytes:
            taken = (
                f"{outcome.bytes >> 20} MiB of device memory, freed since, and {phases.line(outcome.seconds)}"
            )
            lines.setdefault(missing[0].op, []).append(f"the measurement took {taken}")
        if outcome.stopped is not None:
            rest = sum(str(p) not in outcome.said for p in missing)
            text = (
                f"{rest} of {len(missing)} points were not measured and stay with the host: {outcome.stopped}"
            )
            log.warning("%s", text)
            lines.setdefault(missing[0].op, []).append(text)
    by_point = {e.point: e for e in table.entries}
    entries = []
    for point in sorted(points, key=lambda p: (p.op, str(p.shape), p.sizes)):
        entry = by_point.get(Entry(point.op, *point.named(), None, "", "").point)
        if entry is not None:
            entries.append(json.loads(entry.to_json()))
            said = table.runs[entry.run].get("measured", {}).get(str(point), {})
            lines.setdefault(point.op, []).append(line(entry, said, adapter.own))
    return json.dumps({"entries": entries, "lines": lines, "seconds": seconds})


def _measure(
    adapter: Adapter, points: list[Point], device: torch.device, facts: dict[str, str], table: Table
) -> tuple[measure.Outcome, Table]:
    log.info(
        "%d points of %s are measured on this %s against %s kernels, in at most %.0f s "
        "(FASTKERNELS_VERIFY=0 keeps those)",
        len(points), ", ".join(sorted({p.op for p in points})), facts["chip"],
        "the usual" if adapter.own else "the host's", SECONDS,
    )  # fmt: skip
    run = f"verified {datetime.now(timezone.utc).isoformat(timespec='seconds')}"
    with measure.small_workspaces(release=adapter.profiles_memory_later):
        outcome = measure.measure(points, run, device, Chip.of(device.type), SECONDS, own=adapter.own)
    made = Table(facts["chip"], {run: {"facts": facts, "measured": outcome.said}}, tuple(outcome.entries))
    if outcome.entries:
        cache.keep(made, facts)
    won = sum(e.chosen for e in outcome.entries)
    log.info(
        "ours is faster at %d of %d points: measured in %s", won, len(points), phases.line(outcome.seconds)
    )
    return outcome, table.merged(made)


def line(entry: Entry, said: dict[str, str], own: bool = False) -> str:
    """Return the report's text for one point: the provider that runs, and the host's time over each proposal's.

    own: in our engine the usual kernel takes the place of the host's.
    """
    whose = "as usual" if own else "the host's"
    winner = entry.provider if entry.chosen else f"{entry.baseline}, {whose}"
    tried = ", ".join(f"{name}: {text}" for name, text in said.items()) or "no proposal"
    return f"{entry}: {winner} ({tried})"
