"""Pi0 and DP3: each denoising step against transformers and the paper's equations, key names, wrong configs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fk_bench.info.verified import ACTIONS
from safetensors.torch import load_file, save_file
from support import policies

from fastkernels import LLM, ActionParams, SamplingParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.plans import build
from fastkernels.models.robotics import dp3


def pi0_steps(
    model: Any, ours: Any, observation: Any, seed: int, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """transformers' velocity in each step, and its actions."""
    row = {name: torch.from_numpy(value)[None] for name, value in observation.arrays.items()}
    cameras = row["pixels"].shape[1]
    ids = torch.cat((torch.full((1, cameras * policies.IMAGE_TOKENS), policies.IMAGE_TOKEN), row["ids"]), 1)
    found: list[torch.Tensor] = []
    hook = model.action_out_proj.register_forward_hook(lambda *call: found.append(call[2][0]))
    actions = model.sample_actions(
        state=row["state"], input_ids=ids, pixel_values=row["pixels"], attention_mask=torch.ones_like(ids),
        pixel_attention_mask=torch.ones(1, cameras, dtype=torch.bool), num_steps=steps,
        noise=torch.from_numpy(ours.noise(seed, steps))[None],
    )  # fmt: skip
    hook.remove()
    return found, actions[0]


def dp3_steps(
    state: dict[str, torch.Tensor], config: dict[str, Any], ours: Any, observation: Any, seed: int, steps: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The UNet's output in each step as the paper's repository computes it, in float64, and the actions."""
    import diffusers

    p = {key: value.double() for key, value in state.items()}
    points, pose = (torch.from_numpy(observation.arrays[n]).double() for n in ("points", "state"))

    def dense(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    def scaled(field: str, x: torch.Tensor) -> torch.Tensor:
        return x * p[f"normalizer.params_dict.{field}.scale"] + p[f"normalizer.params_dict.{field}.offset"]

    x = scaled("point_cloud", points)
    for i in (0, 3, 6):
        x = normed(f"obs_encoder.extractor.mlp.{i + 1}", dense(f"obs_encoder.extractor.mlp.{i}", x)).relu()
    if config.get("use_pc_color"):
        x = dense("obs_encoder.extractor.mlp.9", x)
    x = dense("obs_encoder.extractor.final_projection.0", x.max(1).values)
    x = normed("obs_encoder.extractor.final_projection.1", x)
    y = dense("obs_encoder.state_mlp.2", dense("obs_encoder.state_mlp.0", scaled("agent_pos", pose)).relu())
    features = torch.cat((x, y), 1).flatten()

    def block(name: str, x: torch.Tensor, groups: int) -> torch.Tensor:
        k = config["kernel_size"] // 2
        x = F.conv1d(x, p[f"{name}.block.0.weight"], p[f"{name}.block.0.bias"], padding=k)
        return F.mish(F.group_norm(x, groups, p[f"{name}.block.1.weight"], p[f"{name}.block.1.bias"]))

    def residual(name: str, x: torch.Tensor, condition: torch.Tensor | None) -> torch.Tensor:
        y = block(f"{name}.blocks.0", x, 8)
        if condition is not None:
            scale, shift = dense(f"{name}.cond_encoder.1", F.mish(condition)).chunk(2)
            y = y * scale[:, None] + shift[:, None]
        kept = x
        if f"{name}.residual_conv.weight" in p:
            kept = F.conv1d(x, p[f"{name}.residual_conv.weight"], p[f"{name}.residual_conv.bias"])
        return block(f"{name}.blocks.1", y, 8) + kept

    def unet(x: torch.Tensor, t: int) -> torch.Tensor:
        size = config["diffusion_step_embed_dim"] // 2
        angles = t * torch.exp(-torch.arange(size) * np.log(10000) / (size - 1)).double()
        waves = torch.cat((angles.sin(), angles.cos()))
        step = dense("model.diffusion_step_encoder.3", F.mish(dense("model.diffusion_step_encoder.1", waves)))
        condition, kept = torch.cat((step, features)), []
        for i in range(len(config["down_dims"])):
            x = residual(f"model.down_modules.{i}.0", x, condition)
            kept.append(x)
            if (name := f"model.down_modules.{i}.1.conv") + ".weight" in p:
                x = F.conv1d(x, p[f"{name}.weight"], p[f"{name}.bias"], stride=2, padding=1)
        x = residual("model.mid_modules.0", x, condition if config.get("use_mid_condition", True) else None)
        for i in range(len(config["down_dims"]) - 1):
            x = residual(f"model.up_modules.{i}.0", torch.cat((x, kept.pop()), 1), condition)
            name = f"model.up_modules.{i}.1.conv"
            x = F.conv_transpose1d(x, p[f"{name}.weight"], p[f"{name}.bias"], stride=2, padding=1)
        x = block("model.final_conv.0", x, 8)
        return F.conv1d(x, p["model.final_conv.1.weight"], p["model.final_conv.1.bias"])

    made = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample", **config["noise_scheduler"]}
    scheduler = getattr(diffusers, made.pop("_class_name", "DDIMScheduler"))(**made)
    scheduler.set_timesteps(steps)
    noise, found = torch.from_numpy(ours.noise(seed, steps)).double(), []
    x, draws = noise[:1], iter(noise[1:])
    with pytest.MonkeyPatch.context() as patch:
        module = "diffusers.schedulers.scheduling_ddpm.randn_tensor"
        patch.setattr(module, lambda *args, **kwargs: next(draws)[None])
        for t in scheduler.timesteps:
            found.append(unet(x, int(t))[0])
            x = scheduler.step(found[-1][None], t, x).prev_sample
    actions = x[0].T
    own = "normalizer.params_dict.action"
    actions = (actions - p[f"{own}.offset"]) / p[f"{own}.scale"]
    return found, actions[config["n_obs_steps"] - 1 :]


DP3 = {
    "ddim": {},
    "colors": {
        "use_pc_color": True, "noise_scheduler": {"num_train_timesteps": 20, "prediction_type": "epsilon"},
        "shape_meta": {
            "obs": {"point_cloud": {"shape": [40, 6]}, "agent_pos": {"shape": [7]}}, "action": {"shape": [4]},
        },
    },
    "ddpm": {
        "use_mid_condition": False, "down_dims": [16, 24], "kernel_size": 5,
        "noise_scheduler": {"num_train_timesteps": 20, "_class_name": "DDPMScheduler", "clip_sample_range": 0.7},
    },
    "linear": {
        "noise_scheduler": {
            "num_train_timesteps": 12, "beta_schedule": "linear", "prediction_type": "epsilon", "clip_sample": False,
            "_class_name": "DDPMScheduler",
        },
    },
    "scaled_linear": {
        "noise_scheduler": {
            "num_train_timesteps": 12, "beta_schedule": "scaled_linear", "set_alpha_to_one": False,
            "steps_offset": 1, "clip_sample": False,
        },
    },
}  # fmt: skip


def compare(llm: LLM, given: list[dict[str, Any]], reference: Any, steps: int, output: str) -> None:
    """Outputs of every step, and the actions, of a batch and of each observation alone."""
    engine = llm.llm_engine
    model = engine.runner.model
    observations = [
        engine.make_request("-", g, ActionParams(seed=i)).observation for i, g in enumerate(given)
    ]
    want = [reference(o, i) for i, o in enumerate(observations)]
    for rows in ([*range(len(given))], *([i] for i in range(len(given)))):
        for group in {observations[i].group for i in rows}:
            own = [i for i in rows if observations[i].group == group]
            found: list[torch.Tensor] = []
            hook = model.get_submodule(output).register_forward_hook(lambda *call, f=found: f.append(call[2]))
            params = [ActionParams(seed=i, num_steps=steps, num_actions=model.chunk[0]) for i in own]
            outputs = llm.act([given[i] for i in own], params, use_tqdm=False)
            hook.remove()
            assert len(found) == steps
            for row, i in enumerate(own):
                for step, made in enumerate(found):
                    one = made.unflatten(0, (len(own), -1))[row] if output == "action_out_proj" else made[row]
                    torch.testing.assert_close(
                        one.double(), want[i][0][step].double(), atol=ACTIONS, rtol=ACTIONS
                    )
                made = torch.from_numpy(outputs[row].actions).double()
                torch.testing.assert_close(made, want[i][1].double(), atol=ACTIONS, rtol=ACTIONS)


@pytest.mark.parametrize("name", ["pi0", "dp3"])
def test_every_step_equals_the_reference(tmp_path: Path, name: str) -> None:
    given = policies.observations(name, 4)
    reference = getattr(policies, name)(tmp_path)
    with LLM(str(tmp_path), device="cpu") as llm:
        model = llm.llm_engine.runner.model
        if name == "pi0":
            compare(llm, given, lambda o, i: pi0_steps(reference, model, o, i, 3), 3, "action_out_proj")
        else:
            compare(llm, given, lambda o, i: dp3_steps(reference, policies.DP3, model, o, i, 4), 4, "model")


@pytest.mark.parametrize("name", [n for n in DP3 if n != "ddim"])
def test_dp3_variant_equals_its_equations(tmp_path: Path, name: str) -> None:
    config = {**policies.DP3, **DP3[name]}
    state = policies.dp3(tmp_path, **DP3[name])
    random = np.random.default_rng(1)
    width = config["shape_meta"]["obs"]["point_cloud"]["shape"][1]
    given = [
        {"point_cloud": random.normal(size=(2, n, width)), "state": random.normal(size=(2, 7))}
        for n in (9, 70)
    ]
    with LLM(str(tmp_path), device="cpu") as llm:
        model = llm.llm_engine.runner.model
        compare(llm, given, lambda o, i: dp3_steps(state, config, model, o, i, 3), 3, "model")


@pytest.fixture
def pi0(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    yield tmp_path, policies.pi0(tmp_path)


def test_pi0_reads_the_names_of_all_checkpoints(pi0: tuple[Path, Any]) -> None:
    """Those of transformers' classes, and lerobot's, which has the embedding as the head only."""
    folder, model = pi0
    saved = load_file(folder / "model.safetensors")
    lerobot = {}
    for key, value in saved.items():
        key = key.replace("paligemma.model.language_model.model.embed_tokens", "paligemma.lm_head")
        key = key.replace("language_model.model.", "language_model.").replace(
            "vision_tower.", "vision_tower.vision_model."
        )
        lerobot[f"model.{key}"] = value
    given, found = policies.observations("pi0", 1), []
    for state in (saved, lerobot, {k: v.contiguous() for k, v in model.state_dict().items()}):
        save_file(state, folder / "model.safetensors")
        with LLM(str(folder), device="cpu") as llm:
            found.append(llm.act(given, ActionParams(seed=1), use_tqdm=False)[0].actions)
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<unk>", "pick", "the", "cube", "\n"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", pad_token="<pad>", unk_token="<unk>"
    )


def test_pi0_inputs_equal_the_processor(pi0: tuple[Path, Any]) -> None:
    """Images, prompt and state as transformers' processor makes them; actions back in the units of the robot."""
    from transformers.models.pi0.image_processing_pi0 import PI0ImageProcessor
    from transformers.models.pi0.processing_pi0 import PI0Processor

    folder, _ = pi0
    given = {"images": policies.images(2), "state": [0.1, -2.0, 3.0], "prompt": "pick the cube"}
    with LLM(str(folder), device="cpu") as llm:
        plain = llm.act({**given, "prompt": [1]}, ActionParams(seed=1), use_tqdm=False)[0].actions
    statistics = {
        "state_mean": [1.0, 2.0, 3.0], "state_std": [0.5, 1.0, 2.0], "actions_mean": [0.0, 5.0],
        "actions_std": [2.0, 3.0],
    }  # fmt: skip
    sides = {"max_height": 16, "max_width": 16}
    images = PI0ImageProcessor(size=sides, pad_size={"height": 16, "width": 16})
    images.image_seq_length = policies.IMAGE_TOKENS
    processor = PI0Processor(images, tokenizer(), max_state_dim=9, chunk_size=5, **statistics)
    tokenizer().save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(statistics))
    want = processor(images=given["images"], text=given["prompt"], state=given["state"], padding="do_not_pad")
    with LLM(str(folder), device="cpu") as llm:
        made = llm.llm_engine.make_request("-", given).observation.arrays
        torch.testing.assert_close(torch.from_numpy(made["pixels"]), want["pixel_values"][0])
        ids = want["input_ids"][0][2 * policies.IMAGE_TOKENS :]
        assert made["ids"].tolist() == list(ids) and len(ids) > 3
        torch.testing.assert_close(torch.from_numpy(made["state"]), want["state"][0])
        scaled = llm.act(
            {**given, "state": [1.05, 0.0, 9.0], "prompt": [1]}, ActionParams(seed=1), use_tqdm=False
        )
    # The same state in its own units, so the same actions
    np.testing.assert_allclose(scaled[0].actions, plain[:, :2] * [2.0, 3.0] + [0.0, 5.0], atol=1e-5)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"state_mean": [1.0]}, "has state_mean, and no state_std"),
        (
            {"state_mean": [1.0], "state_std": [1.0, 2.0], "actions_mean": [1.0], "actions_std": [1.0]},
            "state_mean and state_std of the processor must have one length up to 9, got 1 and 2",
        ),
        (
            {"state_mean": ["a"], "state_std": [1.0], "actions_mean": [1.0], "actions_std": [1.0]},
            "needs `state_mean`, a list of numbers",
        ),
    ],
)
def test_wrong_statistics_are_refused(
    pi0: tuple[Path, Any], statistics: dict[str, Any], message: str
) -> None:
    (pi0[0] / "processor_config.json").write_text(json.dumps(statistics))
    with pytest.raises(CheckpointError, match=message):
        LLM(str(pi0[0]), device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dit_config": {**policies.PI0["dit_config"], "num_hidden_layers": 2}},
            "num_hidden_layers=2 must be 3",
        ),
        ({"dit_config": {**policies.PI0["dit_config"], "head_dim": 8}}, "head_dim=8 must be 16"),
        ({"vlm_config": {**policies.PI0["vlm_config"], "projection_dim": 32}}, "projection_dim=32 must be"),
        ({"chunk_size": 0}, "config.chunk_size=0 is not supported"),
        ({"num_inference_steps": -1}, "config.num_inference_steps=-1 is not supported"),
    ],
)
def test_wrong_pi0_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    from transformers import PI0Config

    config = PI0Config(**{**policies.PI0, **changes})
    config.architectures = ["PI0ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), device="cpu", load_format="dummy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 6}, "config.horizon=6 must be a multiple of 4: down_dims halves it 2 times"),
        ({"horizon": 0}, "config.horizon=0 is not supported"),
        ({"n_action_steps": 8}, "config.n_action_steps=8 from step 1 on are more than the horizon 8"),
        ({"down_dims": [16, 20]}, r"config.down_dims=\[16, 20\]: 20 is no multiple of n_groups and of 8"),
        ({"kernel_size": 4}, "config.kernel_size=4 must be odd"),
        ({"diffusion_step_embed_dim": 2}, "config.diffusion_step_embed_dim=2 must be even, and at least 4"),
        ({"condition_type": "cross_attention_film"}, "config.condition_type='cross_attention_film' is not supported"),
        ({"use_down_condition": False}, "config.use_down_condition=False is not supported"),
        ({"use_pc_color": True}, "config.use_pc_color needs points of 6 numbers, and shape_meta has 3"),
        ({"shape_meta": {}}, r"config.shape_meta=\{\} must have obs.point_cloud"),
        ({"noise_scheduler": {"prediction_type": "v_prediction"}}, "prediction_type='v_prediction' is not supported"),
        ({"noise_scheduler": {"num_train_timesteps": 3}}, "num_train_timesteps=3 must be an integer of at least"),
        ({"pointcloud_encoder_cfg": {"final_norm": "batchnorm"}}, "final_norm='batchnorm' is not supported"),
    ],
)  # fmt: skip
def test_wrong_dp3_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**policies.DP3, **changes}))
    with pytest.raises(CheckpointError, match=f"config.json cannot be used: .*{message}"):
        build.load_config(tmp_path)


def test_dp3_repeats_points_and_one_observation(tmp_path: Path) -> None:
    """A cloud is a set; one observation stands for both. One number of a normalizer stands for all."""
    state = policies.dp3(tmp_path)
    own = "normalizer.params_dict.point_cloud"
    state |= {f"{own}.scale": torch.tensor([2.0]), f"{own}.offset": torch.tensor([0.5])}
    save_file(state, tmp_path / "model.safetensors")
    cloud = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    state_of = [0.1] * 7
    import base64

    text = base64.b64encode(np.stack([cloud, cloud]).astype("<f4").tobytes()).decode()
    clouds: list[Any] = [
        cloud,
        cloud[::-1].copy(),
        np.stack([cloud, cloud]),
        np.concatenate([cloud] * 3),
        text,
    ]
    with LLM(str(tmp_path), device="cpu") as llm:
        given = [{"point_cloud": c, "state": state_of} for c in clouds]
        found = llm.act(given, ActionParams(seed=3), use_tqdm=False)
        equal = llm.act(
            {"point_cloud": np.zeros((5, 3)), "state": state_of}, ActionParams(seed=3), use_tqdm=False
        )
    for one in found[1:]:
        np.testing.assert_allclose(one.actions, found[0].actions, atol=1e-6)
    assert found[0].actions.shape == (4, 4) and np.isfinite(equal[0].actions).all()


def test_default_dp3_config_is_the_repository() -> None:
    made = dp3.read_config({})
    timesteps, steps = dp3.schedule(made["noise_scheduler"], 10)
    assert timesteps == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0] and len(steps) == 10
    assert (made["horizon"], made["point_cloud"], made["agent_pos"], made["action"]) == (16, [512, 3], 24, 26)


@pytest.mark.parametrize("name", ["pi0", "dp3"])
def test_random_weights_need_no_checkpoint(tmp_path: Path, name: str) -> None:
    getattr(policies, name)(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    given = policies.observations(name, 1)
    found = []
    for _ in range(2):
        with LLM(str(tmp_path), device="cpu", load_format="dummy") as llm:
            found.append(llm.act(given, ActionParams(seed=0), use_tqdm=False)[0].actions)
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_wrong_parameters_are_refused(tmp_path: Path) -> None:
    policies.dp3(tmp_path)
    given = policies.observations("dp3", 1)[0]
    with LLM(str(tmp_path), device="cpu") as llm:
        for params, message in (
            ({"num_actions": 8}, "num_actions must be at most 7, the model's chunk, got 8"),
            ({"num_steps": 21}, "num_steps must be at most 20, the steps of the model's schedule, got 21"),
            ({"num_steps": 101}, r"num_steps must be at most 100 \(max_steps\), got 101"),
            ({"num_actions": 0}, "num_actions must be an integer of at least 1, got 0"),
            ({"seed": -1}, "seed must be an integer from 0"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.act(given, ActionParams(**params), use_tqdm=False)
        with pytest.raises(ValueError, match=r"is for LLM\.act and /v1/actions"):
            llm.generate("text")
        with pytest.raises(ValueError, match="a robot policy takes ActionParams, got SamplingParams"):
            llm.act(given, SamplingParams(), use_tqdm=False)
        with warnings.catch_warnings():  # float16 has no number as large as float32's largest
            warnings.simplefilter("error")
            half = {name: np.array(values, np.float16) for name, values in given.items()}
            assert np.isfinite(llm.act(half, use_tqdm=False)[0].actions).all()
        with pytest.raises(ValueError, match="observations must be a dict or a list of dicts"):
            llm.act("text", use_tqdm=False)
    with pytest.raises(
        ValueError, match="tensor_parallel_size 2 is not supported for robot policies, only 1"
    ):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "atol"), [("pi0", "float32", 1e-3), ("pi0", "bfloat16", 0.15), ("dp3", "auto", 1e-3)]
)
def test_graphs_equal_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, atol: float
) -> None:
    """Batches of one to eight: the first run is eager, later ones replay graphs with other values."""
    getattr(policies, name)(tmp_path)
    given = policies.observations(name, 8)
    params = [ActionParams(seed=i) for i in range(8)]
    with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        want = [o.actions for o in llm.act(given, params, use_tqdm=False)]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with LLM(str(tmp_path), device="cuda", dtype=dtype) as llm:
        graphs = llm.llm_engine.runner.graphs
        for rows in ([0], [0, 2], [4, 6], [0, 2, 4], [2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], range(8)):
            for _ in range(2):
                found = llm.act([given[i] for i in rows], [params[i] for i in rows], use_tqdm=False)
                for i, one in zip(rows, found, strict=True):
                    np.testing.assert_allclose(one.actions, want[i], atol=atol, rtol=atol)
        assert graphs.replays >= 8 and len(graphs) >= 3
