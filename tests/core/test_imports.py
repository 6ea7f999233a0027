"""Importing the library loads neither torch nor kernels nor hosts."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOSTS = {"vllm", "sglang", "diffusers", "timm", "sgl_kernel", "flashinfer", "flash_attn"}


def _loaded(code: str, environ: dict[str, str] | None = None) -> set[str]:
    """Top-level packages, and our modules, that a fresh interpreter has after `code`."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    env = {"PATH": "/usr/bin:/bin", **(environ or {})}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env, cwd="/"
    )
    assert out.returncode == 0, out.stderr
    names = set(out.stdout.split())
    return {n.partition(".")[0] for n in names} | {n for n in names if n.startswith(("fastkernels", "fk_"))}


def test_library_import_is_light() -> None:
    loaded = _loaded("import fastkernels")
    assert not loaded & {"torch", "triton", "transformers", "numpy", "fk_bench", "fk_integrations", *HOSTS}
    assert not any(n.startswith("fastkernels.overrides") for n in loaded)


def test_registry_names_import_nothing() -> None:
    loaded = _loaded("from fastkernels.core import registry; assert 'rms_norm' in registry.op_names()")
    assert not loaded & {"torch", "triton", "transformers", *HOSTS}


def test_patch_imports_no_kernel_and_no_host() -> None:
    loaded = _loaded("from fastkernels import patch, patch_async, Report")
    assert not loaded & {"triton", "fk_bench", "fk_integrations", *HOSTS}


def test_op_imports_no_host_model_or_engine() -> None:
    loaded = _loaded("from fastkernels.core import registry; registry.get('rms_norm')")
    assert "torch" in loaded
    assert not loaded & {"transformers", "fk_bench", "fk_integrations", *HOSTS}
    assert not any(n.startswith(("fastkernels.models", "fastkernels.engine")) for n in loaded)


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_inert_plugin_imports_no_torch(host: str) -> None:
    """The entry point's module itself; what it then does needs the host."""
    loaded = _loaded(f"from fk_integrations import plugin; plugin.{host}")
    assert not loaded & {"torch", "triton", "fk_bench", *HOSTS}
