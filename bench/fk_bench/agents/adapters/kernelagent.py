"""KernelAgent (meta-pytorch/KernelAgent): its TritonKernelAgent writes and tests a kernel; the judge checks the result.

KernelAgent must be importable by the interpreter `python`. Its kernels define `kernel_function`, around which the op's
function is put. Source of the interface: its README.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from fk_bench.agents.adapters import drkernel, task_folder

NETWORK = True
ENV = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "LLM_RELAY_URL", "OPENAI_MODEL")
OPTIONS: Mapping[str, str | None] = {"model": "", "python": sys.executable, "workers": "4", "rounds": "10"}
RUN = """
import json, pathlib, sys
from triton_kernel_agent import TritonKernelAgent
given = json.loads(sys.argv[1])
named = {"model_name": given["model"]} if given["model"] else {}
agent = TritonKernelAgent(num_workers=int(given["workers"]), max_rounds=int(given["rounds"]), **named)
found = agent.generate_kernel(problem_description=given["problem"])
source = pathlib.Path(found["kernel_path"]).read_text() if found.get("success") else ""
print()
print(json.dumps({"source": source, "message": str(found.get("message", ""))}))
"""


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("kernelagent", options, OPTIONS)


def main() -> int:
    options = task_folder.options_of(sys.argv)
    file = task_folder.candidate()
    arguments, names = drkernel.signature(file.read_text(), file.stem)
    given = json.dumps({**options, "problem": task_folder.statement()})
    done = subprocess.run([options["python"], "-c", RUN, given], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        return done.returncode
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        source, message = str(found["source"]), str(found["message"])
    except (ValueError, KeyError, IndexError, TypeError):
        source, message = "", "KernelAgent printed no result"
    if not source:
        task_folder.lost(message or "KernelAgent found no kernel")
        return 0
    body = f"def {file.stem}({arguments}):\n    return kernel_function({names})\n"
    file.write_text(f"{source.rstrip()}\n\n\n{body}", encoding="utf-8")
    print(task_folder.check(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
