"""Time models of images, stock and patched, in each mode: eager, compiled without graphs, compiled in CUDA graphs.

    python bench/experiments/compiled_modes/compiled_modes.py FOLDER --models vit,pe,sd3.5

timm's encoders are whole. Transformers of diffusers have their real sizes, 1024 pixels and --layers layers. Both lanes
share their weights in one process and take turns. Graphs are those of torch.compile(mode="reduce-overhead"). Rows go to
FOLDER/compiled_modes.jsonl; the exit status is 1 if a patched model is slower than the stock one in any mode, or if its
result differs.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fastkernels
from fastkernels.verify import cache
from fastkernels.verify.measure import Ratio

MODELS = {
    "vit": "vit_base_patch16_224", "pe": "vit_pe_core_base_patch16_224", "dinov3": "vit_base_patch16_dinov3",
    "swinv2": "swinv2_base_window8_256", "eva02": "eva02_base_patch14_224", "deit3": "deit3_base_patch16_224",
    "beit": "beit_base_patch16_224", "hiera": "hiera_base_224", "caformer": "caformer_b36",
}  # fmt: skip
# By default DINOv3 makes its positions anew in each call, and each block of SwinV2 differs by a drop path.
OPTIONS: dict[str, dict[str, Any]] = {
    "dinov3": {"dynamic_img_size": False}, "swinv2": {"drop_path_rate": 0.0},
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]
# {name: (class of diffusers, its configuration, shapes of floats without the batch)}
DIFFUSERS: dict[str, tuple[str, dict[str, Any], Shapes]] = {
    "sd3.5": (
        "SD3Transformer2DModel",
        {"sample_size": 128, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536,
         "pooled_projection_dim": 2048, "pos_embed_max_size": 384, "qk_norm": "rms_norm",
         "dual_attention_layers": tuple(range(13))},
        {"hidden_states": (16, 128, 128), "encoder_hidden_states": (333, 4096), "pooled_projections": (2048,)},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {"sample_size": 128, "num_attention_heads": 16, "attention_head_dim": 72, "out_channels": 8,
         "cross_attention_dim": 1152, "caption_channels": 4096, "use_additional_conditions": False},
        {"hidden_states": (4, 128, 128), "encoder_hidden_states": (300, 4096), "encoder_attention_mask": (300,)},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {"sample_size": 32, "caption_channels": 2304},
        {"hidden_states": (32, 32, 32), "encoder_hidden_states": (300, 2304), "encoder_attention_mask": (300,)},
    ),
    "hunyuandit": (
        "HunyuanDiT2DModel",
        {"sample_size": 128, "num_attention_heads": 16, "attention_head_dim": 88, "in_channels": 4, "patch_size": 2,
         "hidden_size": 1408, "mlp_ratio": 4.3637, "activation_fn": "gelu-approximate", "cross_attention_dim": 1024,
         "cross_attention_dim_t5": 2048, "pooled_projection_dim": 1024, "text_len": 77, "text_len_t5": 256},
        {"hidden_states": (4, 128, 128), "encoder_hidden_states": (77, 1024), "text_embedding_mask": (77,),
         "encoder_hidden_states_t5": (256, 2048), "text_embedding_mask_t5": (256,)},
    ),
}  # fmt: skip
LAYERS, BATCHES, IMAGES = 6, [1, 8], [2]  # IMAGES: batches of diffusers, one image with and without its text
MODES = ("eager", "compiled", "graphs")
ROUNDS, SECONDS = 9, 0.05  # of a measurement, and of a round
EAGER_ROUNDS = 41  # the CPU, which other programs use as well, is the limit of eager calls
SLOWER = 0.99  # a whole interval below this is a loss


Inputs = Callable[[int], dict[str, Any]]


def build(name: str, device: str, tiny: bool, layers: int) -> tuple[Any, Inputs]:
    """(model in bfloat16, a function that makes the arguments of a batch)."""
    torch.manual_seed(0)
    return _diffusers(name, device, tiny, layers) if name in DIFFUSERS else _timm(name, device, tiny)


def _timm(name: str, device: str, tiny: bool) -> tuple[Any, Inputs]:
    import timm

    small: dict[str, Any] = {"depth": 2}
    if name in ("swinv2", "hiera", "caformer"):
        small = {"swinv2": {"depths": (1, 1, 1, 1)}, "hiera": {"stages": (1, 1, 1, 1)}, "caformer": {}}[name]
    options = {**OPTIONS.get(name, {}), **(small if tiny else {})}
    with torch.device(device):  # buffers that a model makes on the CPU are copied in each call
        model = timm.create_model(MODELS[name], **options)
    size = model.pretrained_cfg["input_size"][-1]

    def inputs(batch: int) -> dict[str, Any]:
        return {"x": torch.randn(batch, 3, size, size, device=device, dtype=torch.bfloat16)}

    return filled(model).to(device, torch.bfloat16), inputs


def filled(model: Any) -> Any:
    """The model with random matrices: those that begin at zero hide what is before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    return model.eval()


def _diffusers(name: str, device: str, tiny: bool, layers: int) -> tuple[Any, Inputs]:
    import diffusers

    cls, config, shapes = DIFFUSERS[name]
    if name == "sd3.5":
        kept = config["dual_attention_layers"]
        config = {**config, "dual_attention_layers": tuple(i for i in kept if 24 * i < 13 * layers)}
    with torch.device(device):
        model = getattr(diffusers, cls)(**config, num_layers=2 if tiny else layers)
    model = filled(model).to(device, torch.bfloat16)
    shrink = 8 if tiny else 1

    def inputs(batch: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, shape in shapes.items():
            size = shape if len(shape) < 3 else (shape[0], *(n // shrink for n in shape[1:]))
            made[key] = torch.randn(batch, *size, device=device, dtype=torch.bfloat16)
            if "mask" in key:
                made[key] = torch.ones_like(made[key])
        made["timestep"] = torch.full((batch,), 500.0, device=device)
        if name == "pixart":
            made["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
        if name == "hunyuandit":
            tokens = (128 // shrink // 2) ** 2
            angles = torch.randn(tokens, config["attention_head_dim"], device=device)
            made["image_rotary_emb"] = (angles.cos(), angles.sin())
            made["image_meta_size"] = torch.full((batch, 6), 1024.0, device=device, dtype=torch.bfloat16)
            made["style"] = torch.zeros(batch, device=device, dtype=torch.long)
        return {**made, "return_dict": False}

    return model, inputs


def shared(model: Any) -> Any:
    """A copy of the modules with the same weights."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(t): t for t in tensors})


def output(found: Any) -> torch.Tensor:
    return (found[0] if isinstance(found, tuple) else found).float()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounds(lanes: list[Callable[[], Any]], number: int) -> list[list[float]]:
    """Seconds of a call, by lane and round; lanes take turns."""
    for lane in lanes:
        lane(), lane()
    wait()
    began = time.perf_counter()
    lanes[0]()
    wait()
    count = max(1, int(SECONDS / max(time.perf_counter() - began, 1e-6)))
    times: list[list[float]] = [[] for _ in lanes]
    for i in range(number):
        for j in range(len(lanes)):
            which = (i + j) % len(lanes)
            began = time.perf_counter()
            for _ in range(count):
                lanes[which]()
            wait()
            times[which].append((time.perf_counter() - began) / count)
    return times


def measure(
    name: str,
    batches: list[int],
    modes: list[str],
    device: str,
    tiny: bool,
    layers: int,
    ops: list[str] | None,
) -> list[dict[str, Any]]:
    """Rows of one model."""
    stock, inputs = build(name, device, tiny, layers)
    patched, twin = shared(stock), shared(stock)
    report = fastkernels.patch(patched, ops=ops)
    both = (stock, patched)
    subjects: dict[str, list[Any]] = {
        "eager": [*both, twin],
        "compiled": [torch.compile(model, dynamic=False) for model in both],
        "graphs": [torch.compile(model, dynamic=False, mode="reduce-overhead") for model in both],
    }
    made = []
    with torch.inference_mode():
        for (
            mode
        ) in modes:  # eager calls first: once a model is compiled, its modules no longer sleep in these
            for batch in batches:
                given = inputs(batch)
                lanes = [partial(model, **given) for model in subjects[mode]]
                began = time.perf_counter()
                outs = [output(lane()) for lane in lanes]
                first = time.perf_counter() - began
                near = float(
                    torch.nn.functional.cosine_similarity(outs[0].flatten(), outs[1].flatten(), dim=0)
                )
                times = rounds(lanes, EAGER_ROUNDS if mode == "eager" else ROUNDS)
                ratio = Ratio.of(times[1], times[0])
                twins = [Ratio.of(t, times[0]) for t in times[2:]]
                row = {
                    "model": name, "layers": layers if name in DIFFUSERS else None, "batch": batch, "mode": mode,
                    "stock_ms": 1e3 * median(times[0]),
                    "patched_ms": 1e3 * median(times[1]), "speedup": ratio.value, "ci95": [ratio.low, ratio.high],
                    "cosine": near, "first_call_s": first, "stock_twice": [[t.low, t.high] for t in twins],
                }  # fmt: skip
                made.append(row)
                print(
                    f"{name:10} {batch:3} {mode:9} {row['stock_ms']:8.3f} {row['patched_ms']:8.3f} "
                    f"{ratio.value:6.3f} ({ratio.low:.3f} to {ratio.high:.3f})  cosine {near:.4f}  first {first:.0f} s"
                    + "".join(f"  stock twice {t.value:.3f} ({t.low:.3f} to {t.high:.3f})" for t in twins),
                    flush=True,
                )
    print(report.refresh() or report, flush=True)
    return made


def batches_of(name: str, given: str | None) -> list[int]:
    """The batches of a model: those that were given, or its kind's."""
    return [int(b) for b in given.split(",")] if given else IMAGES if name in DIFFUSERS else BATCHES


def compile_ahead(names: list[str], given: str | None, modes: list[str], argv: list[str]) -> None:
    """Compile all lanes at the same time, so that the measurement finds them in Inductor's cache."""
    command = [sys.executable, __file__, *argv, "--only-compile"]
    compiled = [mode for mode in modes if mode != "eager"]
    jobs = [(name, batch, mode) for name in names for batch in batches_of(name, given) for mode in compiled]
    running = [
        subprocess.Popen(
            [*command, "--models", name, "--batches", str(batch), "--modes", mode], stdout=subprocess.DEVNULL
        )
        for name, batch, mode in jobs
    ]
    for process in running:
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default=",".join((*MODELS, *DIFFUSERS)))
    parser.add_argument("--batches", help="default: 1,8 of encoders and 2 of diffusers' transformers")
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="of diffusers' transformers, default %(default)s"
    )
    parser.add_argument("--modes", help=f"default: {','.join(MODES)}; on a CPU without graphs")
    parser.add_argument("--ops", help="only these ops, requested by name; default: a patch as users make it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers, for a CPU")
    parser.add_argument("--only-compile", action="store_true")
    args = parser.parse_args()
    names = args.models.split(",")
    default = [mode for mode in MODES if args.device != "cpu" or mode != "graphs"]
    modes = args.modes.split(",") if args.modes else default
    if wrong := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes {','.join(wrong)}: known are {', '.join(MODES)}")
    if unknown := [name for name in names if name not in MODELS and name not in DIFFUSERS]:
        parser.error(f"--models {','.join(unknown)}: known are {', '.join((*MODELS, *DIFFUSERS))}")
    if args.layers < 1 or not all(b.isdigit() and int(b) for b in (args.batches or "1").split(",")):
        parser.error("--layers and --batches take numbers of at least 1")
    ops = args.ops.split(",") if args.ops else None
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.only_compile or args.tiny:
        globals().update(ROUNDS=3, EAGER_ROUNDS=3, SECONDS=0.0)
    if args.only_compile:  # processes that share the GPU delay each other: their choices are not kept
        cache.keep_side = lambda *_: None
    elif args.device == "cuda" and not args.tiny:
        folder = tempfile.TemporaryDirectory(prefix="inductor")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        more = ["--layers", str(args.layers), *(["--ops", args.ops] if args.ops else [])]
        began = time.perf_counter()
        compile_ahead(names, args.batches, modes, [str(args.folder), *more])
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    torch._dynamo.config.recompile_limit = 64
    rows: list[dict[str, Any]] = []
    print("model    batch mode      stock ms  patched speedup", flush=True)
    for name in names:
        batches = batches_of(name, args.batches)
        rows += measure(name, batches, modes, args.device, args.tiny, args.layers, ops)
    if not args.only_compile:
        with (args.folder / "compiled_modes.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    lost = [row for row in rows if (row["ci95"][1] < SLOWER or row["cosine"] < 0.99)]
    for row in lost:
        print(
            f"LOSS: {row['model']} batch {row['batch']} {row['mode']}: {row['speedup']:.3f}, cosine {row['cosine']:.4f}"
        )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
