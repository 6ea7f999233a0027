"""SGLang's scheduler process: the adapter, a live patch with its CUDA graphs, and the replies to requests.

A captured CUDA graph replays the code of its capture, so after a live swap all graphs are captured again; the old ones
stay alive until the new ones exist. Ranks agree before each step that involves collectives.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastkernels.core.dispatch import Provider
from fastkernels.core.env import Environment
from fastkernels.core.inductor_repair import lasting
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.runtime.trial import within
from fastkernels.patch import PatchError, Request
from fastkernels.verify.phases import Seconds, timed
from fk_integrations.core import all_ranks, applied, call_recording, reports, versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.gated_products import Gated
from fk_integrations.core.heap import Heap, frozen_again
from fk_integrations.core.host_op import HostOp
from fk_integrations.core.nodes import node
from fk_integrations.patching import compilations, proof
from fk_integrations.patching.apply import Patched, apply
from fk_integrations.patching.in_process import UNDO_FIRST
from fk_integrations.patching.relatives import relatives
from fk_integrations.sglang import host_ops, own_kernels
from fk_integrations.sglang.attention import backends, linear_backends

log = logging.getLogger("fastkernels")
NO_GRAPHS = (
    "SGLang captures no CUDA graphs, and in eager steps calls of ours take the CPU longer than its own"
)
_patched: list[Patched] = []  # at most one: a scheduler process has one target model
_trial: list[Trial] = []  # at most one


class Refused(PatchError):
    """Nothing was changed or run: the engine is as it was before the request."""


class Busy(Refused):
    """The engine is not idle; the caller may try again."""


class SglangAdapter(Adapter):
    """SGLang's modules."""

    host = "sglang"
    faster_on_cpu = True

    def __init__(self, model_runner: Any = None):
        self.version = versions.installed("sglang") or ""
        self.model_runner = model_runner
        self.whole = model_runner is None or model_runner.server_args.pp_size == 1

    def batch_invariant(self) -> str | None:
        on = getattr(self.model_runner.server_args, "enable_deterministic_inference", False)
        return "--enable-deterministic-inference" if on else None

    def ranks(self) -> Any:
        from sglang.srt.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    def communicators(self) -> list[Any]:
        from sglang.srt.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return [group] if self.model_runner is not None and group.world_size > 1 else []

    def dispatchers(self) -> list[Any]:
        arguments = getattr(self.model_runner, "server_args", None)
        return self.communicators() if getattr(arguments, "enable_dp_attention", False) else []

    def callers(self, model: Any) -> Iterator[Any]:
        """Also the backends of linear attention and their kernel objects, which the model runner holds."""
        yield from self.modules(model)
        if self.model_runner is not None:
            yield from linear_backends(self.model_runner)

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        return relatives(self, op, model)

    def fused(self, model: Any, op: str, module: Any) -> Reason | None:
        forced = os.environ.get("SGLANG_FORCE_FUSED_OP_BACKEND")
        if not forced or not hasattr(module, "backend_eligible"):  # not a BaseFusedOp
            return None
        return Reason(
            Kind.LEFT_TO_HOST, f"SGLANG_FORCE_FUSED_OP_BACKEND={forced} selects SGLang's own kernel"
        )

    def captures(self) -> Callable[[], bool] | Reason | None:
        if self.model_runner is None or not str(getattr(self.model_runner, "device", "")).startswith("cuda"):
            return None
        if getattr(self.model_runner.server_args, "disable_cuda_graph", False):
            return Reason(Kind.LEFT_TO_HOST, NO_GRAPHS)
        from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

        return get_is_capture_mode

    def largest_batch(self) -> int | None:
        arguments = getattr(self.model_runner, "server_args", None)
        most = getattr(arguments, "chunked_prefill_size", None) or -1
        return most if most > 0 else None

    def in_pass(self, gated: Gated) -> bool | Reason:
        arguments = self.model_runner.server_args
        prefill = getattr(getattr(arguments, "cuda_graph_config", None), "prefill", None)
        in_pieces = "tc_piecewise" in str(getattr(prefill, "backend", "")).lower()
        if getattr(arguments, "enable_torch_compile", False) or in_pieces:
            return Reason(Kind.LEFT_TO_HOST, "SGLang compiles it, and no pass of ours changes its graphs")
        return False

    def providers(self) -> Mapping[str, Provider]:
        return own_kernels.providers()

    def of(self, op: str) -> HostOp:
        special = host_ops.SPECIAL.get(op)
        return super().of(op) if special is None else special(self.model_runner, self.version)


# At start, with FASTKERNELS=1


def patch_after_loading() -> None:
    """Have ModelRunner.init_attention_backends end with the patch that the environment requests.

    At that point the model is loaded and no graph is captured. Draft models are not patched.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    stock = ModelRunner.init_attention_backends
    if hasattr(stock, "fastkernels_stock"):
        return

    @functools.wraps(stock)
    def init_attention_backends(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        if not self.is_draft_worker:
            try:
                all_ranks.announce("sglang")
                all_ranks.check("sglang")
                _apply(self, Request.from_environment())
            except Exception as error:
                raise PatchError(f"FASTKERNELS=1, but SGLang cannot be patched: {error}") from error
        return result

    init_attention_backends.fastkernels_stock = stock  # type: ignore[attr-defined]
    ModelRunner.init_attention_backends = init_attention_backends


def _apply(model_runner: Any, request: Request) -> Patched:
    rank, _ = _rank_and_world()
    patched = apply(SglangAdapter(model_runner), model_runner.model, request, rank)
    patched.whole = True
    _patched.append(patched)
    reports.start("sglang", rank, _reply)
    return patched


# Requests


def answer(scheduler: Any, request: str) -> None:
    """Carry out one request and write the reply to FOLDER/RANK.json. Errors go there too: SGLang would hide them."""
    raw = json.loads(request)
    extra: dict[str, Any] = {}
    wanted = Request.from_json(request)
    try:
        if raw["action"] not in _ACTIONS:
            raise PatchError(f"unknown action {raw['action']!r}; known: {', '.join(_ACTIONS)}")
        extra = _ACTIONS[raw["action"]](scheduler, wanted) or {}
    except PatchError as error:
        extra = {
            "error": str(error),
            "busy": isinstance(error, Busy),
            "refused": isinstance(error, Refused),
        }
    except (Exception, SystemExit) as error:  # a candidate may call sys.exit()
        log.exception("fastkernels: %s failed", raw["action"])
        extra = {"error": f"{type(error).__name__}: {error}"}
    paused = bool(getattr(scheduler, "_engine_paused", False))
    reply = {**_reply(wanted), "graphs": bool(_captured(_runner(scheduler))), "paused": paused, **extra}
    file = Path(raw["folder"]) / f"{reply['rank']}.json"
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(reply))
        os.replace(partial, file)
    except FileNotFoundError:
        log.warning("fastkernels: the caller of %s was interrupted, or has ended", raw["action"])


def _reply(request: Request | None = None) -> dict[str, Any]:
    from sglang.srt.distributed.parallel_state import get_pp_group

    rank, world = _rank_and_world()
    shown = _patched[0] if _patched and _patched[0].meant_by(request or Request("report")) else None
    return {
        "rank": rank, "world": world, "stage": get_pp_group().rank_in_group, "pid": os.getpid(), "node": node(),
        "host": "sglang", "version": versions.installed("sglang"), "rows": shown.report() if shown else [],
        "error": None, "seconds": shown.seconds if shown else {}, "lasting": lasting(),
    }  # fmt: skip


def _rank_and_world() -> tuple[int, int]:
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return group.rank, group.world_size


def _runner(scheduler: Any) -> Any:
    return scheduler.tp_worker.model_runner


def _patch(scheduler: Any, request: Request) -> None:
    with frozen_again() as heap:
        _patch_now(scheduler, request, heap)


def _patch_now(scheduler: Any, request: Request, heap: Heap) -> None:
    if _patched:
        raise Refused(f"this engine is patched already: {UNDO_FIRST}")
    runner = _runner(scheduler)
    _refuse(scheduler, runner)
    error: str | None = None
    try:
        _apply(runner, request)
    except (Exception, SystemExit) as failure:
        error = str(failure)
    _agree(scheduler, error, _take_back)
    with timed(_patched[0].seconds, "capture graphs"):
        _recapture(scheduler, runner, _take_back, heap)
    scheduler.flush_cache()  # cached keys and values came from other kernels
    _trial[:] = [Trial(runner, _patched[0])]


def _trial_end(scheduler: Any, request: Request) -> None:
    """Let steps run without a guard again. Raises PatchError if a step of the trial failed in this rank."""
    failures = [error for trial in _trial if (error := trial.end()) is not None]
    _trial.clear()
    if failures:
        raise PatchError(failures[0])


class Trial:
    """A guard of a model runner's steps, from a patch to the end of its first request.

    SGLang ends all processes when a step raises. The guard restores the host's classes instead and runs the step again.
    """

    def __init__(self, runner: Any, patched: Patched):
        self.runner, self.failure = runner, None
        stock = runner.forward

        @functools.wraps(stock)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failure is not None:
                return stock(*args, **kwargs)
            try:
                with within(Environment.read().trial_s, "the trial step"):
                    return stock(*args, **kwargs)
            except (Exception, SystemExit) as error:
                log.exception("fastkernels: the trial step failed")
                self.failure = f"the trial step failed: {type(error).__name__}: {error}"
            patched.undo()
            return stock(*args, **kwargs)

        runner.forward = forward

    def end(self) -> str | None:
        """Remove the guard; the failure of a step, or None."""
        vars(self.runner).pop("forward", None)
        return self.failure


def _undo(scheduler: Any, request: Request) -> dict[str, Any] | None:
    if not _patched or not _patched[0].meant_by(request):
        return None
    with frozen_again() as heap:
        return _undo_now(scheduler, heap)


def _undo_now(scheduler: Any, heap: Heap) -> dict[str, Any] | None:
    runner = _runner(scheduler)
    _refuse(scheduler, runner)
    taken = _patched.pop()
    taken.undo()
    _end_trials()

    def again() -> None:
        _apply(runner, taken.request)

    seconds: Seconds = {}
    with timed(seconds, "capture graphs"):
        _recapture(scheduler, runner, again, heap)
    scheduler.flush_cache()
    _clear_pools(runner)
    reports.write("sglang", taken.rank, _reply())
    return {"seconds": seconds}


def _take_back() -> None:
    """Restore classes and candidates after a patch that failed."""
    _end_trials()
    while _patched:
        _patched.pop().undo()


def _end_trials() -> None:
    while _trial:
        _trial.pop().end()


def _clear_pools(runner: Any) -> None:
    """Set keys and values in the pools to zero, as at the start. States of linear attention are, at their allocation.

    Attention multiplies what is behind a sequence's end by zero, which does not remove the NaN of another kernel.
    """
    import torch

    todo = [getattr(runner, "token_to_kv_pool", None)]
    while todo:
        pool = todo.pop()
        for name, value in vars(pool).items() if pool is not None else ():
            if name in _CACHED:
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.zero_()
            elif name.endswith("_kv_pool"):  # of a hybrid pool: layers with a window, and all others
                todo.append(value)
    if torch.device(runner.device).type == "cuda":
        torch.cuda.synchronize()


_CACHED = ("k_buffer", "v_buffer", "kv_buffer", "k_scale_buffer", "v_scale_buffer")


def _refuse(scheduler: Any, runner: Any) -> None:
    """Raise Refused if this engine cannot be changed now, or not without a restart."""
    if not scheduler.is_fully_idle():
        raise Busy("the engine has unfinished requests: let them finish (or abort them), then patch or undo")
    released = sorted(scheduler.weight_updater.offload_tags)
    if released:
        raise Refused(
            f"memory of the engine is released ({', '.join(released)}): resume_memory_occupation(), then patch or undo"
        )
    captured = _captured(runner)
    if captured and getattr(scheduler, "draft_worker", None) is not None:
        raise Refused(
            "speculative decoding: the CUDA graphs of the draft model cannot be captured again in a live engine;"
            " start it with FASTKERNELS=1, or with --disable-cuda-graph"
        )
    prefill = captured.get("prefill_cuda_graph_runner")
    if str(getattr(prefill, "prefill_backend_name", "")) == "tc_piecewise":
        raise Refused(
            "prefill graphs of 'tc_piecewise' are compiled code that cannot be made again in a live engine"
        )


def _agree(scheduler: Any, error: str | None, back: Callable[[], None]) -> None:
    """Raise in every rank, after `back()`, if any rank of this stage has failed."""
    import torch.distributed as dist

    group = scheduler.tp_group.cpu_group
    errors: list[str | None] = [error]
    if dist.get_world_size(group) > 1:
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    if any(errors):
        back()
        others = "; ".join(f"rank {i} of its stage: {e}" for i, e in enumerate(errors) if e)
        raise PatchError(error or f"undone, because another rank failed: {others}")


# CUDA graphs


def _captured(runner: Any) -> dict[str, Any]:
    """The runners that replay graphs, by attribute. With graphs off, an EagerRunner takes their place."""
    names = ("decode_cuda_graph_runner", "prefill_cuda_graph_runner")
    found = {name: getattr(runner, name, None) for name in names}
    return {k: v for k, v in found.items() if v is not None and type(v).__name__ != "EagerRunner"}


def _recapture(scheduler: Any, runner: Any, back: Callable[[], None], heap: Heap) -> None:
    """Capture all graphs again with the current classes. If a rank fails: `back()`, and the old graphs."""
    if not _captured(runner):
        return
    import torch

    _capture_or_restore(scheduler, runner, back)
    heap.collect()  # the old graphs
    torch.cuda.empty_cache()


def _capture_or_restore(scheduler: Any, runner: Any, back: Callable[[], None]) -> None:
    snapshot = _Snapshot(runner)
    error: str | None = None
    try:
        _capture(runner)
    except (Exception, SystemExit) as failure:
        log.exception("fastkernels: CUDA graphs could not be captured again")
        error = f"CUDA graphs could not be captured again: {type(failure).__name__}: {failure}"

    def restore() -> None:
        back()
        snapshot.restore()

    _agree(scheduler, error, restore)


def _capture(runner: Any) -> None:
    import torch

    before = set(_captured(runner))
    if getattr(runner.server_args, "enable_torch_compile", False):
        torch.compiler.reset()
    torch.cuda.synchronize()
    if "decode_cuda_graph_runner" in before:
        runner.init_decode_cuda_graph()
    if "prefill_cuda_graph_runner" in before:
        runner.init_prefill_cuda_graph()
    torch.cuda.synchronize()
    lost = sorted(before - set(_captured(runner)))
    if lost:
        raise PatchError(f"SGLang did not capture its graphs again ({', '.join(lost)} is missing)")


class _Snapshot:
    """The current graph runners, and the buffers of attention backends that their graphs read.

    A capture allocates new buffers in a backend (init_cuda_graph_state): graphs and buffers belong together.
    """

    def __init__(self, runner: Any):
        self.saved = [(b, {k: _shallow(v) for k, v in vars(b).items()}) for b in backends(runner)]
        self.runner, self.of_runner = runner, {k: v for k, v in vars(runner).items() if "graph" in k}

    def restore(self) -> None:
        vars(self.runner).update(self.of_runner)
        for owner, attributes in self.saved:
            vars(owner).clear()
            vars(owner).update(attributes)


def _shallow(value: Any) -> Any:
    return dict(value) if type(value) is dict else list(value) if type(value) is list else value


# Counters and traces


def _report(scheduler: Any, request: Request) -> None:
    """The reply has the counters."""


def _reset(scheduler: Any, request: Request) -> None:
    if _patched and _patched[0].meant_by(request):
        _patched[0].reset()


def _trace_start(scheduler: Any, request: Request) -> None:
    proof.start(_runner(scheduler).device)


def _trace_stop(scheduler: Any, request: Request) -> dict[str, Any]:
    found = proof.stop()
    if _patched:
        proof.prove(_patched[0], found["kernels"])
    return found


def _record_start(scheduler: Any, request: Request) -> None:
    call_recording.start(dict(request.options))


def _record_stop(scheduler: Any, request: Request) -> dict[str, Any]:
    return call_recording.stop(dict(request.options), _rank_and_world()[0], _runner(scheduler).model)


def _call_model(scheduler: Any, request: Request) -> dict[str, Any]:
    return applied.apply(_runner(scheduler).model, request.options)


def _compilations(scheduler: Any, request: Request) -> dict[str, Any]:
    return {"compilations": compilations.count()}


_ACTIONS: dict[str, Callable[[Any, Request], dict[str, Any] | None]] = {
    "patch": _patch, "undo": _undo, "trial_end": _trial_end, "report": _report, "reset": _reset,
    "trace_start": _trace_start, "trace_stop": _trace_stop, "record_start": _record_start, "record_stop": _record_stop,
    "compilations": _compilations, "apply": _call_model,
}  # fmt: skip
