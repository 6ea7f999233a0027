"""The runner: the process of one side, which imports the candidate (or the baseline) and calls it on command.

The judge believes nothing that comes from here: this process has no oracle, no expected output and no clock of record.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from fastkernels.core import settings
from fastkernels.core.candidate import CHANGES
from fastkernels.core.dispatch import OPS
from fk_bench.kernels.judge.memory import ipc, layout, producer
from fk_bench.kernels.judge.memory.gate import CallGate
from fk_bench.kernels.judge.processes.answers import (
    Failure,
    describe_error,
    name_of,
    overlap,
    span,
    status_of,
)
from fk_bench.kernels.judge.processes.implementation import Implementation
from fk_bench.kernels.judge.processes.protocol import Channel, ChannelClosed

# Bound before any candidate is imported; a candidate that patches torch only affects its own calls.
ESTIMATES = 20  # replays
# Up to so many slots are called eagerly or compiled; their arguments then have separate storages
APART = 32
OWN_BYTES = 64 << 20  # least bytes of slots that a trusted side allocates
_clock, _synchronize = time.perf_counter, torch.cuda.synchronize
_Tensor, _copy = torch.Tensor, torch.Tensor.copy_


def main(channel: Channel, fds: dict[str, int], hello: dict[str, Any]) -> None:
    """Answer the judge's commands until it closes the channel."""
    channel.send({"hello": hello})
    runner = RunnerState(channel, fds)
    with contextlib.suppress(ChannelClosed):
        while (message := channel.receive())["do"] != "bye":
            nonce = message.pop("nonce")
            try:
                answer = getattr(runner, f"do_{message.pop('do')}")(**message)
            except Failure as error:
                answer = {"error": error.status, "reason": str(error), "context_lost": runner.context_lost()}
            except BaseException as error:  # includes a candidate's SystemExit
                answer = {
                    "error": status_of(error), "reason": describe_error(error), "context_lost": runner.context_lost(),
                }  # fmt: skip
            channel.send({**answer, "nonce": nonce})


class RunnerState(Implementation):
    """The state of one side: its implementation, and the slots of the current case."""

    def __init__(self, channel: Channel, fds: dict[str, int]):
        super().__init__()
        self.channel, self.fds = channel, fds
        self.settings: dict[str, Any] = {}  # of torch, before a candidate was imported
        self.arena: ipc.Memory | None = None  # GPU: what is mapped of the judge's memory
        self.own: torch.Tensor | None = None  # GPU: slots in memory of this process, kept for later cases
        self.gate = CallGate(fds["gate"]) if "gate" in fds else None
        self.free()

    # -- ranks

    def do_store(self) -> dict[str, Any]:
        """Open the store at which the ranks of this side meet; it lives as long as this process."""
        import torch.distributed as dist

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return {"port": self.store.port}

    def do_join(self, rank: int, size: int, port: int, device: str, late_s: float) -> dict[str, Any]:
        """Join the group of this side's ranks. late_s: seconds that a rank may be late in a collective."""
        import torch.distributed as dist

        from fastkernels.core import multicast, parallel

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a cage cannot resolve its host's name
        multicast.turn_off()
        limit = timedelta(seconds=late_s)
        if device == "cuda":
            torch.cuda.set_device(rank)
        where = f"cuda:{rank}" if device == "cuda" else device
        backend, now = "gloo", dict[str, Any]()
        if device == "cuda":  # connected now, because the first collective may be captured
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            # A rank that waits in vain only leaves its call, so that the judge sees which rank did not answer.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
            backend, now = "nccl", {"device_id": torch.device(where)}
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, **now)
        parallel.init(rank, size, device=where, timeout=late_s, memory=self.fds["group"])
        return {}

    # -- what to run

    def do_load(
        self,
        op: str,
        device: str,
        candidates: dict[str, str],
        against: str | None,
        cls: str | None,
        threads: int,
        choice: tuple[str, dict[str, Any]] | None = None,
        model: str = "",
    ) -> dict[str, Any]:
        """Import the op, and the candidates or (against) the baselines.

        cls     the class whose module is called; None: the op's function
        model   text of the model whose blocks are known; see models.common.plans.block_tasks
        choice  (provider, parameters): use only this provider of ours
        """
        start = _clock()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        if device == "cuda":
            self.channel.spin_s = 0.05
            torch.zeros(1, device="cuda")  # creates the context, which calls of the driver need
        self.free()
        self.settings = settings.now() if candidates else {}
        self.load_implementation(op, device, candidates, against, cls, choice, model)
        return {
            "import_s": _clock() - start, "baselines": list(self.baselines),
            "compilers": [n for n, b in self.baselines.items() if b is not None and b.kind == "compiler"],
            "production": self.production, "missing": {n: list(names) for n, names in self.missing.items()},
        }  # fmt: skip

    def do_use(self, baseline: str) -> dict[str, Any]:
        """Use this baseline from now on; reports why if it does not support the current case."""
        before = self.building
        answer = self.use(baseline, self.args[0] if self.args else None)
        if self.building is not before:  # another module is called
            self._make_calls()
        return answer

    # -- a case

    def do_case(
        self, plan: dict[str, Any], cells: list[int], arena: dict[str, Any], outs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Map this side's memory and build the call of every slot; none of this is timed.

        cells  the place of each slot in the arena, which has arena['cells'] places; arena['theirs']: it is allocated
               here, and the reply says where
        """
        self.free()
        self.plan = plan
        self.memory = memory = self._map(arena)
        slots, size = len(cells), arena["cells"]
        self.out_metas = outs
        self.args = [layout.bind(plan, memory, cell, size, slots <= APART) for cell in cells]
        self._make_calls()
        out_start = arena["outputs"]
        out_bytes = sum(o["nbytes"] for o in outs)
        self.out_slots = []
        for s in range(arena["out_slots"]):
            offset, views = out_start + s * out_bytes, []
            for o in outs:
                raw = memory[offset:][: o["bytes"]].view(getattr(torch, o["dtype"]))
                views.append(raw.view(o["shape"]))
                offset += o["nbytes"]
            self.out_slots.append(views)
        return {"memory": {**ipc.share(memory), "stride": [1]}} if arena.get("theirs") else {}

    def _make_calls(self) -> None:
        self.calls = [self._call(a) for a in self.args]
        self.direct = [self._direct(call, a) for call, a in zip(self.calls, self.args, strict=True)]

    def free(self) -> None:
        """Forget the last case."""
        self.args, self.calls, self.direct, self.out_slots = [], [], [], []
        self.graphs: list[Any] = []
        self.kept: list[list[torch.Tensor]] = []
        self.held: dict[int, list[torch.Tensor]] = {}
        for fn in self.prepared:
            fn.clear()
        if self.arena is not None:
            with contextlib.suppress(RuntimeError):  # after a fault of a kernel nothing can be unmapped
                self.arena.close()
            self.arena = None
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def do_free(self) -> dict[str, Any]:
        self.free()
        return {}

    def _map(self, arena: dict[str, Any]) -> torch.Tensor:
        if arena.get("theirs"):
            # Peers keep what a host's kernel has mapped, so it is allocated anew for a much larger case only.
            if self.own is None or self.own.nbytes < arena["nbytes"]:
                self.own = None
                size = 1 << max(arena["nbytes"] - 1, OWN_BYTES - 1).bit_length()
                self.own = torch.empty(size, dtype=torch.uint8, device="cuda")
            return self.own[: arena["nbytes"]]
        if self.device == "cuda":
            self.arena = ipc.Memory(arena["nbytes"], self.channel.fds.pop())
            return self.arena.bytes
        return torch.frombuffer(mmap.mmap(self.fds["arena"], arena["nbytes"]), dtype=torch.uint8)

    def _call(self, args: list[Any]) -> Callable[[], Any]:
        if self.building is not None:
            made: Callable[[], Any] = self.building(args)
            return made
        if self.cls is not None:
            if self.spec.build is None:
                raise Failure("unsupported", f"{self.spec.name}: its modules cannot be built from a case yet")
            noted: list[Any] = []
            call = self.spec.build(_noted(self.cls, noted), args)
            for module in noted:
                module.prepare()
            return call
        op = self.overload
        return lambda: op(*args)

    def _direct(self, call: Callable[[], Any], args: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The function of a timed call on a CPU and its arguments: an installed one without torch's dispatcher.

        So neither side has Python of ours in its time, and a candidate gains nothing by going around it.
        """
        op = self.spec.op
        if self.cls is not None or op is None:
            return call, []
        if op.candidate is not None and op.candidate.supports is None:
            return op.candidate.fn, args
        return (op.run, args) if args and isinstance(args[0], torch.Tensor) else (call, [])

    def _outputs(self, result: Any) -> list[torch.Tensor]:
        values = [v for v in _listed(result) if v is not None]
        for v in values:
            if type(v) is not _Tensor:
                raise Failure(
                    "signature_mismatch", f"an output is {type(v).__name__}, not a plain torch.Tensor"
                )
            if v.layout is not torch.strided or v.is_neg() or v.is_conj():  # its memory is not the result
                kind = (
                    f"has layout {v.layout}"
                    if v.layout is not torch.strided
                    else "is negated or conjugated lazily"
                )
                raise Failure(
                    "signature_mismatch", f"an output {kind}: return a dense tensor that holds its values"
                )
        return values

    def do_call(self, slot: int, out: int) -> dict[str, Any]:
        """Make one eager call into an output slot. Counters show which ops ran."""
        before = {name: op.calls for name, op in OPS.items()}
        refused_before = {name: dict(op.fallbacks) for name, op in OPS.items()}
        with self.preparing(), self.placed() as parts:
            result = self._outputs(self.calls[slot]())
        self._sync()
        self.unchanged()
        self.metas(result)
        self.held[out] = result
        self.do_copy(out)
        live = {
            n: op.calls - before.get(n, 0) for n, op in OPS.items() if op.calls > before.get(n, 0)
        } | parts
        inputs = layout.tensors(self.args[slot])
        aliases = [i for i, r in enumerate(result) if r.numel() and any(overlap(r, t) for t in inputs)]
        refused = {
            name: reason for name, op in OPS.items() for reason, times in op.fallbacks.items()
            if times > refused_before.get(name, {}).get(reason, 0)
        }  # fmt: skip
        return {"aliases": aliases, "live": live, "refused": refused}

    def do_copy(self, out: int) -> dict[str, Any]:
        """Copy the results of the call into an output slot (once more, to check that nothing has changed them)."""
        for view, value in zip(self.out_slots[out], self._outputs(self.held[out]), strict=False):
            _copy(view, value)
        self._sync()
        return {}

    def unchanged(self) -> None:
        """Raises Failure if a candidate has left a setting of torch changed."""
        if self.settings and (left := settings.changed(self.settings)):
            raise Failure("runtime_error", f"a call {CHANGES.format(left)}")

    def metas(self, result: list[torch.Tensor]) -> None:
        """Raises Failure unless the outputs have the op's number, shapes and dtypes, and a candidate's its strides."""
        if len(result) != len(self.out_metas):
            raise Failure("signature_mismatch", f"{len(result)} outputs instead of {len(self.out_metas)}")
        for i, (r, o) in enumerate(zip(result, self.out_metas, strict=True)):
            if list(r.shape) != o["shape"] or name_of(r.dtype) != o["dtype"] or r.device.type != self.device:
                raise Failure(
                    "signature_mismatch",
                    f"output {i} is {name_of(r.dtype)} {list(r.shape)} on {r.device.type}, "
                    f"the op's is {o['dtype']} {o['shape']} on {self.device}",
                )
            if self.is_candidate and o["contiguous"] and not r.is_contiguous():
                raise Failure(
                    "signature_mismatch",
                    f"output {i} has the strides {list(r.stride())} for {o['shape']}, and the op's is contiguous: hosts"
                    " call view() on it, and compiled code relies on it",
                )

    def do_estimate(self, calls: int) -> dict[str, Any]:
        """Estimate the seconds of a call. The judge derives the size of its batches from them."""
        picked = self.calls[:calls]
        for call in picked if self.prepared else picked[:2]:
            call()
        self._sync()
        if self.device == "cuda":
            graph, _ = self._capture(picked)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for i in range(ESTIMATES + 1):
                if i == 1:
                    begin.record()
                graph.replay()
            end.record()
            self._sync()
            return {"seconds": begin.elapsed_time(end) / 1e3 / ESTIMATES / len(picked)}
        start = _clock()
        for call in picked:
            call()
        return {"seconds": (_clock() - start) / len(picked)}

    # -- timed batches

    def do_prepare(self, start: int, count: int) -> dict[str, Any]:
        """Prepare the weights of these slots as a host does at load, by a call of each; nothing for other baselines."""
        if self.prepared:
            with self.preparing():
                for call in self.calls[start : start + count]:
                    call()
            self._sync()
        return {}

    def do_capture(self, segments: list[list[int]], alone: int) -> dict[str, Any]:
        """GPU: capture a graph of the calls of each segment [start, end). Returns the places of all outputs.

        The graphs are small because launching a large one takes time before anything runs. From slot `alone` on, each
        has one call, behind a producer.
        """
        self.graphs, self.kept = [], []
        for start, end in segments:
            before = self._producer(start) if start >= alone else None
            graph, results = self._capture(self.calls[start:end], before)
            self.graphs.append((start, graph))
            self.kept += results
        self.unchanged()
        return {"outputs": [[self._shared(r) for r in result] for result in self.kept]}

    def _shared(self, t: torch.Tensor) -> dict[str, Any]:
        """The place of an output: in the judge's memory (a written argument), or in this process's own."""
        strides = list(t.stride())
        if not t.numel():
            return {"nbytes": 0, "stride": strides}
        at = t.data_ptr() - self.memory.data_ptr()
        reach = span(t)
        if 0 <= at < self.memory.nbytes:
            return {"arena": at, "nbytes": reach, "stride": strides}
        return {**ipc.share(t), "nbytes": reach, "stride": strides}

    def _producer(self, slot: int) -> Callable[[], None] | None:
        """Return what launches the kernel that makes a part of this slot's input, if it has an input of floats."""
        assert self.gate is not None
        values = producer.region(self.plan, self.args[slot])
        return None if values is None else producer.launcher(values, self.gate.turned)

    def _capture(
        self, calls: list[Callable[[], Any]], before: Callable[[], None] | None = None
    ) -> tuple[Any, list[list[torch.Tensor]]]:
        graph = torch.cuda.CUDAGraph()
        self._sync()
        try:
            # The outer context restores the stream even if the capture fails; torch's graph() does not.
            with self.around(), torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                if before is not None:
                    before()
                results = [self._outputs(call()) for call in calls]
        except Failure:
            raise
        except Exception as error:
            status = status_of(error)
            raise Failure(
                "compile_error" if status == "runtime_error" else status,
                f"cannot be captured in a CUDA graph: {describe_error(error)}",
            ) from None
        for result in results:
            self.metas(result)
        return graph, results

    def do_run(self, start: int, count: int) -> dict[str, Any]:
        """GPU: replay the graphs of the slots from `start` to `start + count`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for first, graph in self.graphs:
            if start <= first < start + count:
                graph.replay()
        end.record()
        _synchronize()
        return {"events_s": begin.elapsed_time(end) / 1e3}

    def do_calls(self, slots: list[int], tickets: list[int]) -> dict[str, Any]:
        """CPU: call these slots in order, each once the judge has opened its gate; -1 stands for no call.

        The first ticket only reports that the command was read. Between gate and report nothing runs but the
        implementation and the copy of its results; all results are held, because the judge may have any copied again.
        """
        assert self.gate is not None
        words = self.gate.words()
        self.held = {}
        words[1] = tickets[0]
        for slot, ticket in zip(slots, tickets[1:], strict=True):
            if slot < 0:
                while words[0] < ticket:
                    pass
                words[1] = ticket
                continue
            call, args = self.direct[slot]
            views = self.out_slots[slot]
            while words[0] < ticket:
                pass
            result = call(*args)
            if views:
                for view, value in zip(
                    views, result if isinstance(result, (tuple, list)) else (result,), strict=False
                ):
                    if value is not None:
                        _copy(view, value)
            words[1] = ticket
            self.held[slot] = [v for v in _listed(result) if v is not None]
        self.unchanged()
        for result in self.held.values():
            self.metas(result)
        return {}

    def do_queue(
        self, slots: list[int], tickets: list[int], counts: list[int] | None = None
    ) -> dict[str, Any]:
        """GPU: queue the graphs of slots, each behind its gate, which the judge opens while this process is stopped.

        counts  calls behind each gate, from its slot on; None: one
        """
        assert self.gate is not None
        stream = torch.cuda.current_stream().cuda_stream
        for slot, count, ticket in zip(slots, counts or [1] * len(slots), tickets, strict=True):
            self.gate.wait(stream, ticket)
            for first, graph in self.graphs:
                if slot <= first < slot + count:
                    graph.replay()
            self.gate.report(stream, ticket)
        return {}

    def do_trace(self, calls: int) -> dict[str, Any]:
        """GPU: trace a replay of `calls` calls with CUPTI: {call_s: time in which any kernel ran, kernels}."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        graph, _ = self._capture(self.calls[:calls])
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as prof:
                graph.replay()
                _synchronize()
            events = [e for e in prof.events() if e.device_type == DeviceType.CUDA]
        except RuntimeError as error:
            return {"trace": describe_error(error)}
        spans = sorted((e.time_range.start, e.time_range.end) for e in events)
        busy, reached = 0.0, float("-inf")
        for start, end in spans:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        names = dict.fromkeys(e.name[:120] for e in events)
        return {"call_s": 1e-6 * busy / calls, "launches": len(events) / calls, "kernels": list(names)[:12]}

    def do_compiled(self, slot: int, out: int) -> dict[str, Any]:
        """Make the call under torch.compile(fullgraph=True), into an output slot."""
        torch.compiler.reset()  # this process serves many ops, and recompilations of one function are limited
        if self.cls is None:
            op, args = self.overload, self.args[slot]
            result = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*args)
        else:
            result = torch.compile(self.calls[slot], fullgraph=True, backend="aot_eager")()
        result = self._outputs(result)
        self.metas(result)
        for view, value in zip(self.out_slots[out], result, strict=True):
            _copy(view, value)
        self._sync()
        return {}

    def do_deployment(self) -> dict[str, Any]:
        """Whether the candidate's own kernel runs in compiled code, and what new batch sizes compile."""
        from fk_bench.kernels.judge.processes.deployment import problems

        self.free()
        if self.offered is None:
            raise Failure("signature_mismatch", f"{self.spec.name}: the file offers no function")
        found = problems(self.spec, self.offered, self.device)
        self._sync()
        return found

    def context_lost(self) -> bool:
        """Whether the GPU's context is unusable: after a fault in a kernel every later CUDA call fails."""
        if self.device == "cuda":
            try:
                _synchronize()
            except RuntimeError:
                return True
        return False

    def _sync(self) -> None:
        if self.device == "cuda":
            _synchronize()


def _noted(cls: type, made: list[Any]) -> type:
    """The class, whose new instances are noted in `made` if it prepares what it derives from its weights."""
    if not callable(getattr(cls, "prepare", None)):
        return cls

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
        made.append(self)

    init.__wrapped__ = cls.__init__  # type: ignore[attr-defined,misc]
    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
