"""DP3 (Ze et al., arXiv 2403.03954), the variant simple DP3: actions from point clouds and the robot's state.

Interface: interfaces/policy.py. The denoiser is a UNet over time whose blocks read the observation and the
step through FiLM. Neither depends on the noisy actions, so that all scales and shifts are computed before the first
step. Key names are those of the repository's state dict; config.json is ours, with the names of its `policy` section:

    {"architectures": ["SimpleDP3"], "model_type": "simple_dp3", "dtype": "float32",
     "shape_meta": {"obs": {"point_cloud": {"shape": [512, 3]}, "agent_pos": {"shape": [24]}},
                    "action": {"shape": [26]}},
     "horizon": 16, "n_obs_steps": 2, "n_action_steps": 8, "num_inference_steps": 10, "down_dims": [128, 256, 384], ...}

Fields that are left out are those of simple_dp3.yaml and its task adroit_hammer.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.models.common.descriptions.architecture import Architecture
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.interfaces.policy import Observation, check_fields, numbers
from fastkernels.overrides.conv.conv1d_norm_mish import conv1d_norm_mish
from fastkernels.overrides.conv.convolution import convolution
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.norm.layer_norm import layer_norm

FIELDS = ("point_cloud", "state")
POINTS_OF_A_TOKEN = 64  # of a step's budget: a point costs that much less than a token of a language model
CHANNELS = {False: (64, 128, 256), True: (64, 128, 256, 512)}  # of the point encoder, without and with colors
STATE_CHANNELS = 64
DEFAULTS: dict[str, Any] = {
    "shape_meta": {
        "obs": {"point_cloud": {"shape": [512, 3]}, "agent_pos": {"shape": [24]}}, "action": {"shape": [26]},
    },
    "horizon": 16, "n_obs_steps": 2, "n_action_steps": 8, "num_inference_steps": 10, "diffusion_step_embed_dim": 128,
    "down_dims": [128, 256, 384], "kernel_size": 5, "n_groups": 8, "encoder_output_dim": 64, "use_pc_color": False,
    "condition_type": "film", "use_down_condition": True, "use_mid_condition": True, "use_up_condition": True,
    "obs_as_global_cond": True, "pointnet_type": "pointnet",
    "pointcloud_encoder_cfg": {"use_layernorm": True, "final_norm": "layernorm"}, "noise_scheduler": {},
}  # fmt: skip
SCHEDULER: dict[str, Any] = {
    "_class_name": "DDIMScheduler", "num_train_timesteps": 100, "beta_start": 0.0001, "beta_end": 0.02,
    "beta_schedule": "squaredcos_cap_v2", "clip_sample": True, "clip_sample_range": 1.0, "set_alpha_to_one": True,
    "steps_offset": 0, "prediction_type": "sample", "timestep_spacing": "leading", "variance_type": "fixed_small",
}  # fmt: skip
ONLY: dict[str, tuple[Any, ...]] = {  # values of fields that the model can have
    "condition_type": ("film",), "use_down_condition": (True,), "use_up_condition": (True,),
    "use_mid_condition": (True, False), "obs_as_global_cond": (True,), "pointnet_type": ("pointnet",),
    "use_pc_color": (True, False),
}  # fmt: skip
ONLY_SCHEDULER: dict[str, tuple[Any, ...]] = {
    "_class_name": ("DDIMScheduler", "DDPMScheduler"),
    "beta_schedule": ("squaredcos_cap_v2", "linear", "scaled_linear"),
    "clip_sample": (True, False), "set_alpha_to_one": (True, False), "prediction_type": ("sample", "epsilon"),
    "timestep_spacing": ("leading",), "variance_type": ("fixed_small",),
}  # fmt: skip
NUMBERS = (
    "horizon", "n_obs_steps", "n_action_steps", "num_inference_steps", "diffusion_step_embed_dim", "kernel_size",
    "n_groups", "encoder_output_dim",
)  # fmt: skip


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, checked, with defaults. Raises Unsupported, which names the field and the value."""
    made = {**DEFAULTS, **raw}
    for name in NUMBERS:
        if type(made[name]) is not int or made[name] < 1:
            raise Unsupported(f"config.{name}={made[name]!r} is not supported, only integers above 0")
    _check_only(made, ONLY, "config")
    dims = made["down_dims"]
    if not isinstance(dims, list) or not dims or any(type(n) is not int or n < 1 for n in dims):
        raise Unsupported(f"config.down_dims={dims!r} is not supported, only a list of integers above 0")
    if uneven := [n for n in dims if n % made["n_groups"] or n % 8]:  # the last block has 8 groups
        raise Unsupported(f"config.down_dims={dims!r}: {uneven[0]} is no multiple of n_groups and of 8")
    if made["kernel_size"] % 2 == 0:
        raise Unsupported(f"config.kernel_size={made['kernel_size']} must be odd")
    if made["diffusion_step_embed_dim"] % 2 or made["diffusion_step_embed_dim"] < 4:
        raise Unsupported(
            f"config.diffusion_step_embed_dim={made['diffusion_step_embed_dim']} must be even, and at least 4"
        )
    if made["horizon"] % (halvings := 2 ** (len(dims) - 1)):
        raise Unsupported(
            f"config.horizon={made['horizon']} must be a multiple of {halvings}: down_dims halves it"
            f" {len(dims) - 1} times"
        )
    if made["n_obs_steps"] - 1 + made["n_action_steps"] > made["horizon"]:
        raise Unsupported(
            f"config.n_action_steps={made['n_action_steps']} from step {made['n_obs_steps'] - 1} on are more than the"
            f" horizon {made['horizon']}"
        )
    made["point_cloud"], made["agent_pos"], made["action"] = _shapes(made)
    made["pointcloud_encoder_cfg"] = _encoder(made["pointcloud_encoder_cfg"])
    made["noise_scheduler"] = _scheduler(made["noise_scheduler"], made["num_inference_steps"])
    return made


def _check_only(made: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for name, values in only.items():
        if not any(made[name] == v and type(made[name]) is type(v) for v in values):
            raise Unsupported(
                f"{where}.{name}={made[name]!r} is not supported, only {', '.join(map(repr, values))}"
            )


def _shapes(made: Mapping[str, Any]) -> tuple[list[int], int, int]:
    meta = made["shape_meta"]
    try:
        observed = meta["obs"]
        cloud, state, action = (
            part["shape"] for part in (observed["point_cloud"], observed["agent_pos"], meta["action"])
        )
        whole = all(type(n) is int and n > 0 for n in (*cloud, *state, *action))
    except (KeyError, TypeError) as error:
        raise Unsupported(
            f"config.shape_meta={reprlib.repr(meta)} must have obs.point_cloud, obs.agent_pos and action, each with a"
            " `shape`"
        ) from error
    if unknown := [name for name in observed if name in ("imagin_robot",)]:
        raise Unsupported(f"config.shape_meta has the observation {unknown[0]!r}, which is not supported")
    if not whole or len(cloud) != 2 or len(state) != 1 or len(action) not in (1, 2) or cloud[1] < 3:
        raise Unsupported(
            f"config.shape_meta: shapes {cloud}, {state} and {action} must be [points, 3 or more], [numbers] and"
            " [numbers]"
        )
    if made["use_pc_color"] and cloud[1] < 6:
        raise Unsupported(f"config.use_pc_color needs points of 6 numbers, and shape_meta has {cloud[1]}")
    return list(cloud), state[0], math.prod(action)


def _encoder(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise Unsupported(f"config.pointcloud_encoder_cfg={given!r} is not an object")
    made = {"use_layernorm": False, "final_norm": "none", "use_projection": True, **given}
    only = {"use_layernorm": (True, False), "final_norm": ("layernorm", "none"), "use_projection": (True,)}
    _check_only(made, only, "config.pointcloud_encoder_cfg")
    return made


def _scheduler(given: Any, steps: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise Unsupported(f"config.noise_scheduler={given!r} is not an object")
    made = {**SCHEDULER, **given}
    if "_target_" in given and "_class_name" not in given:  # as the repository's yaml has it
        made["_class_name"] = str(given["_target_"]).rpartition(".")[2]
    _check_only(made, ONLY_SCHEDULER, "config.noise_scheduler")
    trained = made["num_train_timesteps"]
    if type(trained) is not int or not steps <= trained:
        raise Unsupported(
            f"config.noise_scheduler.num_train_timesteps={trained!r} must be an integer of at least"
            f" num_inference_steps {steps}"
        )
    return made


class Affine(nn.Module):
    """y = x * scale + offset of one field; a checkpoint may have one number for all."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("scale", "offset"):
            parameter = nn.Parameter(torch.empty(size))
            parameter.weight_loader = _of_field  # type: ignore[attr-defined]
            parameter.fill = 1.0 if name == "scale" else 0.0  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.offset, x, self.scale)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        return (y - self.offset) / self.scale


def _of_field(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1 and len(tensor) > len(parameter):  # colors that the model does not read
        tensor = tensor[: len(parameter)]
    if tensor.shape not in ((1,), parameter.shape):
        raise ValueError(f"expected shape {tuple(parameter.shape)} or (1,)")
    parameter.data.copy_(tensor)


class LinearNormalizer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        points = 6 if config.use_pc_color else 3
        self.params_dict: Any = nn.ModuleDict(
            {
                "point_cloud": Affine(points),
                "agent_pos": Affine(config.agent_pos),
                "action": Affine(config.action),
            }
        )


class PointNetEncoder(nn.Module):
    """Points [B, N, 3 or 6] to [B, out]: an MLP of each point, the largest of each channel, a projection."""

    ops = ("linear", "layer_norm")

    def __init__(self, config: Any) -> None:
        super().__init__()
        colored, options = config.use_pc_color, config.pointcloud_encoder_cfg
        parts: list[nn.Module] = []
        size = 6 if colored else 3
        for width in CHANNELS[colored]:
            normed = options["use_layernorm"] and width != 512
            parts += [nn.Linear(size, width), nn.LayerNorm(width) if normed else nn.Identity(), nn.ReLU()]
            size = width
        self.mlp = nn.Sequential(*parts[: -2 if colored else None])
        last = nn.Linear(size, config.encoder_output_dim)
        normed = options["final_norm"] == "layernorm"
        self.final_projection = (
            nn.Sequential(last, nn.LayerNorm(config.encoder_output_dim)) if normed else last
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return chain(self.final_projection, chain(self.mlp, points).amax(1))


def chain(parts: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x through linear layers, layer norms and ReLUs, by our ops."""
    for part in parts if isinstance(parts, nn.Sequential) else (parts,):
        if isinstance(part, nn.Linear):
            x = linear(x, part.weight, part.bias)
        elif isinstance(part, nn.LayerNorm):
            x = layer_norm(x, part.weight, part.bias, part.eps)
        elif isinstance(part, nn.ReLU):
            x = x.relu()
    return x


class DP3Encoder(nn.Module):
    """Points [B, N, 3 or 6] and states [B, numbers] to features [B, encoder_output_dim + 64]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.extractor = PointNetEncoder(config)
        self.state_mlp = nn.Sequential(
            nn.Linear(config.agent_pos, STATE_CHANNELS), nn.ReLU(), nn.Linear(STATE_CHANNELS, STATE_CHANNELS)
        )

    def forward(self, points: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.extractor(points), chain(self.state_mlp, state)), dim=-1)


class Conv1dBlock(nn.Module):
    """Convolution, group norm, Mish, then FiLM or a residual."""

    ops = ("conv1d_norm_mish",)

    def __init__(self, channels: int, out: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(channels, out, kernel_size, padding=kernel_size // 2), nn.GroupNorm(groups, out)
        )

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, shift: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        conv, norm = self.block
        return conv1d_norm_mish(
            x,
            conv.weight,
            conv.bias,
            norm.weight,
            norm.bias,
            norm.num_groups,
            norm.eps,
            scale,
            shift,
            residual,
        )


class Conv(nn.Module):
    """A convolution over time: of stride 2, transposed, or of one place."""

    ops = ("convolution",)

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convolve(self.conv, x)


def convolve(conv: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A convolution's result, by our op."""
    transposed = isinstance(conv, nn.ConvTranspose1d)
    return convolution(
        x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups, transposed
    )


class ConditionalResidualBlock1D(nn.Module):
    """x [B, C, L] to [B, out, L]; film: [B, 2 * out], scales and shifts, or None."""

    ops = ("convolution",)

    def __init__(self, channels: int, out: int, config: Any, conditions: int) -> None:
        super().__init__()
        kernel_size, groups = config.kernel_size, config.n_groups
        self.blocks = nn.ModuleList(
            [Conv1dBlock(channels, out, kernel_size, groups), Conv1dBlock(out, out, kernel_size, groups)]
        )
        self.cond_encoder: Any = nn.Sequential(nn.Mish(), nn.Linear(conditions, 2 * out))
        self.residual_conv = nn.Conv1d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, film: torch.Tensor | None) -> torch.Tensor:
        scale, shift = (None, None) if film is None else film.chunk(2, dim=1)
        kept = convolve(self.residual_conv, x) if isinstance(self.residual_conv, nn.Conv1d) else x
        return self.blocks[1](self.blocks[0](x, scale, shift), residual=kept)


class ConditionalUnet1D(nn.Module):
    """The denoiser: noisy actions [B, action, horizon] to the same, with each block's FiLM."""

    def __init__(self, config: Any, observed: int) -> None:
        super().__init__()
        size, dims = config.diffusion_step_embed_dim, config.down_dims
        self.step_size = size
        self.diffusion_step_encoder: Any = nn.Sequential(
            nn.Identity(), nn.Linear(size, 4 * size), nn.Mish(), nn.Linear(4 * size, size)
        )
        pairs = list(zip([config.action, *dims], dims, strict=False))
        conditions = size + observed
        self.down_modules: Any = nn.ModuleList()
        for i, (a, b) in enumerate(pairs):
            last = i + 1 == len(pairs)
            half = nn.Identity() if last else Conv(nn.Conv1d(b, b, 3, 2, 1))
            self.down_modules.append(
                nn.ModuleList([ConditionalResidualBlock1D(a, b, config, conditions), half])
            )
        self.mid_modules: Any = nn.ModuleList(
            [ConditionalResidualBlock1D(dims[-1], dims[-1], config, conditions)]
        )
        self.use_mid_condition: bool = config.use_mid_condition
        self.up_modules: Any = nn.ModuleList()
        for a, b in reversed(pairs[1:]):
            double = Conv(nn.ConvTranspose1d(a, a, 4, 2, 1))
            self.up_modules.append(
                nn.ModuleList([ConditionalResidualBlock1D(2 * b, a, config, conditions), double])
            )
        self.final_conv: Any = nn.Sequential(
            Conv1dBlock(dims[0], dims[0], config.kernel_size, 8), nn.Conv1d(dims[0], config.action, 1)
        )

    def residual_blocks(self) -> list[ConditionalResidualBlock1D]:
        """The blocks with FiLM in the order in which they run."""
        groups = (self.down_modules, [(block,) for block in self.mid_modules], self.up_modules)
        return [part[0] for group in groups for part in group]

    def embed_steps(self, timesteps: torch.Tensor) -> torch.Tensor:
        """[steps, diffusion_step_embed_dim]."""
        _, first, _, second = self.diffusion_step_encoder
        waves = timestep_embedding(timesteps, self.step_size).to(first.weight.dtype)
        return linear(F.mish(linear(waves, first.weight, first.bias)), second.weight, second.bias)

    def forward(self, x: torch.Tensor, films: Sequence[torch.Tensor]) -> torch.Tensor:
        given = iter(films)
        kept: list[torch.Tensor] = []
        for block, half in self.down_modules:
            x = block(x, next(given))
            kept.append(x)
            x = half(x)
        for block in self.mid_modules:
            film = next(given)
            x = block(x, film if self.use_mid_condition else None)
        for block, double in self.up_modules:
            x = double(block(torch.cat((x, kept.pop()), dim=1), next(given)))
        return convolve(self.final_conv[1], self.final_conv[0](x))


class SimpleDP3(nn.Module):
    """config: the fields of read_config."""

    keeps_dtype = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        observed = config.n_obs_steps * (config.encoder_output_dim + STATE_CHANNELS)
        self.obs_encoder = DP3Encoder(config)
        self.model = ConditionalUnet1D(config, observed)
        self.normalizer = LinearNormalizer(config)
        # The actions of the steps from the last observation on
        self.first = config.n_obs_steps - 1
        self.chunk = (config.horizon - self.first, config.action)
        self.num_actions, self.num_steps = config.n_action_steps, config.num_inference_steps
        self.point_size = 6 if config.use_pc_color else 3

    def ready(self, folder: Path, dummy: bool) -> None:
        """See policy.py."""
        self.refresh()

    def refresh(self) -> None:
        """See policy.py: the layers of all blocks' FiLM as one, for the step and for the observation."""
        layers = [block.cond_encoder[1] for block in self.model.residual_blocks()]
        self.film_sizes = [layer.out_features for layer in layers]
        weight, self._film_bias = torch.cat([x.weight for x in layers]), torch.cat([x.bias for x in layers])
        size = self.config.diffusion_step_embed_dim
        self._of_step, self._of_observation = (
            part.contiguous() for part in weight.tensor_split([size], dim=1)
        )
        self._schedules: dict[int, tuple[torch.Tensor, list[Step]]] = {}

    def read(self, given: Any) -> Observation:
        """See policy.py. given: {"point_cloud": [observations, points, 3], "state": [observations, numbers]}.

        One observation stands for all, as at the start of an episode. With colors, a point has 6 numbers.
        """
        check_fields(given, FIELDS)
        config, steps = self.config, self.config.n_obs_steps
        width, numbers_of = self.point_size, config.agent_pos
        cloud = self._observed(given, "point_cloud", (None, width), f"points of {width} numbers", 3)
        state = self._observed(given, "state", (numbers_of,), f"{numbers_of} numbers", 2)
        size = -(-steps * cloud.shape[1] // POINTS_OF_A_TOKEN)
        return Observation({"points": cloud, "state": state}, size)

    def _observed(
        self, given: Mapping[str, Any], name: str, shape: tuple[int | None, ...], what: str, dims: int
    ) -> np.ndarray:
        value, steps = given.get(name), self.config.n_obs_steps
        said = f"{what}, of one observation or of {steps}"
        if value is None:
            raise ValueError(f"the input needs `{name}`: {said}")
        if isinstance(value, str):
            return numbers(value, name, (steps, *shape), f"{what}, of {steps} observations")
        if _depth(value) != dims:
            found = numbers(value, name, shape, said)[None]
        else:
            found = numbers(value, name, (None, *shape), said)
        if len(found) not in (1, steps):
            raise ValueError(f"the input has {len(found)} observations in `{name}`: it needs {said}")
        return np.repeat(found, steps // len(found), axis=0)

    def check_steps(self, steps: int) -> None:
        """See policy.py."""
        most = self.config.noise_scheduler["num_train_timesteps"]
        if steps > most:
            raise ValueError(
                f"num_steps must be at most {most}, the steps of the model's schedule, got {steps}"
            )

    def noise(self, seed: int, steps: int) -> np.ndarray:
        """See policy.py: [1 + steps, action, horizon], of the first step and, for DDPM, of those that follow."""
        generator = torch.Generator().manual_seed(seed)
        more = steps if self.config.noise_scheduler["_class_name"] == "DDPMScheduler" else 0
        shape = (1 + more, self.config.horizon, self.config.action)
        return torch.randn(shape, generator=generator).transpose(1, 2).contiguous().numpy()

    def stack(self, observations: Sequence[Observation]) -> dict[str, np.ndarray]:
        """See policy.py. Smaller clouds repeat a point, which changes no channel's largest value."""
        clouds = [o.arrays["points"] for o in observations]
        most = max(cloud.shape[1] for cloud in clouds)
        if min(cloud.shape[1] for cloud in clouds) != most:
            most = -(-most // POINTS_OF_A_TOKEN) * POINTS_OF_A_TOKEN  # fewer shapes, so fewer graphs
        widths = [((0, 0), (0, most - cloud.shape[1]), (0, 0)) for cloud in clouds]
        points = np.stack([np.pad(c, w, mode="edge") for c, w in zip(clouds, widths, strict=True)])
        return {"points": points, "state": np.stack([o.arrays["state"] for o in observations])}

    def forward(
        self, steps: int, noise: torch.Tensor, points: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """noise: [B, 1 or more, action, horizon]; points [B, n_obs_steps, N, 3 or 6]; state [B, n_obs_steps, numbers].

        Returns [B, *self.chunk] in float32.
        """
        dtype = self._of_step.dtype
        features = self.observe(points.to(dtype), state.to(dtype))
        films, coefficients = self.films(steps, features)
        x = noise[:, 0].float()
        for step, own in enumerate(coefficients):
            x = own.next(x, self.model(x.to(dtype), films[step]).float())
            if own.noise:
                x = x.add(noise[:, 1 + step].float(), alpha=own.noise)
        found = self.normalizer.params_dict["action"].inverse(x.transpose(1, 2).to(dtype))
        return found[:, self.first :].float()

    def observe(self, points: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Features of all observations of a row: [B, n_obs_steps * (encoder_output_dim + 64)]."""
        fields = self.normalizer.params_dict
        features = self.obs_encoder(
            fields["point_cloud"](points).flatten(0, 1), fields["agent_pos"](state).flatten(0, 1)
        )
        return features.view(len(points), -1)

    def films(self, steps: int, features: torch.Tensor) -> tuple[list[tuple[torch.Tensor, ...]], list[Step]]:
        """Scales and shifts [B, 2 * out] of each step's blocks, and the step itself."""
        if steps not in self._schedules:  # once, outside of graphs
            places, made = schedule(self.config.noise_scheduler, steps)
            self._schedules[steps] = torch.tensor(places, device=features.device), made
        timesteps, coefficients = self._schedules[steps]
        of_steps = linear(F.mish(self.model.embed_steps(timesteps)), self._of_step, self._film_bias)
        of_rows = linear(F.mish(features), self._of_observation)
        whole = of_steps[:, None] + of_rows  # [steps, B, sum of 2 * out]
        return [step.split(self.film_sizes, dim=1) for step in whole], coefficients


@dataclass(frozen=True)
class Step:
    """A step of DDIM or DDPM: the sample is of_x * x + of_output * output, within +-limit if there is one.

    The next x is keep * x + add * output + weight * sample, plus new noise times `noise`.
    """

    of_x: float
    of_output: float
    limit: float | None
    keep: float
    add: float
    weight: float
    noise: float = 0.0

    def next(self, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """x and the model's output [...] to the next x, without the new noise."""
        sample = output if self.of_x == 0 else (x * self.of_x).add_(output, alpha=self.of_output)
        if self.limit is not None:
            sample = sample.clamp(-self.limit, self.limit)
        found = sample * self.weight
        for value, factor in ((x, self.keep), (output, self.add)):
            if factor:
                found.add_(value, alpha=factor)
        return found


def schedule(scheduler: Mapping[str, Any], steps: int) -> tuple[list[int], list[Step]]:
    """The timesteps of diffusers' DDIMScheduler (arXiv 2010.02502) or DDPMScheduler (arXiv 2006.11239), and the steps.

    scheduler: its config, with all fields of SCHEDULER.
    """
    trained = scheduler["num_train_timesteps"]
    products = (1.0 - _betas(scheduler)).cumprod(0).tolist()
    jump = trained // steps
    timesteps = [i * jump + scheduler["steps_offset"] for i in reversed(range(steps))]
    ddim = scheduler["_class_name"] == "DDIMScheduler"
    last = 1.0 if not ddim or scheduler["set_alpha_to_one"] else products[0]
    limit = scheduler["clip_sample_range"] if scheduler["clip_sample"] else None
    made = []
    for t in timesteps:
        now, after = products[t], products[t - jump] if t >= jump else last
        signal, noise = now**0.5, (1 - now) ** 0.5
        of_sample = scheduler["prediction_type"] == "sample"
        of_x, of_output = (0.0, 1.0) if of_sample else (1 / signal, -noise / signal)
        if ddim:  # what the step keeps of the noise that the model has found, before the sample is clipped
            left = (1 - after) ** 0.5
            keep, add = (left / noise, -left * signal / noise) if of_sample else (0.0, left)
            made.append(Step(of_x, of_output, limit, keep, add, after**0.5))
        else:
            beta = 1 - now / after
            keep, weight = (now / after) ** 0.5 * (1 - after) / (1 - now), after**0.5 * beta / (1 - now)
            variance = max((1 - after) / (1 - now) * beta, 1e-20)
            made.append(Step(of_x, of_output, limit, keep, 0.0, weight, variance**0.5 if t else 0.0))
    return timesteps, made


def _betas(scheduler: Mapping[str, Any]) -> torch.Tensor:
    count, kind = scheduler["num_train_timesteps"], scheduler["beta_schedule"]
    first, last = scheduler["beta_start"], scheduler["beta_end"]
    if kind == "linear":
        return torch.linspace(first, last, count, dtype=torch.float32)
    if kind == "scaled_linear":
        return torch.linspace(first**0.5, last**0.5, count, dtype=torch.float32) ** 2

    def product(at: float) -> float:
        return math.cos((at + 0.008) / 1.008 * math.pi / 2) ** 2

    found = [min(1 - product((i + 1) / count) / product(i / count), 0.999) for i in range(count)]
    return torch.tensor(found, dtype=torch.float32)


def _depth(value: Any) -> int:
    """The number of dimensions of nested lists, by their first elements, or of an array."""
    if isinstance(value, np.ndarray):
        return value.ndim
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + (_depth(value[0]) if value else 0)


ARCH = Architecture(
    names=("SimpleDP3",),
    category="robotics",
    model="SimpleDP3",
    runner="Act",
    inputs="points",
    model_type="simple_dp3",
    packed={},
    unused=("*_dummy_variable", "*.input_stats.*", "normalizer.params_dict.[!pa]*"),
    own_config="fastkernels.models.robotics.dp3:read_config",
)
