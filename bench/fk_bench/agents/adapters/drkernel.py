"""Dr. Kernel: a model behind an OpenAI-compatible endpoint that was trained on KernelBench's form of a task.

It gets the reference as a module `Model`, and answers with a module `ModelNew`. A function of the op's name wraps it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

from fk_bench.agents.adapters import openai, task_folder

NETWORK = True
ENV = openai.ENV
OPTIONS = openai.OPTIONS
SYSTEM = "You write custom Triton kernels to replace the PyTorch operators of the given architecture, to get speedups."
PROMPT = """\
Optimize the architecture named Model with custom Triton kernels. Name your optimized architecture ModelNew; its
forward has the same arguments and results. Answer with the complete code in one Python code block, without tests.

```python
import torch
import torch.nn as nn

{reference}


class Model(nn.Module):
    def forward(self, {arguments}):
        return reference({names})
```
"""


def command(options: Mapping[str, str]) -> str:
    return task_folder.program("drkernel", options, OPTIONS)


def signature(source: str, op: str) -> tuple[str, str]:
    """(parameters with defaults, names) of the stub's function. Raises ValueError for a stub without one."""
    found = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == op]
    if not found:
        raise ValueError(f"{op} has no function: Dr. Kernel's form needs one")
    arguments = found[0].args
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    names = [a.arg for a in arguments.args] + [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    return ast.unparse(arguments), ", ".join(names)


def wrapped(source: str, op: str, arguments: str, names: str) -> str:
    """The answer's source as a candidate."""
    return f"{source.rstrip()}\n\n\n_model = ModelNew()\n\n\ndef {op}({arguments}):\n    return _model({names})\n"


def main() -> int:
    options = task_folder.options_of(sys.argv)
    file = task_folder.candidate()
    arguments, names = signature(file.read_text(), file.stem)
    prompt = PROMPT.format(reference=Path("reference.py").read_text(), arguments=arguments, names=names)
    return openai.loop(options, prompt, lambda source: wrapped(source, file.stem, arguments, names), SYSTEM)


if __name__ == "__main__":
    raise SystemExit(task_folder.run(main))
