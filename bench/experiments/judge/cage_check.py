"""Find out which steps of the judge's cage CUDA IPC survives on this machine: one JSON line a combination of steps.

    cage_check.py [--out rows.jsonl]

For each combination a caged child opens one of the judge's tensors, writes to it, and shares two of its own: one of the
caching allocator and one of a CUDA graph's private pool. The judge writes new inputs, has the graph replayed, and reads
the result in the child's memory. `raw` is the driver's cuIpc*, `torch` is torch.multiprocessing.reductions. With all
steps on, the child also compiles a Triton kernel and looks for it with CUPTI. Run it as root and as another user.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from fk_bench.kernels.judge.processes.cage import STEPS, CageOptions

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

N = 8 << 20  # 32 MiB of float32: a separate block of the caching allocator
WORKS = "works"


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 64)]


class _View:
    def __init__(self, pointer: int, count: int):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "<f4", "data": (pointer, False), "version": 3, "strides": None,
        }  # fmt: skip


def _driver(name: str, *args: Any) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if code:
        text = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {code} {(text.value or b'').decode()}")


def share_raw(tensor: torch.Tensor) -> dict[str, Any]:
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    pointer = ctypes.c_uint64(tensor.data_ptr())
    _driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
    _driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return {"raw": bytes(handle.data).hex(), "offset": pointer.value - base.value, "count": tensor.numel()}


def open_raw(shared: dict[str, Any]) -> torch.Tensor:
    handle, pointer = _Handle(), ctypes.c_uint64()
    ctypes.memmove(ctypes.byref(handle), bytes.fromhex(shared["raw"]), 64)
    _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(1))
    return torch.as_tensor(_View(pointer.value + shared["offset"], shared["count"]), device="cuda")


def share_torch(tensor: torch.Tensor) -> dict[str, Any]:
    from torch.multiprocessing import reductions

    buffer = BytesIO()
    ForkingPickler(buffer).dump(reductions.reduce_tensor(tensor))
    return {"torch": base64.b64encode(buffer.getvalue()).decode()}


def open_torch(shared: dict[str, Any]) -> torch.Tensor:
    rebuild, args = pickle.loads(
        base64.b64decode(shared["torch"])
    )  # only in this check: the judge never unpickles
    tensor: torch.Tensor = rebuild(*args)
    return tensor


WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "raw": (share_raw, open_raw),
    "torch": (share_torch, open_torch),
}


def tell(channel: socket.socket, **message: Any) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def hear(lines: Any) -> dict[str, Any]:
    line = lines.readline()
    if not line:
        raise EOFError("the channel was closed")
    message: dict[str, Any] = json.loads(line)
    if "error" in message:
        raise RuntimeError(message["error"])
    return message


def main(channel: socket.socket, config: dict[str, Any], fds: dict[str, int]) -> None:
    """The caged child."""
    tell(channel, cage=config["cage"])
    lines = channel.makefile("rb")
    kept = []
    while line := lines.readline():
        request = json.loads(line)
        try:
            if "extra" in request:
                tell(channel, result=EXTRAS[request["extra"]]())
                continue
            share, open_shared = WAYS[request["way"]]
            theirs = open_shared(request["shared"])
            theirs += 1
            own = theirs * 2
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pooled = theirs * 3
            graph.replay()
            torch.cuda.synchronize()
            kept.append((theirs, own, pooled, graph))
            tell(channel, own=share(own), pooled=share(pooled))
            lines.readline()  # the judge has written new inputs
            graph.replay()
            torch.cuda.synchronize()
            tell(channel, replayed=True)
        except Exception as error:
            tell(channel, error=f"{type(error).__name__}: {error}"[:600])


def check(channel: socket.socket, lines: Any, way: str) -> None:
    """Check one way of sharing from the judge's side. Raises an error with the problem."""
    share, open_shared = WAYS[way]
    slot = torch.full((N,), 5.0, device="cuda")
    torch.cuda.synchronize()
    tell(channel, way=way, shared=share(slot))
    reply = hear(lines)
    own, pooled = open_shared(reply["own"]), open_shared(reply["pooled"])
    torch.cuda.synchronize()
    for name, tensor, value in (
        ("written slot", slot, 6.0),
        ("own", own, 12.0),
        ("graph's pool", pooled, 18.0),
    ):
        if not bool((tensor == value).all()):
            raise RuntimeError(f"{name}: expected {value}, got {tensor[:3].tolist()}")
    slot.fill_(7.0)
    torch.cuda.synchronize()
    tell(channel, go=True)
    hear(lines)
    if not bool((pooled == 21.0).all()):
        raise RuntimeError(f"after the replay: expected 21.0, got {pooled[:3].tolist()}")


if triton is not None:

    @triton.jit
    def cage_check_kernel(x, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def extra_triton() -> str:
    x = torch.zeros(1000, device="cuda")
    cage_check_kernel[(1,)](x, 1000, BLOCK=1024)
    return WORKS if x.sum().item() == 1000 else "wrong result"


def extra_cupti() -> str:
    from torch.profiler import ProfilerActivity, profile

    x = torch.zeros(1000, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        cage_check_kernel[(1,)](x, 1000, BLOCK=1024)
        torch.cuda.synchronize()
    names = [e.key for e in seen.key_averages()]
    return WORKS if any("cage_check_kernel" in n for n in names) else f"not seen, only {names}"


EXTRAS = {"triton": extra_triton, "cupti": extra_cupti}


def combinations() -> dict[str, CageOptions]:
    base = CageOptions(
        readable=(__file__,), memory=None, packages=("fastkernels", "fk_bench", "triton"), threads=1
    )
    none = replace(base, **dict.fromkeys(STEPS, False))
    found = {"all": base, "none": none}
    found |= {f"only {step}": replace(none, **{step: True}) for step in STEPS}
    found |= {f"all but {step}": replace(base, **{step: False}) for step in ("pid", "mounts", "ipc", "user")}
    return found


def run(zygote: Any, name: str, options: CageOptions) -> dict[str, Any]:
    start = time.monotonic()
    result: dict[str, Any] = {"combination": name}
    with zygote.spawn({}, options) as child:
        child.channel.settimeout(20.0)
        try:
            lines = child.channel.makefile("rb")
            result["steps"] = hear(lines)["cage"]
            for way in WAYS:
                result[way] = attempt(lambda way=way: check(child.channel, lines, way))
            for extra in EXTRAS if name in ("all", "none") else ():
                tell(child.channel, extra=extra)
                result[extra] = attempt(lambda: hear(lines)["result"])
        except (OSError, EOFError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}; {child.wait(2.0) or 'still running'}"
        if not all(result.get(way) == WORKS for way in WAYS):
            result["output"] = child.output_tail(1500)
    result["seconds"] = round(time.monotonic() - start, 2)
    return result


def attempt(action: Callable[[], Any]) -> str:
    try:
        return action() or WORKS
    except RuntimeError as error:
        return str(error)[:600]


def judge() -> int:
    from fk_bench.core import machine
    from fk_bench.core.rows import Row, Status, append
    from fk_bench.kernels.judge.processes.zygote import Zygote

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        print(json.dumps({"command": "cage_check", "ok": False, "reason": "no CUDA device"}))
        return 1
    torch.zeros(1, device="cuda")
    start, works = time.monotonic(), []
    here, name = str(Path(__file__).resolve().parent), Path(__file__).stem
    with Zygote(entry=f"{name}:main", env={"PYTHONPATH": here}, preload=("torch", "triton", name)) as zygote:
        zygote.start()
        print(json.dumps({"zygote": zygote.info, "seconds": round(time.monotonic() - start, 2)}), flush=True)
        for name, options in combinations().items():
            try:
                result = run(zygote, name, options)
            except Exception:
                result = {"combination": name, "error": traceback.format_exc(limit=-3)}
            print(json.dumps(result), flush=True)
            fine = result.get("raw") == WORKS
            works += [name] if fine else []
            if out:
                status = Status.OK if fine else Status.FAILED
                row = Row(
                    run_id="cage_check", command="cage_check", machine=machine.machine(), status=status,
                    commit=machine.commit(), reason="" if fine else str(result.get("raw") or result.get("error")),
                    case={"kind": "cage", **result}, versions={"torch": torch.__version__},
                )  # fmt: skip
                append(out, [row])
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"command": "cage_check", "ok": "all" in works, "works": works, "seconds": seconds}))
    return 0 if "all" in works else 1


if __name__ == "__main__":
    sys.exit(judge())
