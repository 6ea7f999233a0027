"""Python processes that need no seconds to import torch and Triton: forks of one process that has imported both.

`run` takes a command as subprocess.run does. As a script: that process; it reads requests from standard input.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType

IMPORTED = "TRITON_INTERPRET"  # decides at Triton's import, so that each value has a process of its own


def run(
    command: Sequence[object],
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT ...`, `python -c CODE ...` or `python -m MODULE ...`, given without `python`.

    Its text is captured.
    """
    arguments = [str(word) for word in command]
    variables = dict(os.environ if env is None else env)
    server = _server(variables.get(IMPORTED, "0"))
    assert server.stdin is not None and server.stdout is not None
    with TemporaryDirectory() as folder:
        files = [f"{folder}/out", f"{folder}/err"]
        request = {"arguments": arguments, "env": variables, "cwd": str(cwd or Path.cwd()), "files": files}
        server.stdin.write(json.dumps({**request, "timeout": timeout}) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        out, err = (Path(file).read_text(errors="replace") for file in files)
    if status is None:
        raise subprocess.TimeoutExpired(arguments, timeout, out, err)
    return subprocess.CompletedProcess(arguments, status, out, err)


@cache
def _server(interpreted: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, IMPORTED: interpreted},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    atexit.register(server.stdin.close)  # which ends it
    return server


def _child(arguments: list[str], env: dict[str, str], cwd: str, files: list[str]) -> None:
    """The forked process: it becomes what the command would have started."""
    os.setsid()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    status = 0
    try:
        if arguments[0] == "-c":
            sys.argv, sys.modules["__main__"] = ["-c", *arguments[2:]], ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _quicken() -> None:
    """Halve the interpreter's time.

    At each call of a device function it replaces Triton's language again, and for each tensor it makes a type, and a
    shape with a type of its own.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    whole, of_scalar = interpreter._patch_lang, cache(interpreter._get_np_dtype)

    def patch(fn: FunctionType) -> object:
        used = [module for module in fn.__globals__.values() if module is tl or module is tl.core]
        replaced = used and not any(tl.core.is_builtin(module.load) for module in used)
        return interpreter._LangPatchScope() if replaced else whole(fn)

    interpreter._patch_lang = patch
    interpreter._get_np_dtype = lambda kind: of_scalar(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)

    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[tuple[object, ...], dict[str, object]] = {}
    tensors: dict[tuple[object, ...], dict[str, object]] = {}

    def block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[object]) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            new_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        key = (type.name,)
        if key not in tensors:
            new_tensor(self, handle, type)
            tensors[key] = dict(vars(self))
        vars(self).update(tensors[key], handle=handle, type=type)

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor


def _serve() -> None:
    sys.path.pop(0)  # of this file
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    if os.environ.get(IMPORTED) == "1":
        _quicken()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        limit = request.pop("timeout")
        pid = os.fork()
        if pid == 0:
            _child(**request)
        late = []

        def end(*_: object, pid: int = pid, late: list[bool] = late) -> None:
            late.append(True)
            os.killpg(pid, signal.SIGKILL)

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, limit)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(None if late else status) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
