"""The program that is profiled: calls of an op, or steps of a model in our engine.

ncu and nsys run it as `python -m fk_bench.profile.target JSON`: only the calls after the warm-up are between start and
stop of CUDA's profiler, and each op is a range of NVTX. The line of JSON that it prints counts the ops.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import candidate, dispatch, registry
from fastkernels.core.case import Case
from fastkernels.core.dispatch import Op, Provider
from fastkernels.core.spec import OpSpec

WARM_UP = 3
RANGE = "fastkernels/"  # the beginning of the name of an op's range


@dataclass(frozen=True)
class Target:
    """The calls of one case of an op, by a candidate's file or by our own choice; or steps of a model.

    candidates  {op or block: file} with which the model's engine is patched
    repeats     calls or steps that are profiled
    """

    op: str = ""
    case: str = ""
    candidate: str = ""
    model: str = ""
    candidates: Mapping[str, str] = field(default_factory=dict)
    phase: str = "decode"
    batch: int = 1
    context: int = 128
    repeats: int = 5
    device: str = "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def case_of(spec: OpSpec, name: str) -> Case:
    """The named case, or the op's most frequent one of a model. Raises UnknownName."""
    by_name = {c.name: c for c in spec.cases}
    if name:
        if name not in by_name:
            raise registry.UnknownName("case", name, by_name)
        return by_name[name]
    return max((c for c in spec.cases if "model" in c.tags), key=lambda c: c.weight, default=spec.cases[0])


def prepare(target: Target) -> Callable[[], None]:
    """A function that makes one call, or one step, after the warm-up.

    A candidate's code runs in this process. Raises CandidateError, UnknownName, and the engine's errors.
    """
    return _op(target) if target.op else _model(target)


def _op(target: Target) -> Callable[[], None]:
    spec = registry.get(target.op)
    generator = torch.Generator(device=target.device).manual_seed(0)
    args = spec.inputs(case_of(spec, target.case), target.device, generator)
    if target.candidate:
        found = candidate.load(target.op, target.candidate)
        if not candidate.install(found, lambda undo: None):
            raise candidate.CandidateError(f"candidate {target.candidate} offers no function {target.op}")
    call = spec.op.overload
    for _ in range(WARM_UP):
        call(*args)
    return lambda: call(*args)


def _model(target: Target) -> Callable[[], None]:
    from fastkernels import SamplingParams
    from fastkernels.engine.llm import LLM

    has_weights = any(Path(target.model).glob("*.safetensors"))
    total = target.context + target.repeats + WARM_UP + 4
    llm = LLM(
        target.model, device=target.device, enforce_eager=True, async_scheduling=False, enable_prefix_caching=False,
        skip_tokenizer_init=True, load_format="auto" if has_weights else "dummy", max_model_len=total,
        max_num_batched_tokens=max(8192, target.batch * total), max_num_seqs=target.batch,
        num_blocks=target.batch * -(-total // 16) + 8,
    )  # fmt: skip
    if target.candidates:
        import fastkernels

        fastkernels.patch(llm, ops=list(target.candidates), candidates=dict(target.candidates))
    engine, generator = llm.llm_engine, torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=target.repeats + WARM_UP + 3, temperature=0.0, ignore_eos=True)
    number = 0

    def add() -> None:
        nonlocal number
        for _ in range(target.batch):
            ids = torch.randint(10, 100, (target.context,), generator=generator).tolist()
            engine.add_request(str(number), ids, params)
            number += 1

    def prefill() -> None:
        engine.abort_all()
        add()
        engine.step()

    if target.phase == "prefill":
        for _ in range(WARM_UP):
            prefill()
        return prefill
    add()
    for _ in range(1 + WARM_UP):
        engine.step()
    return lambda: engine.step()


@contextmanager
def op_ranges(enter: Callable[[str], None], leave: Callable[[], None]) -> Iterator[Counter[str]]:
    """Make each call of an op a range, also of ops that are called without torch's dispatcher. Counts the calls.

    An op that another op calls is part of that one's range.
    """
    calls: Counter[str] = Counter()
    depth = 0

    def around(op: Op, provider: Provider) -> Provider:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:
                return provider.fn(*args, **kwargs)
            calls[op.name] += 1
            depth = 1
            enter(RANGE + op.name)
            try:
                return provider.fn(*args, **kwargs)
            finally:
                leave()
                depth = 0

        return replace(provider, fn=run)

    dispatch.observe(around)
    try:
        yield calls
    finally:
        dispatch.observe(None)


def op_of(name: str) -> str:
    """The op of a range's name; '' for another name."""
    return name.removeprefix(RANGE) if name.startswith(RANGE) else ""


def main(text: str) -> None:
    """Make the calls between start and stop of CUDA's profiler."""
    target = Target(**json.loads(text))
    call = prepare(target)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    with op_ranges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop) as calls:
        for _ in range(target.repeats):
            call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(json.dumps({"calls": {op: n / target.repeats for op, n in calls.items()}}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
