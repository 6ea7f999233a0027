"""`fk-bench quality`: rows of sensitive, insensitive and wrong items, bad input, and real hosts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fk_bench.cli import main
from fk_bench.core.rows import Status, read
from fk_bench.offline.host import HostFailed
from fk_bench.quality.calibration import Calibration, Quality
from fk_bench.quality.command import row_of, show
from fk_bench.quality.measure import Item, Settings
from fk_bench.quality.metrics.metric import Value
from fk_bench.quality.text import Extent
from fk_bench.quality.worker import Worker
from support import guides
from support.tiny import make_tiny_llama

ROOT = Path(__file__).parents[3]
SCALE = Calibration(0.01, 0.1, {"residual": 0.5, "head": 0.4, "scale": 0.03})
GOOD = Quality("m", "vllm", "kl", {"kl": Value("kl", 2e-4, "nats", 0.01)}, SCALE, {"rms_norm": 3})
WRONG = """
import torch.nn.functional as F

def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up * FACTOR
"""


def command(*words: object) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "fk_bench.cli", "quality", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_row_says_whether_the_item_is_valid() -> None:
    def row(found: Quality | str) -> tuple[Status, str]:
        made = row_of(found, "m", "vllm", "mine", "r", {})
        return made.status, made.reason

    assert row(GOOD) == (Status.OK, "")
    assert row(replace(GOOD, values={"kl": Value("kl", 0.01, "nats", 0.07)})) == (
        Status.WRONG, "c is 0.333, at least 0.9 is needed",
    )  # fmt: skip
    blind = replace(GOOD, calibration=replace(SCALE, faults={"scale": 0.012}))
    assert row(blind) == (Status.INVALID, "insensitive: the planted fault scale gives c = 0.978")
    missing = replace(GOOD, calibration=replace(SCALE, unplanted={"head": "int8"}))
    assert row(missing) == (Status.INVALID, "insensitive: head could not be planted: int8")
    noisy = replace(GOOD, calibration=replace(SCALE, noise=0.2))
    assert "the noise 0.2000 is not below the bound 0.1" in row(noisy)[1]
    unused = replace(GOOD, calls={"rms_norm": 0}, left={"linear": "no such shape"})
    assert row(unused) == (Status.FAILED, "no kernel of the set ran (linear: no such shape)")
    assert row("vllm ended") == (Status.FAILED, "vllm ended")
    broken = row_of(
        replace(GOOD, values={"kl": Value("kl", float("nan"), "nats", float("nan"))}), "m", "h", "s", "r", {}
    )
    assert broken.status == Status.WRONG and broken.metrics["c"] == 0 and "kl" not in broken.metrics


BLOCK = """
from fastkernels.overrides.block import vllm as ours


class VllmLlamaMLP(ours.VllmLlamaMLP):
    def forward(self, x):
        return super().forward(x) * FACTOR
"""


@pytest.mark.parametrize(
    ("host", "block", "told"),
    [
        ("vllm", "llama.mlp", "vllm runs its own classes"),
        ("fastkernels", "mixtral.mixture", "it is a block of mixtral, and this item runs llama"),
        ("fastkernels", "llama.mixture", "llama has the blocks llama."),
    ],
)
def test_block_without_a_place_is_left_with_a_reason(host, block, told, tmp_path) -> None:
    model = make_tiny_llama(tmp_path / "model")
    made = Worker.__new__(Worker)
    made.report, made.host, made.model = None, host, str(model)
    ((op, state, why),) = made.patched([block], {block: "no-such-file.py"})  # is not imported
    assert (op, state) == (block, "left") and told in why
    assert made.answer({"calls": True}) == {"calls": {}}


@pytest.mark.parametrize("host", ["fastkernels", "transformers"])
def test_set_without_a_place_is_refused_in_one_sentence(host: str, tmp_path: Path) -> None:
    guides.run("fk-bench stubs --op group_norm --out set", tmp_path)
    settings = Settings(device="cpu", extent=Extent(1, 1, (9,), 4))
    item = Item(str(make_tiny_llama(tmp_path / "model")), host, settings, tmp_path, lambda line: None)
    with item.started(item.model, "set") as running, pytest.raises(HostFailed) as error:
        running.ask(
            {"patch": ["group_norm"], "candidates": {"group_norm": str(tmp_path / "set/group_norm.py")}}
        )
    assert re.match(rf"{host}: .*nothing to patch: group_norm \(", str(error.value))
    assert "\n" not in str(error.value) and "Error" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "status"), [("1.0", "ok"), ("1.3", "wrong")])
def test_set_of_a_block_is_measured_in_our_engine(factor: str, status: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "llama.mlp.py").write_text(BLOCK.replace("FACTOR", factor))
    small = ("--sequences", 4, "--batch", 2, "--prompts", "9,17", "--new", 8)
    _, found, _ = command(
        "--set", f"mine={tmp_path / 'set'}", "--hosts", "fastkernels", *small, "--out", tmp_path
    )
    assert found["results"][0]["status"] == status, found


def test_table_shows_the_last_line_of_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    show([row_of("vllm ended; its log:\nTraceback\nRuntimeError: boom", "m", "vllm", "mine", "r", {})])
    shown = capsys.readouterr().out
    assert "failed: RuntimeError: boom" in shown and "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("m", "--hosts", "vlm"), "unknown host 'vlm'"),
        (("/nowhere", "--hosts", "transformers"), "neither a folder nor a hub id"),
        (("tests", "--hosts", "transformers"), "no config.json"),
        (("--hosts", "fastkernels"), "give candidates with --set"),
        (("--set", "a=/nowhere"), "there is no folder /nowhere"),
        (("--sequences", "0"), "at least 1"),
        (("--hosts", "timm"), "give a model"),
        (("vit_tiny_patch16_242", "--hosts", "timm"), "Did you mean 'vit_tiny_patch16_2"),
        (("--engine-args", "vllm=3"), "must be an object"),
        (("--python", "vllm"), "HOST=VALUE"),
        (("--dtype", "bf16"), "--dtype 'bf16' is not one of auto, bfloat16"),
        (("--ops", "rmsnorm"), "Did you mean 'rms_norm'"),
        (
            ("small/dp4", "--hosts", "fastkernels", "--set", "{set}"),
            "no model 'dp4' in fastkernels. Did you mean 'dp3'",
        ),
        (("small/dp3", "--hosts", "vllm", "--set", "{set}"), "vllm is not installed"),
        (("small/dp3", "--hosts", "transformers", "--set", "{set}"), "no model 'dp3' in transformers"),
        (("--request", '{"width": 0}'), "--request: width is 0, give a number above 0"),
        (("--request", "width"), "--request is not JSON"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = candidates(tmp_path / "set", 1.0)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "quality",
                *(w.format(set=given) if w == "{set}" else w for w in words),
                "--out",
                str(tmp_path),
                "--json",
            ]
        )
    assert ended.value.code in (1, 2) and message in capsys.readouterr().out.splitlines()[-1]


SHORT = ("--sequences", 4, "--batch", 2, "--prompts", "6,12", "--new", 4)


def candidates(folder: Path, factor: float) -> Path:
    folder.mkdir()
    (folder / "silu_and_mul.py").write_text(WRONG.replace("FACTOR", str(factor)))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "host",
    [
        "fastkernels",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def test_host_accepts_a_right_set_and_finds_a_wrong_one(host: str, tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "llama", dtype="float32")
    (model / "model.safetensors").unlink()  # random weights with structure
    python = ROOT / (".venv" if host == "fastkernels" else f".venv-{host}") / "bin/python"
    if not python.exists():
        pytest.skip(f"no {python.parent.parent}: run `make setup`")
    right, wrong = candidates(tmp_path / "right", 1.0), candidates(tmp_path / "wrong", 1.2)
    status, last, errors = command(
        model, "--hosts", host, "--python", f"{host}={python}", "--set", f"right={right}", "--set", f"wrong={wrong}",
        "--out", tmp_path / "run", "--dtype", "float32", "--exact", *SHORT,
    )  # fmt: skip
    rows, _ = read(tmp_path / "run/rows.jsonl")
    assert [r.status for r in rows] == [Status.OK, Status.WRONG], errors[-3000:] + json.dumps(last)
    good, bad = (r.metrics for r in rows)
    assert status == 1 and good["c"] >= 0.99 and bad["c"] < 0.9 and rows[0].case["sensitive"]
    assert rows[0].case["calls"]["silu_and_mul"] > 0 and set(rows[0].case["noise_of"]) == {
        "again",
        "batches",
        "reorder",
    }
    assert good["kl_host_from_float32"] < 1e-6 < bad["kl_patched_from_float32"]
    assert {"perplexity", "top1", "matching_tokens", "rank_overlap"} <= good.keys()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["fastkernels", "transformers"])
def test_embedder_is_measured_on_a_fixed_corpus(host: str, tmp_path: Path) -> None:
    from support.minilm import minilm_path

    more: tuple[object, ...] = ()
    if host == "fastkernels":
        stubs = [
            sys.executable,
            "-m",
            "fk_bench.cli",
            "stubs",
            "--op",
            "layer_norm",
            "--out",
            str(tmp_path / "set"),
        ]
        subprocess.run(stubs, check=True, capture_output=True)
        more = ("--set", f"mine={tmp_path / 'set'}")
    _, last, errors = command(
        minilm_path(), "--hosts", host, "--out", tmp_path, "--sequences", 8, "--dtype", "float32", *more
    )
    assert "rows" in last, errors
    (row,), _ = read(tmp_path / "rows.jsonl")
    assert row.status == Status.OK and row.case["sensitive"], errors[-3000:] + json.dumps(last)
    assert row.metrics["embedding_cosine"] > 0.999 and row.metrics["ndcg"] > 0.5


@pytest.mark.slow
def test_small_default_needs_no_option(tmp_path: Path) -> None:
    status, last, errors = command("--out", tmp_path, *SHORT)
    assert status == 0 and last["ok"], errors[-3000:] + json.dumps(last)
    (result,) = last["results"]
    assert result["c"] > 0.9 and result["fault_scale_c"] < 0.9


@pytest.mark.slow
def test_images_of_timm_and_diffusers_are_measured(tmp_path: Path) -> None:
    from support.tiny import make_tiny_pipeline

    pipeline = make_tiny_pipeline(tmp_path / "pipeline")
    for file in pipeline.rglob("*.safetensors"):
        file.unlink()  # random weights, whose last layer is multiplied
    for host, model, more in (
        ("timm", "vit_tiny_patch16_224", ()), ("diffusers", pipeline, ("--image-size", 32, "--steps", 2)),
    ):  # fmt: skip
        out = tmp_path / host
        _, last, errors = command(
            model, "--hosts", host, "--out", out, "--sequences", 4, "--batch", 2, "--dtype", "float32", *more
        )
        (row,), _ = read(out / "rows.jsonl")
        assert row.status == Status.OK and row.metrics["c"] > 0.9, errors[-3000:] + json.dumps(last)
        assert {"reorder", "fresh", "again", "batches"} <= set(row.case["noise_of"])
