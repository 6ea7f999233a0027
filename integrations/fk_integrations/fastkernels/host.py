"""Our own engine as a host. Its modules are ours already: a patch puts candidates in, and the report counts calls.

A request is carried out in every rank of the engine. Graphs are captured again after all ranks have changed, because
a capture runs collectives.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from fastkernels import __version__
from fastkernels.core import registry
from fastkernels.core.cancellation import or_undone
from fastkernels.core.candidate import is_block
from fastkernels.core.candidate_scopes import Scope
from fastkernels.core.inductor_repair import lasting
from fastkernels.core.reasons import Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.patch import PatchError, Request
from fastkernels.verify.measure import Live
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.expert_layers import live_calls, shape_of
from fk_integrations.core.gated_products import Gated
from fk_integrations.core.host_op import BATCHES, HostOp
from fk_integrations.patching import choose
from fk_integrations.patching.apply import Patched, apply, change
from fk_integrations.patching.in_process import UNDO_FIRST

VARIABLE = "FASTKERNELS_CANDIDATES"
Reply = dict[str, Any]


class FastKernelsAdapter(Adapter):
    """Targets are our classes in the model of a runner."""

    host, version, own = "fastkernels", __version__, True
    profiles_memory_later = True

    def __init__(self, runner: Any):
        self.runner, self.measured = runner, _measured.get(runner, {})

    def scope(self) -> Scope | None:
        return getattr(self.runner, "scope", None)

    def ranks(self) -> Any:
        import torch.distributed

        alone = self.runner.config.num_ranks == 1
        return None if alone else torch.distributed.new_group(backend="gloo")

    def of(self, op: str) -> HostOp:
        if op == "attention_decode":
            return _Attention(self.runner)
        if op in ("fused_experts", "fused_experts_fp8", "fused_experts_nvfp4"):
            return _Experts(self.runner)
        if op == "fused_experts_swigluoai":
            return _ClampedExperts()
        return _Linear() if op == "linear" else super().of(op)

    def largest_batch(self) -> int | None:
        config = getattr(self.runner, "config", None)
        return getattr(config, "max_num_batched_tokens", None)

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        if is_block(spec.name):
            return [replace(target, seam="block") for target in spec.targets]
        modules = list(model.modules())
        methods = [vars(m).get("quant_method") for m in modules]
        found = {type(part): "module" for part in modules}
        found |= {type(part): "quant_method" for part in methods if part is not None}
        return [
            Target(self.host, f"{cls.__module__}:{cls.__name__}", cls.__name__, seam, module=cls.__module__)
            for cls, seam in found.items()
            if _ops_by_class().get(cls) == spec.name
        ]

    def unknown(self, target: Target, host_class: Any) -> None:
        """Our classes need no fingerprint."""

    def in_pass(self, gated: Gated) -> bool | Reason:
        """Our blocks themselves run the op where it is faster."""
        return True


class _Attention(HostOp):
    """Attention with keys and values of several heads."""

    def __init__(self, model_runner: Any):
        self.model_runner = model_runner

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        if not _is_attention(module) or module.sinks is not None:  # what is measured has no sinks
            return None
        runner = self.model_runner
        if runner.config.attention_backend is not None:
            return None  # the user has chosen
        heads = module.num_heads, module.num_kv_heads, module.head_size
        return *heads, runner.config.block_size, max(module.window_left + 1, 0), runner.cache_dtype

    def points(self, op: Any) -> Sequence[tuple[int, ...]]:
        most = self.model_runner.config.max_num_seqs
        return [(batch, self.model_runner.max_model_len) for batch in BATCHES if batch <= most]


class _Linear(HostOp):
    """Linear layers, and the LM head without quantization."""

    def heads(self, model: Any) -> Sequence[Any]:
        from fastkernels.overrides.embedding.vocab_parallel import UnquantizedEmbedding

        head = getattr(model, "lm_head", None)
        return [head] if isinstance(getattr(head, "quant_method", None), UnquantizedEmbedding) else []


class _Experts(HostOp):
    """Mixtures of experts: their layers call the op."""

    def __init__(self, model_runner: Any):
        self.model_runner = model_runner

    def layers(self, op: Any, model: Any) -> Sequence[Any]:
        from fastkernels.models.common.layers.decoder import DecoderExperts

        found = [m for m in model.modules() if isinstance(m, DecoderExperts)]
        return [m for m in found if m.experts.quant_method.op == op.name]

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        made = module.experts
        return shape_of(
            op, made, made.quant_method.arguments, module.described.top_k, module.gate.weight.dtype
        )

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live:
        def arguments(module: Any, *call: Any) -> tuple[Any, ...]:
            found: tuple[Any, ...] = module.quant_method.arguments(module, *call)
            return found

        return live_calls(shape, [m.experts for m in modules], arguments)


class _ClampedExperts(HostOp):
    """GPT-OSS's mixtures of experts."""

    def layers(self, op: Any, model: Any) -> Sequence[Any]:
        from fastkernels.models.common.layers.clamped_experts import ClampedExperts

        return [m for m in model.modules() if isinstance(m, ClampedExperts)]

    def shape(self, op: Any, module: Any) -> tuple[Any, ...] | Reason | None:
        import torch

        where, dtype = module.router.weight.device, module.experts.gate_up_proj_bias.dtype
        x = torch.empty(1, module.experts.down_proj_bias.shape[1], dtype=dtype, device=where)
        choice = (torch.ones(1, module.top_k, device=where), torch.zeros(1, module.top_k, device=where).int())
        shape: tuple[Any, ...] = op.key.of(*module.arguments(x, *choice))[0]
        return shape

    def live(self, op: Any, shape: tuple[Any, ...], modules: Sequence[Any]) -> Live:
        return live_calls(shape, modules, lambda module, *call: module.arguments(*call))


def _is_attention(module: Any) -> bool:
    from fastkernels.overrides.attention.attention import PagedAttention

    return isinstance(module, PagedAttention)


@cache
def _ops_by_class() -> dict[Any, str]:
    """{class: op} of the classes with vLLM's and diffusers' signatures, which our models are built from."""
    found: dict[Any, str] = {}
    for name in registry.op_names():
        for target in (t for host in ("vllm", "diffusers") for t in registry.get(name).targets_for(host)):
            found.setdefault(registry.target_class(target), name)
    return found


# In every rank

# Of the runners of this process: the report's lines of what was measured, patches, and the rows of those without one.
_measured: WeakKeyDictionary[Any, dict[str, list[str]]] = WeakKeyDictionary()
_patches: WeakKeyDictionary[Any, Patched] = WeakKeyDictionary()
_unpatched: WeakKeyDictionary[Any, Patched] = WeakKeyDictionary()


def carry_out(runner: Any, request: Request) -> Reply:
    """One request in this rank, its graphs aside. An error is in the reply."""
    patched = _patches.get(runner)
    try:
        if request.action == "patch":
            if patched is not None:
                raise PatchError(f"this engine is patched already: {UNDO_FIRST}")
            _name_blocks(runner, request.candidates)
            patched = _apply(runner, request)
        elif request.action == "undo":
            if patched is None:
                return _reply(runner.rank, [])
            patched.undo()
            del _patches[runner]
        elif request.action == "report":
            patched = patched or _rows_only(runner)
        elif patched is None:
            raise PatchError("this engine is not patched")
        elif request.action == "reset":
            patched.reset()
        return _reply(runner.rank, patched.report())
    except Exception as error:
        return _reply(runner.rank, [], _text(error))


def choose_kernels(runner: Any) -> None:
    """Measure the shapes of the runner's model that no tuned table lists, before its cache and graphs exist."""
    adapter, request = FastKernelsAdapter(runner), Request("patch")
    _measured[runner] = choose.verify(adapter, runner.model, request, runner.device).measured


def _rows_only(runner: Any) -> Patched:
    """The rows of an engine without a patch."""
    if runner not in _unpatched:
        _unpatched[runner] = change(FastKernelsAdapter(runner), runner.model, Request("patch"), runner.rank)
    return _unpatched[runner]


def _apply(runner: Any, request: Request) -> Patched:
    # Our engine has no host code to leave an op to: a disabled op only loses its candidate.
    kept = {op: path for op, path in request.candidates.items() if op not in request.disable}
    request = replace(request, candidates=kept, disable=())

    def begun(patched: Patched) -> None:
        _patches[runner] = patched
        if any(is_block(op) or registry.get(op).level > 2 for op in kept):
            from fastkernels.models.common.layers.decoder import own_sums

            for module, name, value in own_sums(runner.model):
                patched.journal.set_attribute(module, name, value)

    try:
        patched = apply(FastKernelsAdapter(runner), runner.model, request, runner.rank, begun)
        patched.whole = True
    except BaseException:
        if (made := _patches.get(runner)) is not None:
            made.undo()
            del _patches[runner]
        raise
    return patched


def _reply(rank: int, rows: list[dict[str, Any]], error: str | None = None) -> Reply:
    head = {"rank": rank, "pid": os.getpid(), "host": "fastkernels", "version": __version__}
    return {**head, "rows": rows, "error": error, "lasting": lasting()}


def _text(error: Exception) -> str:
    known = isinstance(error, (PatchError, LookupError, ValueError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _name_blocks(runner: Any, names: Iterable[str]) -> None:
    """Let the registry know the blocks of the runner's model, if one of these names is a block's.

    Raises Unsupported for a model without blocks, and UnknownName for a block of another model.
    """
    if named := [name for name in names if is_block(name)]:
        from fastkernels.models.common.plans import block_tasks

        _, own = block_tasks.register_model(runner.hf_config)
        for name in named:
            if name not in own:  # the registry may know it from another engine of this process
                raise registry.UnknownName("block of this model", name, own)


# In the process of the engine


class _CaptureError(PatchError):
    """Graphs of a patched engine cannot be captured. fatal: the engine has ended."""

    def __init__(self, text: str, fatal: bool):
        super().__init__(text)
        self.fatal = fatal


class EnginePatch:
    """A patch of an engine, on all of its ranks; `engine.patched` from before the first change to the undo's end."""

    def __init__(self, engine: Any, request: Request):
        """Put the request's candidates in; `replies` has the errors. Raises PatchError if graphs cannot be captured."""
        self._engine, self._executor, self._changed = engine, engine.executor, bool(request.candidates)
        self.request, self.whole = request, False
        engine.patched = self
        try:
            self._patch()
        except BaseException as error:
            if not getattr(error, "fatal", False):  # a fatal error has ended all ranks
                self.undo()
            engine.patched = None
            raise

    def _patch(self) -> None:
        self.replies: list[Reply] = self._executor.call(carry_out, self.request)
        failed = [reply for reply in self.replies if reply["error"]]
        if failed:
            if len(failed) < len(self.replies):
                self._executor.call(carry_out, Request("undo"))
            self._engine.patched = None
            return
        if self._changed:
            try:
                self._executor.call("capture")
            except Exception as error:
                fatal = getattr(error, "fatal", False)
                raise _CaptureError(f"the patched model cannot be captured: {error}", fatal) from error
        self._engine.reset_prefix_cache()  # keys and values of other code
        self.whole = True

    def meant_by(self, request: Request) -> bool:
        return request.patch in ("", self.request.patch)

    def call(self, request: Request) -> list[Reply]:
        """Carry out 'report' or 'reset'."""
        return self._executor.call(carry_out, request)

    def undo(self) -> list[Reply]:
        """Restore functions and classes, and capture graphs again if anything had changed."""
        self.whole = False
        self._engine.reset_prefix_cache()
        replies = self._executor.call(carry_out, Request("undo"))
        if self._changed:
            self._executor.call("capture")
        self._engine.patched = None
        return replies


class FastKernelsHost:
    """Live: fastkernels.LLM, LLMEngine or AsyncLLM. By name: engines built later read FASTKERNELS_CANDIDATES."""

    name = "fastkernels"

    def __init__(self) -> None:
        self._before: list[str | None] = []

    def version(self) -> str | None:
        return __version__

    def choose_kernels(self, runner: Any) -> None:
        """See `choose_kernels`: for a runner that is being built."""
        choose_kernels(runner)

    def matches(self, target: Any) -> bool:
        kinds = (("llm", "LLM"), ("engines.engine", "Engine"), ("async_llm", "AsyncLLM"))
        loaded = [(sys.modules.get(f"fastkernels.engine.{module}"), name) for module, name in kinds]
        return any(
            module is not None and isinstance(target, getattr(module, name, ())) for module, name in loaded
        )

    def name_blocks(self, target: Any, names: Iterable[str]) -> None:
        """Let this process know the blocks of the engine's model, if one of these names is a block's."""
        if not isinstance(target, str):
            _name_blocks(_engine(target).executor.runner, names)

    def call(self, target: Any, request: Request) -> list[Reply]:
        if isinstance(target, str):
            return [self._by_name(request)]
        engine = _engine(target)
        if hasattr(target, "call"):  # AsyncLLM: its own thread steps the engine
            return target.call(lambda: _call(engine, request)).result()
        return _call(engine, request)

    async def call_async(self, target: Any, request: Request) -> list[Reply]:
        """The same from a running event loop. A cancelled patch is undone."""
        undo = partial(asyncio.to_thread, self.call, target, Request("undo", patch=request.patch))
        replies: list[Reply] = await or_undone(
            asyncio.to_thread(self.call, target, request), undo if request.action == "patch" else None
        )
        return replies

    def _by_name(self, request: Request) -> Reply:
        if request.action == "patch":
            pairs = [f"{op}={os.path.abspath(path)}" for op, path in request.candidates.items()]
            self._before.append(os.environ.get(VARIABLE))
            os.environ[VARIABLE] = ",".join(pairs)
        elif request.action == "undo" and self._before:
            before = self._before.pop()
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before
        return _reply(0, [])


def _engine(target: Any) -> Any:
    for name in ("llm_engine", "engine"):  # LLM, AsyncLLM
        if hasattr(target, name):
            return getattr(target, name)
    return target


def _call(engine: Any, request: Request) -> list[Reply]:
    """One request in the thread of the engine, on all of its ranks. Errors come back in a reply."""
    patched: EnginePatch | None = engine.patched
    try:
        if patched is not None and not patched.whole:
            patched.undo()  # an interrupted patch or undo
            patched = None
        if request.patch and request.action != "patch" and not (patched and patched.meant_by(request)):
            return [_reply(0, [])]
        if request.action == "report":
            return engine.executor.call(carry_out, request)
        if request.action == "undo" and patched is None:
            return [_reply(0, [])]
        if request.action == "patch":
            if patched is not None:
                raise PatchError(f"this engine is patched already: {UNDO_FIRST}")
            if engine.has_unfinished_requests():
                raise PatchError("the engine has requests under way: wait until it is idle")
            return EnginePatch(engine, request).replies
        if patched is None:
            raise PatchError("this engine is not patched")
        return patched.undo() if request.action == "undo" else patched.call(request)
    except Exception as error:
        return [_reply(0, [], _text(error))]


HOST = FastKernelsHost()
