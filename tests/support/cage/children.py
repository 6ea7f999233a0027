"""Caged children of tests: spawn one, read its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fk_bench.kernels.judge.cage.cage import STEPS, CageOptions
from fk_bench.kernels.judge.processes import forkserver
from fk_bench.kernels.judge.processes.zygote import Child, Exit, Zygote

SUPPORT = Path(__file__).parent
OPTIONS = CageOptions(readable=(str(SUPPORT / "caged.py"),))
CAP_SYS_ADMIN = 21
OPEN: dict[str, Any] = dict.fromkeys(STEPS, False)


def needs(steps: dict[str, str], *names: str) -> None:
    """Skip steps that this machine does not support; root with all capabilities must support all."""
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    for name in names:
        if steps[name] != "on":
            assert not capabilities >> CAP_SYS_ADMIN & 1, f"root, and the cage has no {name}: {steps[name]}"
            pytest.skip(f"{name} {steps[name]}")


def hear(child: Child, timeout: float = 60.0) -> list[Any]:
    """All lines of the child and its descendants, until the last process that holds the channel ends."""
    child.channel.settimeout(timeout)
    data = b""
    while part := child.channel.recv(1 << 16):
        data += part
    return [json.loads(line) for line in data.splitlines()]


def run(zygote: Zygote, code: str, options: CageOptions = OPTIONS, **config: Any) -> tuple[list[Any], Exit]:
    with zygote.spawn({"code": code, **config}, options) as child:
        said, end = hear(child), child.wait(60.0)
        assert end is not None
        assert said or end.code != forkserver.FAILED, child.output_tail()
        return said, end
