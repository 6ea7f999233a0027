"""Run every tile set of fused_experts and fused_experts_fp8 interpreted, and a table that names tiles; print JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core import tuning as tuned
from fastkernels.core.spec import Case
from fastkernels.overrides.moe import expert_libraries, grouped_gemm
from fastkernels.overrides.moe import fused_experts as plain
from fastkernels.overrides.moe import fused_experts_fp8 as fp8

SIZES = {"tokens": 21, "experts": 4, "topk": 2, "hidden": 384, "intermediate": 128}
KINDS = {
    "tensor": {"block": 0, "act": 0},
    "channel": {"block": 1, "act": 1},
    "block": {"block": 128, "act": 128},
}


def arguments(kind: str, **more: Any) -> list[Any]:
    spec = plain.SPEC if kind == "plain" else fp8.SPEC
    dims = {**SIZES, **KINDS.get(kind, {}), **more}
    return spec.inputs(Case("c", dims, "float32"), "cpu", torch.Generator().manual_seed(1))


def close(found: torch.Tensor, want: torch.Tensor) -> str | None:
    """Allow for another order of sums, which rarely rounds a value to another float8."""
    error = ((found - want).square().mean() / want.square().mean()).sqrt().item()
    return None if error < 2e-3 else f"relative rms error {error:.3g}"


def right(module: Any, params: dict[str, str], args: list[Any], want: torch.Tensor) -> str | None:
    return close(module._triton(*args, **params), want)


def say(case: str, test: Callable[[], str | None]) -> None:
    try:
        problem = test()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps({"case": case, "problem": problem}), flush=True)


def sets(kind: str) -> None:
    module = plain if kind == "plain" else fp8
    args, few = arguments(kind), arguments(kind, tokens=1, experts=8)
    wants = [module.reference(*a) for a in (args, few)]
    providers = {p.name: p for p in registry.get(module.SPEC.name).op.providers}
    for params in providers["triton"].params:
        for a, want, name in ((args, wants[0], "sorted"), (few, wants[1], "few")):
            say(
                f"{kind} {params['gate_up']} {name}",
                partial(right, module, params, a, want),
            )


def other_tiles() -> str | None:
    found = fp8._triton(*arguments("block"), gate_up="16/64/128/1/4/4/s", down="16/128/64/4/4/3")
    return close(found, fp8.reference(*arguments("block")))


def by_table() -> str | None:
    """Dispatch takes tiles from the tuned table at the sizes that it lists."""
    used = []
    gemm = grouped_gemm.grouped_gemm

    def watched(*args: Any) -> torch.Tensor:
        used.append(str(args[5]))
        return gemm(*args)

    plain.grouped_gemm = fp8.grouped_gemm = watched  # type: ignore[assignment]
    named = {"gate_up": "32/64/128/1/4/4/s", "down": "32/128/64/2/4/3"}
    entries = []
    for kind, module in (("plain", plain), ("tensor", fp8)):
        key = module.SPEC.op.key
        shape = dict(zip(key.shape, key.of(*arguments(kind))[0], strict=True))
        shape["dtype"] = "float32"
        entries.append(
            tuned.Entry(
                module.SPEC.name, shape, {"tokens": 21}, "triton", "vllm", "r", named, 1.1, (1.05, 1.15)
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.json"
        path.write_text(tuned.Table("cpu", {"r": {}}, tuple(entries)).to_json())
        os.environ["FASTKERNELS_TUNED"] = str(path)
        for kind, module in (("plain", plain), ("tensor", fp8)):
            for tokens, tiles in ((21, list(named.values())), (22, None)):
                used.clear()
                args = arguments(kind, tokens=tokens)
                module.SPEC.op(*args)
                if (used == tiles) != (tiles is not None):
                    return f"{kind}, {tokens} tokens: {used}"
    return None


def ids_of_no_expert() -> str | None:
    ids = torch.tensor([[0, -1], [7, 3], [4, 2]], dtype=torch.int64)
    weights, known = expert_libraries.known(torch.rand(3, 2) + 1, ids, 4)
    right = known.tolist() == [[0, 0], [0, 3], [0, 2]] and (weights == 0).tolist() == [
        [False, True], [True, False], [True, False],
    ]  # fmt: skip
    return None if right else f"{known.tolist()} {weights.tolist()}"


def main() -> None:
    for kind in ("plain", *KINDS):
        sets(kind)
    say("other tiles", other_tiles)
    say("ids of no expert", ids_of_no_expert)
    say("by table", by_table)


if __name__ == "__main__":
    sys.exit(main())
