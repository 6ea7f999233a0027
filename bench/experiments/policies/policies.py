"""Time of one chunk of actions of Pi0 and DP3: ours against the references, eager and compiled. See README.md."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fk_bench.core import machine
from fk_bench.core.rows import Row, Status, Subject, append
from fk_bench.tables.architectures import PATCHED
from torch import nn
from torch.utils._pytree import tree_map

from fastkernels import LLM
from fastkernels.engine.execution.runners.act import ActInput
from fastkernels.models.common.interfaces.policy import Observation
from fastkernels.models.robotics import dp3

WARM_UP, RUNS = 3, 20


class Found:
    """Times of one case: `add` measures and prints one, `rows` are those of the file."""

    def __init__(self, model: str, case: dict[str, int]) -> None:
        self.model, self.case = model, case
        self.times: dict[str, float] = {}
        self.more: dict[str, float] = {}  # metrics of each further row
        self.rows: list[Row] = []

    def add(self, provider: str, run: Callable[[], Any]) -> None:
        row = Row(
            run_id="policies", command="policies.py", machine=machine.machine(), commit=machine.commit(),
            versions={"torch": str(torch.__version__)}, subject=Subject(model=self.model, provider=provider),
            case=self.case, baseline="eager",
        )  # fmt: skip
        try:
            self.times[provider] = row.metrics["chunk_ms_p50"] = clock(run)
            row.metrics |= self.more
        except Exception as error:  # one that cannot be compiled leaves the others
            row.status, row.reason = Status.FAILED, f"{type(error).__name__}: {error}"[:500]
        self.rows.append(row)
        print(f"{self.model} {self.case} {provider}: {self.times.get(provider, row.reason)} ms", flush=True)


def clock(run: Callable[[], Any]) -> float:
    """Median milliseconds of a call, the device included."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ours(llm: LLM, observations: list[Observation], found: Found) -> None:
    """Time of a step of the engine: the copies of inputs and results are part of it."""
    runner = llm.llm_engine.runner
    count = len(observations)
    step = ActInput(observations, list(range(count)), [runner.model.num_steps] * count)
    found.add("fastkernels", lambda: runner.launch(step).result())


PutIn = Callable[[Any, Callable[[], torch.Tensor], torch.dtype], dict[str, float]]


def pi0(
    cameras: int,
    batch: int,
    modes: Sequence[str],
    found: Found,
    own: bool = True,
    put_in: PutIn | None = None,
) -> None:
    """own: time our engine, too. put_in: patches the model, and compares its outputs; then nothing else is timed."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    config = PI0Config()
    config.architectures = ["PI0ForConditionalGeneration"]
    random = np.random.default_rng(0)
    pixels = random.normal(size=(cameras, 3, 224, 224)).astype(np.float32)
    ids, state = random.integers(3, 1000, 20), random.normal(size=32).astype(np.float32)
    if own:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            with LLM(folder, load_format="dummy", dtype="bfloat16", max_num_batched_tokens=1 << 16) as llm:
                size = cameras * 256 + len(ids)
                arrays = {"pixels": pixels, "ids": ids, "state": state}
                ours(llm, [Observation(arrays, size, (cameras,))] * batch, found)
        torch.cuda.empty_cache()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = PI0ForConditionalGeneration(config).eval()
        torch.set_default_dtype(torch.float32)
    image = config.vlm_config.image_token_id
    row = torch.cat((torch.full((cameras * 256,), image), torch.from_numpy(ids))).cuda()
    given = {
        "state": torch.from_numpy(state).cuda().bfloat16().repeat(batch, 1), "input_ids": row.repeat(batch, 1),
        "pixel_values": torch.from_numpy(pixels).cuda().bfloat16().repeat(batch, 1, 1, 1, 1),
        "pixel_attention_mask": torch.ones(batch, cameras, dtype=torch.bool, device="cuda"),
    }  # fmt: skip
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    end = ""
    if put_in is not None:
        noise = torch.randn(
            batch, config.chunk_size, config.max_action_dim, device="cuda", dtype=torch.bfloat16
        )
        found.more = put_in(model, lambda: model.sample_actions(**given, noise=noise), torch.bfloat16)
        end = PATCHED
    with torch.inference_mode():
        found.add(f"eager{end}", lambda: model.sample_actions(**given))
    with torch.no_grad():
        for mode in modes:
            torch._dynamo.reset()
            expert = torch.compile(type(model.model.dit).forward.__get__(model.model.dit), mode=mode)
            model.model.dit.forward = functools.partial(copied, expert)
            found.add(f"compiled_expert_{mode}{end}", lambda: model.sample_actions(**given))
            del model.model.dit.forward
            torch._dynamo.reset()
            whole = torch.compile(model.sample_actions, mode=mode)
            found.add(f"compiled_whole_{mode}{end}", lambda whole=whole: whole(**given))


def copied(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """run's result in memory of its own: the next replay of its CUDA graph overwrites the graph's."""
    torch.compiler.cudagraph_mark_step_begin()
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, run(*args, **kwargs))


class Block(nn.Module):
    """The repository's residual block: FiLM is computed in every step."""

    def __init__(self, a: int, b: int, conditions: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv1d(c, b, 5, padding=2), nn.GroupNorm(8, b), nn.Mish()) for c in (a, b)
        )
        self.condition = nn.Sequential(nn.Mish(), nn.Linear(conditions, 2 * b))
        self.kept = nn.Conv1d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(condition)[:, :, None].chunk(2, dim=1)
        return self.second(scale * self.first(x) + shift) + self.kept(x)


class Reference(nn.Module):
    """Simple DP3 in PyTorch's modules, in the structure of the repository's."""

    def __init__(self, points: int = 3, state: int = 24, action: int = 26) -> None:
        super().__init__()
        widths = [points, 64, 128, 256]
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()]
        self.points, self.projection = (
            nn.Sequential(*parts),
            nn.Sequential(nn.Linear(256, 64), nn.LayerNorm(64)),
        )
        self.state = nn.Sequential(nn.Linear(state, 64), nn.ReLU(), nn.Linear(64, 64))
        self.step = nn.Sequential(nn.Linear(128, 512), nn.Mish(), nn.Linear(512, 128))
        dims, conditions = (128, 256, 384), 128 + 2 * 128
        pairs = list(zip((action, *dims), dims, strict=False))
        self.down = nn.ModuleList(Block(a, b, conditions) for a, b in pairs)
        self.halves = nn.ModuleList(nn.Conv1d(b, b, 3, 2, 1) for _, b in pairs[:-1])
        self.middle = Block(384, 384, conditions)
        self.up = nn.ModuleList(Block(2 * b, a, conditions) for a, b in reversed(pairs[1:]))
        self.doubles = nn.ModuleList(nn.ConvTranspose1d(a, a, 4, 2, 1) for a, _ in reversed(pairs[1:]))
        self.last = nn.Sequential(
            nn.Conv1d(128, 128, 5, padding=2), nn.GroupNorm(8, 128), nn.Mish(), nn.Conv1d(128, action, 1)
        )

    def observe(self, points: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        features = self.projection(self.points(points.flatten(0, 1)).max(1).values)
        return torch.cat((features, self.state(state.flatten(0, 1))), -1).view(len(points), -1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(64, device=x.device) * -(math.log(10000) / 63))
        angles = t.expand(len(x))[:, None] * frequencies
        condition = torch.cat((self.step(torch.cat((angles.sin(), angles.cos()), -1)), features), -1)
        x, kept = x.transpose(1, 2), []
        for i, block in enumerate(self.down):
            x = block(x, condition)
            kept.append(x)
            x = self.halves[i](x) if i < len(self.halves) else x
        x = self.middle(x, condition)
        for block, double in zip(self.up, self.doubles, strict=True):
            x = double(block(torch.cat((x, kept.pop()), 1), condition))
        return self.last(x).transpose(1, 2)


def run_dp3(batch: int, modes: Sequence[str], found: Found, own: bool = True) -> None:
    """own: time our engine, too."""
    from diffusers import DDIMScheduler

    random = np.random.default_rng(0)
    clouds = random.normal(size=(batch, 2, 512, 3)).astype(np.float32)
    states = random.normal(size=(batch, 2, 24)).astype(np.float32)
    config = {"architectures": ["SimpleDP3"], "model_type": "simple_dp3", "dtype": "float32", **dp3.DEFAULTS}
    if own:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            with LLM(folder, load_format="dummy", max_num_batched_tokens=1 << 16) as llm:
                given = [
                    Observation({"points": c, "state": s}, 16) for c, s in zip(clouds, states, strict=True)
                ]
                ours(llm, given, found)
    model = Reference().cuda().eval()
    scheduler = DDIMScheduler(100, beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    points, state = torch.from_numpy(clouds).cuda(), torch.from_numpy(states).cuda()

    def chunk(unet: Callable[..., torch.Tensor]) -> torch.Tensor:
        features = model.observe(points, state)
        scheduler.set_timesteps(10)
        x = torch.randn(batch, 16, 26, device="cuda")
        for t in scheduler.timesteps:
            x = scheduler.step(unet(x, t.cuda(), features), t, x).prev_sample
        return x

    products = scheduler.alphas_cumprod.tolist()

    def whole() -> torch.Tensor:
        """The same with DDIM's numbers as constants, so that all of it can be one graph."""
        features = model.observe(points, state)
        x = torch.randn(batch, 16, 26, device="cuda")
        for t in range(90, -1, -10):
            now, after = products[t], products[t - 10] if t else 1.0
            output = model(x, torch.full((1,), float(t), device="cuda"), features)
            noise = (x - now**0.5 * output) / (1 - now) ** 0.5
            x = after**0.5 * output.clamp(-1, 1) + (1 - after) ** 0.5 * noise
        return x

    with torch.inference_mode():
        found.add("eager", lambda: chunk(model))
    with torch.no_grad():
        for mode in modes:
            torch._dynamo.reset()
            unet = torch.compile(model, mode=mode)
            found.add(f"compiled_unet_{mode}", lambda unet=unet: chunk(lambda *a: unet(*a).clone()))
            torch._dynamo.reset()
            found.add(f"compiled_whole_{mode}", torch.compile(whole, mode=mode))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("pi0", "dp3"), help="default: both")
    parser.add_argument("--cameras", default="1,3", help="of Pi0")
    parser.add_argument("--batch", default="1,8,100", help="of DP3; Pi0 has 1")
    parser.add_argument("--modes", default="reduce-overhead,max-autotune", help="of torch.compile")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    args = parser.parse_args()
    modes = args.modes.split(",")
    plan: list[tuple[str, dict[str, int]]] = []
    if args.only != "pi0":
        plan += [("dp3", {"batch": int(n)}) for n in args.batch.split(",")]
    if args.only != "dp3":
        plan += [("pi0", {"cameras": int(n), "batch": 1}) for n in args.cameras.split(",")]
    for name, case in plan:
        found = Found(name, case)
        if name == "dp3":
            run_dp3(case["batch"], modes, found)
        else:
            pi0(case["cameras"], case["batch"], modes, found)
        own, others = (
            found.times.get("fastkernels"),
            [t for p, t in found.times.items() if p != "fastkernels"],
        )
        if own and others:
            print(f"  speedup over the fastest reference: {min(others) / own:.2f}", flush=True)
        if args.out:
            append(args.out, found.rows)


if __name__ == "__main__":
    main()
