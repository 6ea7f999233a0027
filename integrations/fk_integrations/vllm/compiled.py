"""Compiled code and CUDA graphs of a vLLM worker: the key of its compile cache, rebuilding after a swap, and undo.

vLLM traces a model once, loads compiled code by the hash of its configuration, and replays CUDA graphs. All three
silently ignore a swapped module until the hash differs, the code is compiled again and the graphs are captured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import fastkernels
from fastkernels.core import tuning
from fastkernels.core.env import Environment
from fastkernels.core.kept_files import add_piece, source_digest
from fastkernels.core.runtime.trial import within
from fastkernels.patch import PatchError, Request
from fastkernels.verify.phases import Seconds, timed
from fk_integrations.core.heap import Heap, frozen_again
from fk_integrations.live.live_class import parts
from fk_integrations.vllm import prompt_sizes
from fk_integrations.vllm.compile_threads import several
from fk_integrations.vllm.kept import Address, Kept, addresses, refusal

T = TypeVar("T")
log = logging.getLogger("fastkernels")
REWARM_S = 1800.0
_ABSENT = object()


class Interrupted(PatchError):
    """Ctrl-C reached a worker in the caller's process; nothing has changed, or the next undo restores the rest."""

    def __init__(self, by: KeyboardInterrupt):
        super().__init__("interrupted by Ctrl-C")
        self.by = by


_KEYS: Counter[str] = Counter()
_STOCK_HASH: list[Callable[[Any], str]] = []


def fingerprint(request: Request) -> str:
    """A hash of all that decides what is compiled: our files, the request, candidates, providers and tuned tables.

    Raises PatchError for a missing package or candidate, OSError for a file that cannot be read.
    """
    env, digest = Environment.read(), hashlib.sha256()
    wanted = Request("", request.ops, request.candidates, request.disable, request.strict).to_json()
    add_piece(digest, "version", fastkernels.__version__.encode())
    add_piece(digest, "request", wanted.encode())
    add_piece(digest, "providers", json.dumps(sorted(env.provider.items())).encode())
    for root in (Path(fastkernels.__file__).parent, Path(__file__).resolve().parents[1]):
        try:
            add_piece(digest, root.name, source_digest(root).encode())
        except ValueError as error:
            raise PatchError(str(error)) from error
    if env.tuned == tuning.NO_TABLE:
        add_piece(digest, "tables", b"none")
    elif env.tuned is not None:
        for path in _tables(Path(env.tuned).expanduser()):
            add_piece(digest, str(path), path.read_bytes())
    for op, file in request.candidates.items():
        path = Path(file).expanduser()
        if not path.is_file():
            raise PatchError(f"candidate for {op}: there is no file {file}")
        add_piece(digest, f"{op}={path}", path.read_bytes())
    return digest.hexdigest()


def swapped(key: str, model: Any) -> str:
    """The key with all modules that run our code, and with the choices that were verified here.

    The modules follow from the chip's tables and from what a layer supports.
    """
    digest = hashlib.sha256(key.encode())
    add_piece(digest, "verified", json.dumps(tuning.choices()).encode())
    for name, module in model.named_modules():
        for part in [module, *parts(module, depth=3)]:
            ours = vars(type(part)).get("fastkernels")
            if ours is not None:
                add_piece(digest, name, f"{ours.__module__}.{ours.__qualname__}".encode())
    return digest.hexdigest()


def _tables(path: Path) -> list[Path]:
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def add_key(key: str) -> None:
    """Mix `key` into VllmConfig.compute_hash, so that compiled code of another patch, or of none, is not loaded.

    It counts until remove_key was called as often: a plan and the workers in one process may share a key.
    """
    from vllm.config import VllmConfig

    if not _STOCK_HASH:
        stock = VllmConfig.compute_hash

        def compute_hash(self: Any) -> str:
            parts = " ".join([stock(self), *sorted(_KEYS)])
            return hashlib.sha256(parts.encode()).hexdigest()[:10]

        _STOCK_HASH.append(stock)
        VllmConfig.compute_hash = compute_hash
    _KEYS[key] += 1


def remove_key(key: str) -> None:
    """Remove `key`, added once; removing the last one restores vLLM's own method."""
    _KEYS[key] -= 1
    if _KEYS[key] <= 0:
        del _KEYS[key]
    if not _KEYS and _STOCK_HASH:
        from vllm.config import VllmConfig

        VllmConfig.compute_hash = _STOCK_HASH.pop()


@dataclass(frozen=True)
class Code:
    """The compiled code of a worker's models, without CUDA graphs.

    models   each compiled module with the attributes that its compile wrapper adds, and names of those to remove
    folders  attributes of the CompilationConfig that name where code is cached
    """

    config: Any
    models: list[tuple[Any, dict[str, Any], set[str]]]
    folders: dict[str, Any]

    @classmethod
    def of(cls, config: Any, models: list[Any]) -> Code:
        names = [name for name in ("cache_dir", "local_cache_dir") if hasattr(config, name)]
        folders = {name: getattr(config, name) for name in names}
        return cls(config, [(m, _own_attributes(m), set()) for m in models], folders)

    def changes(self) -> Code:
        """The part that differs from the code in use, so that `restore` leaves all later changes of a module."""
        found = []
        for model, before, _ in self.models:
            now = _own_attributes(model)
            changed = {name: value for name, value in before.items() if now.get(name, _ABSENT) is not value}
            found.append((model, changed, set(now) - set(before)))
        return replace(self, models=found)

    @property
    def restorable(self) -> bool:
        """Whether all code was compiled ahead of time: it survives torch.compiler.reset(), dynamo's own does not."""
        return all(attributes.get("aot_compiled_fn") is not None for _, attributes, _ in self.models)

    def restore(self) -> None:
        for model, attributes, removed in self.models:
            for key in removed & set(vars(model)):
                del vars(model)[key]
            vars(model).update(attributes)
        for key, value in self.folders.items():
            setattr(self.config, key, value)


class Compiled:
    """The compiled code and CUDA graphs of a worker, kept so that they can be dropped, rebuilt or restored.

    The old graphs stay alive while new ones are captured: a private pool without any graph cannot be captured into.
    """

    def __init__(self, worker: Any):
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper as Wrapper

        self.worker, self.runner = worker, worker.model_runner
        self.seconds: Seconds = {}  # of the phases of `rewarm`
        self.prompts = False  # whether `rewarm` runs prompts; an undo needs none, since kernels stay compiled
        self.config = worker.vllm_config.compilation_config
        self.models = _compiled(worker.get_model(), Wrapper)
        owners = [getattr(self.runner, name, None) for name in ("drafter", "speculator")]
        self.draft = [m for o in owners for m in _compiled(getattr(o, "model", None), Wrapper)]
        self.code = Code.of(self.config, self.models)
        holders = _wrappers(CUDAGraphWrapper, "concrete_cudagraph_entries", worker)
        with contextlib.suppress(ImportError):
            from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

            holders += _wrappers(BreakableCUDAGraphWrapper, "entries", worker)
        owners = [self.runner, getattr(self.runner, "speculator", None)]
        managers = [
            v for o in owners if o is not None for v in vars(o).values() if hasattr(v, "_graphs_captured")
        ]
        holders += [(m, "graphs") for m in managers]
        self.graphs = [(holder, name, getattr(holder, name)) for holder, name in holders]
        self.captured = [(m, m._graphs_captured) for m in managers]
        self.addresses = addresses(worker)

    @property
    def needed(self) -> bool:
        return bool(self.models) or self.has_graphs

    @property
    def has_graphs(self) -> bool:
        return any(graphs for _, _, graphs in self.graphs)

    def refusal(self) -> str | None:
        """Why this worker cannot be rebuilt in a live engine; None: it can."""
        from vllm.config import CompilationMode

        if getattr(CompilationMode, "STOCK_TORCH_COMPILE", None) == self.config.mode:
            return "compilation mode STOCK_TORCH_COMPILE cannot be compiled again in a live engine"
        if type(getattr(self.runner, "model", None)).__name__ == "UBatchWrapper":
            return "micro-batching (DBO) holds CUDA graphs that cannot be captured again in a live engine"
        if self.draft:
            return "the compiled code of a draft model cannot be made again in a live engine"
        if getattr(self.runner, "encoder_cudagraph_manager", None) is not None:
            return "the CUDA graphs of the encoder cannot be captured again in a live engine"
        return None

    def drop(self, code: Code | None = None) -> None:
        """Stop using compiled code and graphs, or use `code`; nothing is freed while this object lives."""
        import torch
        from vllm.compilation.wrapper import reset_compile_wrapper
        from vllm.config import set_current_vllm_config

        for holder, name, _ in self.graphs:
            setattr(holder, name, {})
        for manager, _ in self.captured:
            manager._graphs_captured = False
        if code is not None:
            code.restore()
            return
        if self.models:
            torch.compiler.reset()
        with set_current_vllm_config(self.worker.vllm_config):
            for model in self.models:
                reset_compile_wrapper(model)
                # Only a first compilation marks the dynamic dimensions; this flag would skip it.
                model.compiled = False

    def restore(self) -> None:
        """Restore the old compiled code and graphs."""
        for holder, name, graphs in self.graphs:
            setattr(holder, name, graphs)
        for manager, flag in self.captured:
            manager._graphs_captured = flag
        self.code.changes().restore()

    def kept(self) -> Kept:
        """Return the code and graphs from before the change; without graphs that cannot be used again."""
        code = self.code.changes() if self.code.restorable else None
        reason = "nothing was compiled ahead of time" if code is None else refusal(self.worker)
        if reason is None and not self.addresses <= addresses(self.worker) | _of_model(self.addresses):
            reason = "a workspace or the KV cache has moved"
        if reason is not None:
            log.info("the CUDA graphs from before are not kept, and an undo captures them again: %s", reason)
            return Kept(code)
        return Kept(code, tuple(self.graphs), tuple(self.captured), self.addresses)

    def rewarm(self) -> None:
        """Compile and capture with the current classes. The engine must be idle."""
        import torch

        on_cpu = torch.device(self.worker.device).type == "cpu"
        with torch.random.fork_rng(devices=[] if on_cpu else [self.worker.device]):  # warm-up sets the seed
            if on_cpu:
                with timed(self.seconds, "compile model"):
                    self.runner.warming_up_model()
            else:
                with _capturing(), _serving_state(self.runner):
                    with timed(self.seconds, "compile model"):
                        self.runner._dummy_run(self.runner.max_num_tokens, is_profile=True, skip_eplb=True)
                    with timed(self.seconds, "capture graphs"):
                        self.worker.compile_or_warm_up_model()
                    if self.prompts:
                        with timed(self.seconds, "run prompts"):
                            self.run_prompts()

    def run_prompts(self) -> None:
        """Run the sizes of prompts that are larger than the graphs, so that requests compile nothing."""
        prompt_sizes.run(self.worker)

    def release(self, heap: Heap, kept: bool = False) -> None:
        """Free the old code and graphs, after the new ones exist, unless they are kept elsewhere."""
        import torch

        needed = self.needed
        self.code = Code.of(self.config, [])
        self.graphs, self.captured = [], []
        if kept:
            return
        if needed:
            heap.collect()
        if torch.device(self.worker.device).type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()


def _compiled(model: Any, wrapper: Any) -> list[Any]:
    """The modules that vLLM compiles in a model, which may be None."""
    modules = [] if model is None or not hasattr(model, "modules") else model.modules()
    return [m for m in modules if isinstance(m, wrapper) and not getattr(m, "do_not_compile", True)]


def _of_model(found: frozenset[Address]) -> frozenset[Address]:
    """Those of the model's tensors, which a patch may replace and an undo restores."""
    return frozenset(one for one in found if not one[0].startswith(("KV cache ", "workspace ")))


def _own_attributes(model: Any) -> dict[str, Any]:
    """The attributes that the compile wrapper adds to an nn.Module: all but the module's own tables."""
    tables = ("_parameters", "_buffers", "_modules")
    return {k: v for k, v in vars(model).items() if k not in tables}


def _wrappers(kind: Any, name: str, worker: Any) -> list[tuple[Any, str]]:
    """The graph wrappers of this engine, not of others in the process."""
    return [(w, name) for w in list(kind._all_instances) if w.vllm_config is worker.vllm_config]


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    """Allow capturing and let the workspace grow, as at start-up."""
    import torch
    from vllm.compilation import monitor
    from vllm.v1.worker import workspace

    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    locked = (
        workspace.is_workspace_manager_initialized() and workspace.current_workspace_manager().is_locked()
    )
    allowed = monitor.cudagraph_capturing_enabled
    if locked:
        workspace.unlock_workspace()
    monitor.set_cudagraph_capturing_enabled(True)
    try:
        yield
    finally:
        monitor.set_cudagraph_capturing_enabled(allowed)
        if locked:
            workspace.lock_workspace()


@contextlib.contextmanager
def _serving_state(runner: Any) -> Iterator[None]:
    """Keep the dummy slots of warm-up out of the batch's KV blocks. The V2 runner has dummy tables."""
    if hasattr(runner, "preserve_serving_state"):
        with runner.preserve_serving_state():
            yield
        return
    tables = getattr(getattr(getattr(runner, "input_batch", None), "block_table", None), "block_tables", [])
    saved = [(t.block_table, t.block_table.gpu.clone(), t.block_table.cpu.clone()) for t in tables]
    if tables:
        runner.input_batch.block_table.clear()
    try:
        with contextlib.ExitStack() as stack:
            if not tables:
                with contextlib.suppress(ImportError):
                    from vllm.v1.worker.gpu.eplb_utils import preserve_serving_state

                    stack.enter_context(preserve_serving_state(runner))
            yield
    finally:
        for table, gpu, cpu in saved:
            table.gpu.copy_(gpu)
            table.cpu.copy_(cpu)


def swap(
    worker: Any, change: Callable[[], Callable[[], None] | None], unchanged: Callable[[], bool],
    seconds: Seconds, before: Kept | None = None, keep: bool = True,
) -> Kept | None:  # fmt: skip
    """Run `change` (it returns its own undo, or None), then compile, capture and run one step, in every rank.

    If `unchanged`, asked after the change, is true in every rank, the engine keeps its code and graphs. With `before`,
    kept from an earlier use of the classes after the change, nothing is compiled, and nothing is captured if its graphs
    are there. `seconds` gets the phases after the change. Returns with `keep` what was in use before this change, for a
    change back. If a rank fails, all ranks restore the old classes, code and graphs, and check them by one step. Raises
    PatchError.
    """
    with frozen_again() as heap:
        return _swap(worker, change, unchanged, seconds, before, keep, heap)


def _swap(
    worker: Any, change: Callable[[], Callable[[], None] | None], unchanged: Callable[[], bool],
    seconds: Seconds, before: Kept | None, keep: bool, heap: Heap,
) -> Kept | None:  # fmt: skip
    compiled = Compiled(worker)
    compiled.seconds, compiled.prompts = seconds, keep
    back: list[Callable[[], None] | None] = []

    def first() -> None:
        reason = compiled.refusal() if compiled.needed else None
        if reason is not None:
            raise PatchError(f"{reason}; patch before construction: fastkernels.patch('vllm')")
        back.append(change())

    def second() -> None:
        if compiled.needed:
            compiled.drop(None if before is None else before.code)
            if before is not None and whole:
                before.restore_graphs()
            else:
                ranks = worker.vllm_config.parallel_config.world_size
                with several(ranks), within(REWARM_S, "compiling and capturing the changed model"):
                    compiled.rewarm()
        elif compiled.prompts and prompt_sizes.compiles_kernels(worker):
            limit = within(REWARM_S, "running prompts")
            with timed(seconds, "run prompts"), limit, _serving_state(compiled.runner):
                compiled.run_prompts()
        with timed(seconds, "trial step"), within(Environment.read().trial_s, "the trial step"):
            worker.execute_dummy_batch()
            synchronize(worker)

    try:
        together(worker, first)
    except PatchError:
        for undo in back:
            if undo is not None:
                undo()
        raise
    if all(_gather(unchanged())):
        return None
    whole = all(_gather(before is not None and before.whole(worker)))
    try:
        together(worker, second)
    except PatchError as error:
        undo = back[0]
        if undo is not None:
            undo()
        _put_back(worker, compiled, error, same=undo is not None)
        raise
    kept = compiled.kept() if keep and compiled.needed else None
    with timed(seconds, "free memory"):
        compiled.release(heap, kept is not None and kept.addresses is not None)
    return kept


def _put_back(worker: Any, compiled: Compiled, error: PatchError, same: bool) -> None:
    """Recover from a failure: restore the old code if the classes are the `same` as before, else compile again."""
    try:
        if compiled.needed and same and compiled.code.restorable:
            compiled.restore()
        elif compiled.needed:
            compiled.drop()
            compiled.rewarm()
        worker.execute_dummy_batch()
        synchronize(worker)
    except Exception as broken:
        raise PatchError(
            f"{error}. The engine could not be put back and must be restarted: {broken}"
        ) from broken


def synchronize(worker: Any) -> None:
    """Wait for all work on the worker's device."""
    import torch

    if torch.device(worker.device).type != "cpu":
        torch.accelerator.synchronize()


def together(worker: Any, step: Callable[[], None]) -> None:
    """Run `step` in this rank; raise PatchError in every rank if one failed, so that no rank waits for another."""
    mine: str | None = None
    interrupt: KeyboardInterrupt | None = None
    try:
        step()
    except PatchError as error:
        mine = str(error)
    except KeyboardInterrupt as error:
        mine, interrupt = "interrupted by Ctrl-C", error
    except (Exception, SystemExit) as error:  # a candidate may call sys.exit()
        log.exception("fastkernels: rank %s failed", worker.rank)
        mine = f"{type(error).__name__}: {error}"
    failed = [e for e in _gather(mine) if e is not None]
    if interrupt is not None:
        raise Interrupted(interrupt)
    if mine is not None:
        raise PatchError(mine)
    if failed:
        raise PatchError(f"undone here, because another rank failed: {failed[0]}")


def _gather(value: T) -> list[T]:
    import torch.distributed
    from vllm.distributed import parallel_state

    if not torch.distributed.is_initialized():
        return [value]
    group = parallel_state.get_world_group()
    if group.world_size == 1:
        return [value]

    everyone = [value] * group.world_size
    torch.distributed.all_gather_object(everyone, value, group=group.cpu_group)
    return everyone
