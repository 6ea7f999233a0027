"""Real vLLM and SGLang on the CPU: HOST/check_*.py under pytest in .venv-HOST, and check_*.py here in both.

One check alone: PYTHONPATH=tests TINY_LLAMA=MODEL .venv-HOST/bin/python -m pytest tests/integrations/HOST/check_X.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SLOW = (
    "check_async", "check_construction", "check_export", "check_gemma", "check_held_out", "check_deepseek",
    "check_pipeline", "check_quant", "check_ranges", "check_ropes", "check_tensor_parallel", "check_works_more",
    "check_works", "check_server", "check_nodes", "check_relatives", "check_experts", "check_expert_parallel",
    "check_expert_groups", "check_fused_sums", "check_ray",
    "check_guides", "check_random_weights", "check_recurrent", "check_kimi", "check_media", "check_baselines",
    ("vllm", "check_compiled"), ("sglang", "check_by_table"),
    ("sglang", "check_norms"), ("sglang", "check_measured"),
)  # fmt: skip
IN_PROCESS = (
    "check_eager", "check_experts", "check_construction", "check_held_out", "check_deepseek", "check_ranges",
    "check_works", "check_works_more", "check_random_weights", "check_recurrent", "check_kimi", "check_media",
)  # fmt: skip
TWO_RANKS = (
    "check_pipeline", "check_tensor_parallel", "check_expert_parallel", "check_fused_sums", "check_ray",
)  # fmt: skip
BEFORE = {("vllm", "check_eager"): "check_graphs"}  # checks that run first in the same process
SECONDS = {
    "check_held_out": 2400,
    "check_media": 900,
    "check_nodes": 1000,
    "check_ray": 1800,
}  # one engine after the other; two at once
CHECKS = [
    pytest.param(
        host,
        check,
        id=f"{host}-{check.stem.removeprefix('check_')}",
        marks=[
            getattr(pytest.mark, host),
            *([pytest.mark.slow] if check.stem in SLOW or (host, check.stem) in SLOW else []),
            pytest.mark.timeout(SECONDS.get(check.stem, 400) + 100),
            pytest.mark.cpu(150),
            pytest.mark.skipif(
                not (ROOT / f".venv-{host}").exists(), reason=f"no .venv-{host}: run `make setup`"
            ),
        ],
    )
    for host in ("vllm", "sglang")
    for check in sorted([*(HERE / host).glob("check_*.py"), *HERE.glob("check_*.py")], key=lambda p: p.stem)
    if check.stem not in BEFORE.values()
]


def python(host: str) -> str:
    return str(ROOT / f".venv-{host}" / "bin" / "python")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint of the checks, made for each host by that host's environment."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return {host: folder / host for host in ("vllm", "sglang")}


def environment(host: str, check: str, model: Path, folder: Path) -> dict[str, str]:
    foreign = ("FASTKERNELS", "VLLM_", "SGLANG_", "PYTEST")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), kept.get("PYTHONPATH")]))
    kept |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    kept |= {"TINY_LLAMA": str(model), "CHECKED_HOST": host}
    cores = "0|1" if check in TWO_RANKS or (host, check) == ("sglang", "check_nodes") else None
    if check in ("check_eager", "check_live"):
        kept["FASTKERNELS_CAPTURE"] = "1"  # both test recording
    if check == "check_baselines" or (host, check) == ("sglang", "check_recurrent"):
        kept["TRITON_INTERPRET"] = "1"
    if host == "sglang":
        return kept | ({"SGLANG_CPU_OMP_THREADS_BIND": cores} if cores else {})
    return kept | {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores or "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if check in IN_PROCESS else "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }


@pytest.mark.parametrize(("host", "check"), CHECKS)
def test_engine(host: str, check: Path, tiny: dict[str, Path], tmp_path: Path) -> None:
    model = tiny[host]
    if not model.exists():
        make = [python(host), str(ROOT / "tests" / "support" / "tiny.py"), str(model)]
        subprocess.run(make, check=True, env=dict(os.environ, HF_HUB_OFFLINE="1"), stdout=sys.stderr)
    first = BEFORE.get((host, check.stem))
    checks = [str(check.with_stem(stem)) for stem in (first, check.stem) if stem]
    command = [python(host), "-m", "pytest", "-p", "no:cacheprovider", "-x", *checks]
    chosen = environment(host, check.stem, model, tmp_path)
    # For each kind of model without an entry there, vLLM starts a process, which takes 10 s.
    known = model.parent / "modelinfos"
    known.mkdir(exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "modelinfos").symlink_to(known)
    with open(
        tmp_path / "log", "w+"
    ) as log:  # not a pipe: a process that outlives its parent would hold it open
        process = subprocess.Popen(
            command, cwd=ROOT, env=chosen, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=SECONDS.get(check.stem, 400))
        finally:
            _end(process)
        log.seek(0)
        assert code == 0, f"{' '.join(command)}\n{_shown(log.read())}"


def _shown(text: str) -> str:
    """The failed assertion, and the end of the rest, of which engines log much."""
    failures = text.partition("= FAILURES =")[2].partition("--- Captured ")[0]
    return f"{failures[-6000:]}\n[...]\n{text[-4000:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole session, with engine cores, workers, schedulers and detokenizers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
