"""`fk-bench describe MODEL`: the plan of a model: modules, sizes, costs of a token, and what patch() would replace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any

import typer

from fastkernels.core import registry
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans.plan import SIZES, Item, Plan, plan
from fk_bench.core.hub import ModelError
from fk_bench.core.terminal.output import fail, last_line, table
from fk_bench.e2e.model_configs import load_config
from fk_bench.kernels.judge.clock import roofline

GPU = "NVIDIA H200"


def grouped(items: tuple[Item, ...]) -> Iterator[tuple[str, Item, int]]:
    """(path, item, count): modules of several layers with the same sizes once, their path with a range of layers."""
    found: dict[Any, list[tuple[int, Item]]] = {}
    for item in items:
        layer = re.search(r"\.layers\.(\d+)\.", item.path)
        key = (
            re.sub(r"\.\d+\.", ".*.", item.path, count=1), item.op, str(item.arguments), str(item.shapes), item.layout,
        )  # fmt: skip
        found.setdefault(key, []).append((int(layer[1]) if layer else -1, item))
    for same in found.values():
        path = same[0][1].path
        if same[0][0] >= 0:
            path = re.sub(r"\.layers\.\d+\.", f".layers.{_ranges([n for n, _ in same])}.", path)
        yield path, same[0][1], len(same)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '{0-2,5}'; a single number as itself."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        chain = [n for _, n in run]
        parts.append(str(chain[0]) if len(chain) == 1 else f"{chain[0]}-{chain[-1]}")
    return parts[0] if len(numbers) == 1 else "{" + ",".join(parts) + "}"


def costs(made: Plan, context: int, gpu: str) -> dict[str, Any]:
    """Bytes and operations of a token at this context, and the floor of a decode step on the GPU."""
    moved = made.read_bytes + made.kv_bytes(context) + 2 * made.state_bytes  # states are read and written
    peaks = roofline.peaks(gpu)
    floor = roofline.floor_us(moved, made.flops(1, context), made.dtype, peaks)
    return {
        "parameters": made.parameters,
        "weight_bytes": made.weight_bytes,
        "read_bytes_per_token": made.read_bytes,
        "kv_bytes_per_token": made.kv_bytes_per_token,
        "state_bytes": made.state_bytes,
        "decode_flops": made.flops(1, context),
        "prefill_flops_per_token": made.flops(context, context) // context,
        "decode_bytes": moved,
        "decode_floor_us": floor,
        "gpu": gpu,
        "context": context,
    }


def patched(made: Plan) -> dict[str, list[str]]:
    """{host: ops of this model that fastkernels.patch() considers there by default}."""
    hosts: dict[str, list[str]] = {}
    for op in made.ops():
        for host in sorted({t.host for t in registry.get(op).targets if t.default}):
            hosts.setdefault(host, []).append(op)
    return hosts


def describe_command(
    model: Annotated[
        str, typer.Argument(help="folder of a checkpoint, hub id, or a name of `fk-bench list models`")
    ],
    context: Annotated[int, typer.Option(help="tokens of a sequence, for the costs of attention")] = 2048,
    gpu: Annotated[str, typer.Option(help="device whose peaks give the floor of a step")] = GPU,
    dtype: Annotated[
        str, typer.Option(help=f"of the weights: {', '.join(SIZES)}; by default the config's")
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="one line per module, for diff")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="only the line of JSON")] = False,
) -> None:
    """Print the plan of a model: neither weights nor a GPU are needed."""
    if context < 1:
        fail(f"--context {context}: a sequence has at least 1 token")
    if dtype and dtype not in SIZES:
        fail(f"--dtype {dtype!r} is not one of {', '.join(SIZES)}")
    if roofline.peaks(gpu) is None:
        fail(f"--gpu {gpu!r}: unknown peaks; known GPUs: {', '.join(roofline.known())}")
    try:
        name, config = load_config(model, quantized=True)
        made = plan(config, dtype)
    except (ModelError, Unsupported, registry.UnknownName, ValueError) as error:
        fail(str(error))
    if plain:
        print(made)
        return
    rows = [
        (path, item.op, "; ".join(f"{k}={v}" for k, v in item.arguments.items()),
         " ".join(f"{k} {list(v)}" for k, v in item.shapes.items()), item.layout, count)
        for path, item, count in grouped(made.items)
    ]  # fmt: skip
    columns = ("module", "op", "arguments", "parameters", "shared by", "count")
    cost, hosts = costs(made, context, gpu), patched(made)
    if not json_only:
        table(f"{name}: {made.architecture}, {made.dtype}", columns, rows)
        table("costs", ("of one token", ""), _readable(cost))
        table("fastkernels.patch()", ("host", "ops that it considers by default"), sorted(hosts.items()))
    last_line({"command": "describe", "ok": True, "model": name, "architecture": made.architecture,
               "dtype": made.dtype, "modules": len(made.items), **cost, "patched": hosts})  # fmt: skip


def _readable(cost: dict[str, Any]) -> list[tuple[str, str]]:
    floor = cost["decode_floor_us"]
    return [
        ("parameters", f"{cost['parameters'] / 1e9:.3f} billion, {cost['weight_bytes'] / 2**30:.2f} GiB"),
        ("read by a decode step", f"{cost['read_bytes_per_token'] / 2**30:.2f} GiB of weights"),
        ("KV cache", f"{cost['kv_bytes_per_token'] / 1024:.1f} KiB per token"),
        (f"decode at {cost['context']} tokens", f"{cost['decode_flops'] / 1e9:.2f} GFLOP, at least {floor:.0f} us"
         f" on {cost['gpu']}"),
        (f"prefill of {cost['context']} tokens", f"{cost['prefill_flops_per_token'] / 1e9:.2f} GFLOP per token"),
    ]  # fmt: skip
