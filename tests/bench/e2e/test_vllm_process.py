"""The settings of processes that start vLLM, in vLLM's own environment."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.h200_plan import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CODE = """
import os
from fk_bench.offline import vllm_process
before = set(os.environ)
vllm_process.prepare()
import vllm.envs
from vllm.utils.system_utils import get_mp_context
made = {name for name in set(os.environ) - before if name.startswith("VLLM_")}
print(sorted(made - set(vllm.envs.environment_variables)), get_mp_context().get_start_method())
"""


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `make setup`")
def test_engines_are_spawned_by_names_that_vllm_knows() -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "FASTKERNELS", "PYTEST"))}
    done = subprocess.run([str(PYTHON), "-c", CODE], env=kept, capture_output=True, text=True, timeout=200)
    assert done.stdout.split("\n")[-2] == "[] spawn", done.stdout + done.stderr
