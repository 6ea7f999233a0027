"""`fk-bench e2e --hosts timm|transformers|diffusers` on tiny random models on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fk_bench.core.rows import Row, Status, read
from fk_bench.e2e.pictures.costs import gaps, kind_of
from fk_bench.e2e.pictures.graphs import Graphed, compile_blocks
from fk_bench.e2e.pictures.measure import Compiler, Settings, cosine, psnr, run_compiled
from fk_bench.e2e.pictures.named import build
from fk_bench.e2e.pictures.omni import too_large
from fk_bench.e2e.pictures.subjects import Encoder, Pipeline, open_subject
from support.commands import fk_bench_here, last_json
from support.tiny import make_tiny_encoder, make_tiny_pipeline
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastkernels.core.env import Environment

pytest.importorskip("timm")
diffusers = pytest.importorskip("diffusers")
TIMM = ("vit_small_patch16_dinov3", "--hosts", "timm", "--load-format", "dummy", "--engine-args",
        'timm={"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3}')  # fmt: skip


def run(out: Path, *args: Any, rounds: int = 2) -> tuple[int, dict[str, Any], list[Row]]:
    """(exit status, the last line, the rows) of one run without compiled lanes, unless --lanes is given."""
    lanes = () if "--lanes" in args else ("--lanes", "stock,patched")
    done = fk_bench_here("e2e", *args, *lanes, "--rounds", rounds, "--out", out)
    found = last_json(done) if done.stdout else {"error": done.stderr}
    return done.returncode, found, read(out / "rows.jsonl")[0] if (out / "rows.jsonl").exists() else []


def tiny_flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=[16, 32], down_block_types=["DownEncoderBlock2D"] * 2, norm_num_groups=8,
        up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, shift_factor=0.1,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, vae=vae, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None,
    )  # fmt: skip


def headers(page: str) -> list[str]:
    """The columns of the table of results."""
    return re.findall(r"<th>(.*?)</th>", page)


def test_timm_lanes_alternate(tmp_path: Path) -> None:
    status, last, rows = run(tmp_path, *TIMM, "--requests", "1,2", "--dtype", "bfloat16")
    assert status == 0, last
    order = [(r.case["batch"], r.round, r.subject.lane) for r in rows]
    assert order == [
        (batch, r, lane)
        for batch in (1, 2)
        for r, lanes in ((0, ("stock", "patched")), (1, ("patched", "stock")))
        for lane in lanes
    ]
    for row in rows:
        assert row.metrics["images_per_s"] == pytest.approx(
            1000 * row.case["batch"] / row.metrics["latency_ms"]
        )
        assert 0.999 < row.metrics["cosine_to_float32"] < 1 and row.versions["timm"]
        assert (row.case.get("modules") == {"layer_norm": 5, "gelu": 2}) == (row.subject.lane == "patched")
    assert [r["lane"] for r in last["results"]] == ["stock", "patched"] * 2
    page = (tmp_path / "report.html").read_text()
    assert headers(page)[:2] == ["lane", "batch"] and "speedup over the fastest host lane" in headers(page)
    assert "PSNR of latents to float32 dB" not in headers(page) and "<img" not in page


@pytest.mark.parametrize("kind", ["siglip2_vision", "dinov3"])
def test_transformers_encoder(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_encoder(tmp_path / kind, kind)
    status, last, rows = run(
        tmp_path / "run",
        folder,
        "--hosts",
        "transformers",
        "--requests",
        "2",
        "--dtype",
        "float32",
        rounds=1,
    )
    assert status == 0, last
    assert [r.metrics["cosine_to_float32"] for r in rows] == pytest.approx([1, 1], abs=1e-6)
    assert rows[1].case["modules"]["gelu"] and rows[0].case["image_size"] == 32


def test_pipeline_page_shows_all_images(tmp_path: Path) -> None:
    pipe = make_tiny_pipeline(tmp_path / "sdxl")
    more = (
        "--image-size",
        "32",
        "--steps",
        "2",
        "--ops",
        "attention_dense,layer_norm",
        "--dtype",
        "bfloat16",
        "--costs",
        "--channels-last",
    )
    status, last, rows = run(
        tmp_path / "run", pipe, "--hosts", "diffusers", "--requests", "2", *more, rounds=1
    )
    assert status == 0, last
    *rows, stock, patched = rows
    assert [stock.subject.lane, patched.subject.lane] == ["stock", "patched"]
    for row in (stock, patched):
        assert row.case["kind"] == "picture_costs" and "gaps_ms" not in row.metrics
        assert all(row.metrics[f"{kind}_ms"] > 0 for kind in ("attention", "conv", "gemm", "norm"))
    assert rows[1].case["modules"]["attention_dense"] == 22 and rows[1].case["steps"] == 2
    assert rows[0].metrics["psnr_to_stock_db"] == 200 and rows[1].metrics["psnr_to_stock_db"] > 30
    near = [row.metrics["latents_psnr_to_stock_db"] for row in rows]
    assert near[0] == 200 and near[1] > 30
    for row in rows:
        assert (
            0.99 < row.metrics["latents_cosine_to_float32"] < 1
            and row.metrics["latents_psnr_to_float32_db"] > 20
        )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "PSNR of latents to float32 dB" in headers(page)
    assert 'data-label="PSNR to the first lane dB">equal<' in page
    names = re.findall(r'alt="image (\d), ([\w ,]+)"', page)
    lanes = [
        "float32",
        "stock",
        "stock, difference from float32",
        "patched",
        "patched, difference from float32",
    ]
    assert names == [(str(i), lane) for i in (0, 1) for lane in lanes]


def test_wrong_candidate_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / "gelu.py").write_text("def gelu(x, approximate='none'):\n    return x * 0.9\n")
    status, last, rows = run(
        tmp_path / "run",
        *TIMM,
        "--requests",
        "1",
        "--candidate",
        folder,
        "--dtype",
        "float32",
        rounds=1,
    )
    assert status == 1 and not last["ok"]
    assert [r.status for r in rows] == [Status.OK, Status.WRONG] and "cosine to float32" in rows[1].reason


def test_failed_lane_leaves_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / "gelu.py").write_text(
        "def gelu(x, approximate='none'):\n    raise RuntimeError('no such kernel')\n"
    )
    args = (*TIMM, "--requests", "1", "--candidate", folder, "--dtype", "float32")
    status, last, rows = run(tmp_path / "run", *args)
    assert status == 1 and [line["status"] for line in last["results"]] == ["ok", "failed"]
    patched, *stock = rows
    assert patched.status is Status.FAILED and "no such kernel" in patched.reason and not patched.metrics
    assert [(r.subject.lane, r.round, r.status) for r in stock] == [("stock", r, Status.OK) for r in (0, 1)]
    assert "no such kernel" in (tmp_path / "run" / "report.html").read_text()


def test_interrupted_run_is_continued(tmp_path: Path) -> None:
    two = ("vit_small_patch16_dinov3,no_such_model", *TIMM[1:], "--requests", "1,2", "--dtype", "float32")
    status, last, first = run(tmp_path, *two, rounds=1)
    assert status == 1 and first[-1].reason.startswith("timm cannot open 'no_such_model'")
    assert [(r.case["batch"], r.subject.lane) for r in first[:-1]] == [
        (1, "stock"), (1, "patched"), (2, "stock"), (2, "patched"),
    ]  # fmt: skip
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(lines[:3]) + "\n")  # ended within batch 2
    status, last, again = run(tmp_path, TIMM[0], *two[1:], rounds=1)
    assert status == 0 and again[:2] == first[:2] and len(last["results"]) == 4
    assert [r.time >= first[3].time for r in again[2:]] == [True, True]
    done = fk_bench_here("e2e", *TIMM, "--lanes", "stock,patched", "--rounds", 3, "--out", tmp_path)
    assert done.returncode != 0 and "has results of other settings" in done.stderr


def test_folder_without_weights_gives_a_random_pipeline(tmp_path: Path) -> None:
    pipe = make_tiny_pipeline(tmp_path / "sdxl")
    for file in pipe.rglob("*.safetensors"):
        file.unlink()
    more = ("--load-format", "dummy", "--image-size", "32", "--steps", "1", "--lanes", "stock")
    status, last, _ = run(tmp_path / "run", pipe, "--hosts", "diffusers", "--requests", "1", *more, rounds=1)
    assert status == 0, last
    subject = open_subject("diffusers", str(pipe), torch.float32, "cpu", "dummy", 32, 1, {})
    assert isinstance(subject, Pipeline)
    assert not any(module.training for part in subject.copy().parts().values() for module in part.modules())


@pytest.fixture
def omni(tmp_path: Path) -> tuple[str, ...]:
    """Arguments of a tiny FLUX.1, measured also by a stand-in for vllm-omni."""
    fake = Path(__file__).parents[2] / "support" / "hosts" / "fake_vllm_omni.py"
    for module in ("entrypoints/omni", "inputs/data", "diffusion/models/flux/pipeline_flux"):
        file = tmp_path / "site" / "vllm_omni" / f"{module}.py"
        file.parent.mkdir(parents=True)
        shutil.copy(fake, file)
    about = tmp_path / "site" / "vllm_omni-0.26.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.26.0\n")
    tiny_flux().save_pretrained(tmp_path / "flux")
    paths = os.pathsep.join((str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])))
    return (
        str(tmp_path / "flux"), "--load-format", "dummy", "--hosts", "diffusers", "--image-size", "32", "--dtype",
        "float32", "--lanes", "stock,vllm-omni,patched", "--env", f"vllm-omni:PYTHONPATH={paths}",
    )  # fmt: skip


def test_vllm_omni_makes_the_same_images(tmp_path: Path, omni: tuple[str, ...]) -> None:
    status, last, rows = run(tmp_path / "run", *omni, "--requests", "1,4", "--steps", "4", "--channels-last")
    assert status == 0, last
    found = [row for row in rows if row.subject.lane == "vllm-omni"]
    assert [(row.case["batch"], row.round) for row in found] == [(1, 0), (1, 1), (4, 0), (4, 1)]
    for row in found:
        assert row.case["interleaved"] is False and row.versions["vllm-omni"] == "0.26.0"
        assert row.metrics["psnr_to_float32_db"] > 100 and row.metrics["latents_psnr_to_float32_db"] > 100
        assert 0 < row.metrics["latency_ms"] <= row.metrics["request_ms"]
    for stock, other, patched in zip(*[iter(last["results"])] * 3, strict=True):
        faster = min(stock["latency_ms"], other["latency_ms"])
        assert patched["speedup_over_host"] == pytest.approx(faster / patched["latency_ms"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert re.findall(r'alt="image 3, ([\w -]+)"', page) == ["float32", "stock", "vllm-omni", "patched"]
    (log,) = (tmp_path / "run").glob("vllm-omni-*.log")
    assert {"ready", "closed"} <= set(log.read_text().splitlines())


@pytest.mark.slow
def test_vllm_omni_that_fails_leaves_the_others(tmp_path: Path, omni: tuple[str, ...]) -> None:
    status, last, rows = run(tmp_path / "run", *omni, "--requests", "1,5", "--steps", "1", rounds=1)
    assert status == 1
    states = ["ok", "ok", "ok", "ok", "failed", "ok"]
    assert [line["status"] for line in last["results"]] == states
    (failed,) = [row for row in rows if row.status is Status.FAILED]
    assert failed.reason.startswith("vllm-omni: ValueError: at most 4 images; see ")
    absent = (*omni[:-1], "vllm-omni:PYTHONPATH=")
    status, last, rows = run(tmp_path / "absent", *absent, "--requests", "1", "--steps", "1", rounds=1)
    (failed,) = [row for row in rows if row.status is Status.FAILED]
    assert status == 1 and "has no working vllm-omni (" in failed.reason and "--env" in failed.reason
    lanes = ("--lanes", "stock,vllm-omni", "--requests", "1", "--dtype", "float32")
    _, _, rows = run(tmp_path / "timm", *TIMM, *lanes, rounds=1)
    assert rows[0].reason.startswith("vllm-omni is measured with FluxPipeline and StableDiffusionXLPipeline")


def test_vllm_omni_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=24 * gib))
    assert too_large(23 * gib) == ""
    wanted = "vllm-omni needs 24.5 GiB in /scratch for the weights, 24.0 are free: set TMPDIR"
    assert too_large(47 * gib // 2) == wanted
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 * gib, 80 * gib))
    wanted = "vllm-omni needs 26.0 GiB of GPU memory next to the pipeline, 20.0 are free"
    assert too_large(14 * gib) == "" and too_large(20 * gib) == wanted


@pytest.mark.slow
def test_batches_of_four_take_fifty_steps(tmp_path: Path) -> None:
    pipe = make_tiny_pipeline(tmp_path / "sdxl")
    more = ("--image-size", "32", "--steps", "50", "--dtype", "float32", "--requests", "4")
    status, last, rows = run(tmp_path / "run", pipe, "--hosts", "diffusers", *more, rounds=1)
    assert status == 0, last
    assert [(row.case["batch"], row.case["steps"]) for row in rows] == [(4, 50)] * 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--hosts", "diffusers", "--env", "vllm:A=1"), "--env: expected vllm-omni:KEY=VALUE, got 'vllm:A=1'"),
        (("sdxl", "--hosts", "diffusers", "--lanes", "stock,vllm-omni", "--python", "vllm-omni=/nowhere/python"),
         "--python vllm-omni: no such interpreter: /nowhere/python"),
        (("--hosts", "timm,diffusers"), "--hosts timm is measured alone"),
        (("--hosts", "timm", "--lanes", "patched"), "begin with stock, then any of compiled"),
        (("--hosts", "timm", "--lanes", ","), "begin with stock, then any of compiled"),
        (("--hosts", "timm", "--lanes", "stock,patched,patched"), "each once; they are compared with stock"),
        (("--hosts", "timm", "--steps", "0"), "--steps must be at least 1"),
        (("--hosts", "timm", "--image-size", "-1"), "--image-size: expected a number of 0 or more, got -1"),
        (("--hosts", "timm", "--ops", "attention_dens"), "unknown op 'attention_dens'"),
        (("--hosts", "diffusers"), "--hosts diffusers needs MODEL"),
        (("--hosts", "vllm", "--ops", "gelu"), "are for --hosts timm, transformers, diffusers"),
        (("--hosts", "timm", "--cuda-graphs"), "--cuda-graphs needs --compile-blocks"),
        (("--hosts", "timm", "--cuda-graphs", "--compile-blocks"), "which has graphs of its own: choose default"),
        (("no_such_model", "--hosts", "timm"), "timm cannot open 'no_such_model'"),
    ],
)  # fmt: skip
def test_bad_arguments(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = fk_bench_here("e2e", *args, "--out", tmp_path)
    assert done.returncode != 0 and message in done.stderr


@pytest.mark.slow
def test_demo_puts_both_models_on_one_page(tmp_path: Path) -> None:
    from support.demo_vision import demo

    assert demo(tmp_path, rounds=1)
    page = (tmp_path / "report.html").read_text()
    assert "tiny-sdxl in diffusers" in page and "vit_small_patch16_dinov3 in timm" in page
    assert page.count("<img") == 2 * 5
    hosts = [(row.subject.host, row.subject.lane) for row in read(tmp_path / "rows.jsonl")[0]]
    assert hosts == [(host, lane) for host in ("diffusers", "timm") for lane in ("stock", "patched")]


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(), ("--compile-blocks",)])
def test_compiled_lanes(tmp_path: Path, blocks: tuple[str, ...]) -> None:
    lanes = ("--lanes", "stock,compiled,patched,patched-compiled", "--ops", "layer_norm,attention_dense")
    deeper = (*TIMM[:-1], TIMM[-1].replace('"depth": 2', '"depth": 4'))  # blocks are compiled from four on
    status, last, rows = run(tmp_path, *deeper, "--requests", "2", *lanes, *blocks, rounds=1)
    assert status == 0, last
    assert [r.subject.lane for r in rows] == ["stock", "compiled", "patched", "patched-compiled"]
    assert rows[1].metrics["first_call_s"] > rows[0].metrics["first_call_s"]


@pytest.mark.slow
def test_lanes_are_compiled_ahead(tmp_path: Path) -> None:
    lanes = ("--lanes", "stock,compiled,patched-compiled", "--ops", "layer_norm", "--compile-ahead", "2")
    done = fk_bench_here("e2e", *TIMM, *lanes, "--requests", "1,2", "--rounds", "1", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": compiled ahead") == 4 and "not compiled" not in done.stderr


@pytest.mark.parametrize("graphs", [False, True])
def test_patch_is_told_of_graphs_captured_by_hand(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_GRAPHS", raising=False)
    told: list[bool] = []

    class Told:
        latents = None

        def copy(self) -> Told:
            return self

        def compile(self, *how: Any) -> None: ...

        def result(self, batch: int, seed: int) -> torch.Tensor:
            told.append(Environment.read().graphs)
            return torch.zeros(1)

    how = Compiler("default", blocks=True, graphs=graphs)
    settings = Settings("timm", "", "float32", (1,), 1, 0, ("compiled",), None, None, how)
    run_compiled(cast(Any, Told()), settings, "compiled", 1)
    assert told == [graphs] and not Environment.read().graphs


def test_measures_of_distance() -> None:
    a = torch.tensor([3.0, 4.0])
    assert cosine(a, 2 * a) == pytest.approx(1) and cosine(a, torch.tensor([4.0, -3.0])) == pytest.approx(0)
    assert psnr(a, a) == 200
    assert psnr(torch.full((9,), 0.6), torch.full((9,), 0.5), 1.0) == pytest.approx(20, abs=1e-4)


def test_kernels_are_counted_by_kind() -> None:
    kinds = {
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>": "attention",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "conv",
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT": "gemm",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>": "norm",
        "_ada_layer_norm_kernel": "norm",
        "_gated_residual_kernel": "norm",
        "triton_poi_fused_add_mul_3": "elementwise and other",
    }
    assert {name: kind_of(name) for name in kinds} == kinds
    assert gaps([(5.0, 6.0), (0.0, 2.0), (1.0, 4.0)]) == 1.0 and gaps([]) == 0.0


@pytest.mark.parametrize(("name", "millions"), [("flux.1", 11985), ("sdxl", 2651), ("vjepa2", 326)])
def test_named_models_have_their_real_sizes(name: str, millions: int) -> None:
    model = build(name, torch.bfloat16, "meta")
    parts = (
        [model]
        if name == "vjepa2"
        else [p for p in model.components.values() if isinstance(p, torch.nn.Module)]
    )
    assert round(sum(p.numel() for part in parts for p in part.parameters()) / 1e6) == millions
    assert torch.get_default_dtype() == torch.float32


class OnCpu(TorchDispatchMode):
    """Keeps the names of operators that read or make tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = (t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, torch.Tensor))
        if any(t.device.type == "cpu" for t in given):
            self.found.add(str(func))
        return out


@pytest.mark.parametrize("name", ["siglip2", "dinov3", "swinv2", "vjepa2"])
def test_named_encoders_call_nothing_on_the_cpu(name: str) -> None:
    """A CUDA graph cannot capture a copy from memory that is not pinned."""
    size = 128
    encoder = Encoder(build(name, torch.float32, "meta", size).eval(), size, 1)
    encoder.channels_last()  # of videos, too
    inputs = encoder.inputs(2, 0)
    with torch.inference_mode(), OnCpu() as seen:
        assert encoder.run(inputs).shape[0] == 2
    assert not seen.found


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_pipeline_without_text_encoders_is_measured(name: str, tmp_path: Path) -> None:
    if name == "sdxl":
        folder = make_tiny_pipeline(tmp_path)
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, text_encoder=None, text_encoder_2=None)
    else:
        pipe = tiny_flux()
    subject = Pipeline(pipe, 32, 2)
    (tokens, _), *_ = (t.shape[1:] for t in subject.inputs(1, 0).values() if isinstance(t, torch.Tensor))
    assert tokens == (512 if name == "flux" else 77)
    with torch.inference_mode():
        lane = subject.copy()
        found, again = lane.result(2, 0), subject.copy(wide=True).result(2, 0)
        given = lane.inputs(2, 0)
        shown = pipe(
            **{n: v for n, v in given.items() if n != "seed"}, num_inference_steps=2, output_type="latent", height=32,
            width=32, generator=torch.Generator().manual_seed(0),
        ).images  # fmt: skip
    assert lane.latents is not None and torch.equal(lane.latents, shown) and subject.latents is None
    assert found.shape == (2, 3, 32, 32) and found.std() > 0
    torch.testing.assert_close(found, again)  # decoded in one batch, and an image at a time


def test_blocks_with_most_weights_are_compiled() -> None:
    model = torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4)), torch.nn.Linear(8, 8)
    )
    assert compile_blocks(model, None) == 4
    assert [m._compiled_call_impl is not None for m in model] == [True] * 4 + [False]
    swin = build("swinv2", torch.float32, "meta")  # four stages hold 24 blocks and nearly all weights
    assert (
        compile_blocks(swin, None)
        == 24
        == sum(type(m).__name__ == "SwinTransformerV2Block" for m in swin.modules())
    )
    # Guards compare the probability of a DropPath: each block would be compiled.
    assert "DropPath" not in {type(m).__name__ for m in swin.modules()}
    with pytest.raises(ValueError, match="Linear has no class with 4 blocks"):
        compile_blocks(torch.nn.Linear(2, 2), None)


@pytest.mark.gpu
def test_graphs_replay_new_inputs() -> None:
    layer = torch.nn.Linear(4, 3).cuda()
    graphed = Graphed(lambda x, *, scale, twice: [layer(x) * scale * (2 if twice else 1)])
    with torch.inference_mode():
        for rows in (2, 5, 2):
            for twice in (False, True):
                x, scale = torch.randn(rows, 4, device="cuda"), torch.rand(())
                (found,) = graphed(x, scale=scale, twice=twice)
                torch.testing.assert_close(found, layer(x) * scale.cuda() * (2 if twice else 1))
    assert len(graphed.graphs) == 4
