"""Record calls by wrapping every provider of every op; without a recording this costs nothing."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastkernels.capture.calls import describe, digest, is_dynamic, is_sampled, is_value
from fastkernels.capture.keep import SAMPLE, SCHEMA, Calls, Limits, Values, choose, to_json, within
from fastkernels.core import dispatch
from fastkernels.core.dispatch import Op, Provider


class Recording:
    """Recorded calls: their number `calls` and `ops` {name: calls}. `save` writes them and `modules` (Modules.rows)."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.modules: list[dict[str, Any]] = []
        self._ops: dict[str, dict[str, Calls]] = {}
        self._in_graphs = 0
        self._lock = threading.Lock()
        self._random = random.Random(0)

    @property
    def ops(self) -> dict[str, int]:
        return {name: sum(c.count for c in calls.values()) for name, calls in self._ops.items()}

    @property
    def calls(self) -> int:
        return sum(self.ops.values())

    def around(self, op: Op, provider: Provider) -> Provider:
        """Return the provider with every call recorded before it runs."""
        fn, arguments = provider.fn, list(op.overload._schema.arguments)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._see(op.name, arguments, args, kwargs)
            return fn(*args, **kwargs)

        return dataclasses.replace(provider, fn=run)

    def _see(self, op: str, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._in_graphs += 1  # values cannot be read during a capture
            return
        # torch leaves out arguments at the end that have their defaults
        given = [
            args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(arguments)
        ]
        signature = describe(arguments, given)
        tensors: dict[str, torch.Tensor] = {}
        values: list[tuple[str, Any]] = []
        too_large = set()
        floats: dict[str, torch.Tensor] = {}
        for argument, value in zip(arguments, given, strict=True):
            if isinstance(value, torch.Tensor) and is_value(op, argument.name, value):
                if value.numel() * value.element_size() > self.limits.tensor:
                    too_large.add(argument.name)
                    continue
                content = value.detach().cpu().contiguous()
                name = digest(content)
                tensors[name] = content
                values.append((argument.name, name))
            elif is_dynamic(argument):
                values.append((argument.name, value))
            elif self.limits.floats and isinstance(value, torch.Tensor) and is_sampled(value):
                floats[argument.name] = value
        with self._lock:
            calls = self._ops.setdefault(op, {}).setdefault(json.dumps(signature), Calls(signature))
            calls.too_large |= too_large
            if floats:  # each call has values of its own
                values.append((SAMPLE, calls.count))
            limits = self.limits
            calls.add(tuple(values), tensors, limits.values, self._random, floats, limits.floats)

    def to_dict(
        self, meta: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the contents of capture.json and the tensors of values.safetensors, within the limits."""
        chosen = {name: choose(calls, self.limits.signatures) for name, calls in self._ops.items()}
        kept, tensors = within(chosen, self.limits.budget)
        notes = [f"{self._in_graphs} calls of a CUDA graph's capture are left out"] if self._in_graphs else []
        data = {
            "schema": SCHEMA, **(meta or {}), "calls": self.calls, "limits": dataclasses.asdict(self.limits),
            "notes": notes, "ops": {name: self._op(name, chosen[name], kept) for name in sorted(chosen)},
            "modules": self.modules,
        }  # fmt: skip
        return data, tensors

    def _op(self, name: str, chosen: list[Calls], kept: set[tuple[int, Values]]) -> dict[str, Any]:
        count, signatures = self.ops[name], len(self._ops[name])
        rows, missing = [], 0
        for calls in chosen:
            sets = [
                {"count": n, "args": {k: v for k, v in values if k != SAMPLE} | calls.floats.get(values, {})}
                for values, n in calls.seen.items()
                if (id(calls), values) in kept
            ]
            missing += len(calls.seen.keys() - {()}) - len(sets)
            row: dict[str, Any] = {"count": calls.count, "args": calls.args, "values": sets}
            rows.append({**row, "too_large": sorted(calls.too_large)} if calls.too_large else row)
        dropped = {
            "signatures": signatures - len(chosen),
            "calls": count - sum(c.count for c in chosen),
            "value_sets": missing,
        }
        return {"count": count, "signatures": signatures, "dropped": dropped, "calls": rows}

    def save(self, path: str | Path, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the folder `path`: capture.json and values.safetensors. Returns what is in capture.json.

        meta: model, host, host_version, scenario, commit and what else a reader should know (plain JSON).
        """
        from safetensors.torch import save

        data, tensors = self.to_dict(meta)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "values.safetensors").write_bytes(save(dict(sorted(tensors.items()))))
        (folder / "capture.json").write_text(to_json(data))
        return data


_recording: Recording | None = None


@contextmanager
def record(
    budget: int = Limits.budget,
    tensor: int = Limits.tensor,
    signatures: int = Limits.signatures,
    values: int = Limits.values,
    floats: int = Limits.floats,
) -> Iterator[Recording]:
    """Record every call of our ops in this process, in all threads, until the block ends.

        with capture.record_modules() as modules:
            llm = LLM(model)
        with capture.record() as recording:
            llm.generate(prompts)
        recording.modules = modules.rows()
        recording.save("captures/mine", {"model": ..., "host": ..., "scenario": ...})

    Arguments are recorded before the op's body changes them. For float tensors only shape, strides and dtype are kept;
    integers (routing, block tables, slots, lengths) decide the work of a kernel, so their values are kept. With
    `floats` rows of float tensors are kept, too. See Limits for the sizes. Use an eager engine that is built and warm:
    the replay of a CUDA graph runs no body. Raises RuntimeError while another recording runs.
    """
    recording = start(Limits(budget, tensor, signatures, values, floats))
    try:
        yield recording
    finally:
        stop()


def start(limits: Limits | None = None) -> Recording:
    """Start a recording that `stop` ends, for callers that cannot hold a `with` block open."""
    global _recording
    if _recording is not None:
        raise RuntimeError("a recording is already running: stop it first")
    _recording = Recording(limits or Limits())
    dispatch.observe(_recording.around)
    return _recording


def stop() -> Recording:
    """Stop the running recording and return it. Raises RuntimeError if there is none."""
    global _recording
    if _recording is None:
        raise RuntimeError("no recording is running")
    ended, _recording = _recording, None
    dispatch.observe(None)
    return ended
