"""Models of libraries that are called with inputs of their own: recommenders, detectors, structures, and renderers.

A library is imported by its own item alone. All inputs follow from a seed, and weights are random and the same in all
processes.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from fk_bench.evaluate.run.hosts.images import Recorded
from fk_bench.evaluate.run.hosts.patched import Patched
from fk_bench.evaluate.run.hosts.weights import redraw
from fk_bench.quality.planting import Planting

Sizes = Mapping[str, Any]
NOISE = 160.0  # of openfold3's first step, in data's deviations: it makes positions comparable with logits


@dataclass(frozen=True)
class Subject:
    """A model of a library.

    target  of fastkernels.patch
    make    make(batch, generator): the input of one call, on the CPU
    call    call(input): the outputs in float32, [batch, ...]; it moves the input to the model
    parts   the modules in whose weights faults are planted, by name
    answer  the output of an input with one request as a metric of quality reads it; None: that of `call`
    """

    target: Any
    make: Callable[[int, torch.Generator], Any]
    call: Callable[[Any], torch.Tensor]
    parts: Mapping[str, torch.nn.Module]
    answer: Callable[[Any], torch.Tensor] | None = None


Build = Callable[[Sizes, Sizes, torch.device, torch.dtype], Subject]


def _ready(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    model = model.eval().requires_grad_(False).to(device, dtype)
    redraw(model)
    return model


def _dlrm(given: Sizes, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    """torchrec's DLRM_DCN. arguments: those of its constructor without the collection, `rows` of the tables, `dim`."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM_DCN

    rest, rows, bag = dict(given), list(given["rows"]), int(sizes["bag"])
    dim = rest.pop("dim")
    del rest["rows"]
    keys = [f"f{i}" for i in range(len(rows))]
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=n, feature_names=[keys[i]])
        for i, n in enumerate(rows)
    ]
    model = _ready(DLRM_DCN(EmbeddingBagCollection(tables, device=device), **rest), device, dtype)

    def make(batch: int, draw: torch.Generator) -> Any:
        dense = torch.randn(batch, rest["dense_in_features"], generator=draw)
        ids = torch.cat([torch.randint(n, (batch * bag,), generator=draw) for n in rows])
        return dense, ids, torch.full((len(rows) * batch,), bag)

    def call(made: Any) -> torch.Tensor:
        dense, ids, lengths = made
        jagged = KeyedJaggedTensor.from_lengths_sync(keys, ids.to(device), lengths.to(device))
        return model(dense.to(device, dtype), jagged)

    return Subject(model, make, call, {"model": model})


def _lightgcn(given: Sizes, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    """torch_geometric's LightGCN. arguments: users, items, edges, embedding_dim, num_layers."""
    from torch_geometric.nn import LightGCN

    users, items, count = given["users"], given["items"], int(sizes["items"])
    model = _ready(LightGCN(users + items, given["embedding_dim"], given["num_layers"]), device, dtype)
    draw = torch.Generator().manual_seed(0)
    one = torch.randint(users, (given["edges"],), generator=draw)
    other = users + torch.randint(items, (given["edges"],), generator=draw)
    edges = torch.stack((torch.cat((one, other)), torch.cat((other, one)))).to(device)

    def make(batch: int, draw: torch.Generator) -> torch.Tensor:
        user = torch.randint(users, (batch, 1), generator=draw).expand(batch, count)
        item = users + torch.randint(items, (batch, count), generator=draw)
        return torch.stack((user.flatten(), item.flatten()))

    def call(pairs: torch.Tensor) -> torch.Tensor:
        return model(edges, pairs.to(device)).view(-1, count)

    return Subject(model, make, call, {"model": model})


def _detector(given: Sizes, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    """A detector of ultralytics. arguments: yaml, its file of the library; request: width, height."""
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp())  # where the library writes its settings
    from ultralytics.nn.tasks import DetectionModel

    model = _ready(DetectionModel(given["yaml"], verbose=False), device, dtype)
    for name, weight in model.named_parameters():
        if name.endswith(
            "dfl.conv.weight"
        ):  # the numbers of the bins: with random ones, boxes have negative sizes
            weight.copy_(torch.arange(float(weight.numel())).view_as(weight))
    if hasattr(model.model[-1], "one2one_cv2"):
        model.end2end = True  # as in the library's predict()
    shape = int(sizes["height"]), int(sizes["width"])

    def make(batch: int, draw: torch.Generator) -> torch.Tensor:
        return torch.rand(batch, 3, *shape, generator=draw)

    def call(images: torch.Tensor) -> torch.Tensor:
        rows = model(images.to(device, dtype))[0].float()  # [B, boxes, corners, score, label]
        scale = torch.tensor([*shape[::-1], *shape[::-1], 1.0, 1.0], device=device)
        return rows[..., : len(scale)] / scale

    return Subject(model, make, call, {"model": model})


def _set(config: Any, given: Sizes) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping):
            _set(config[name], value)
        else:
            config[name] = value


def _structures(given: Sizes, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    """openfold3's model with the library's random features.

    arguments  architecture: fields of the library's `architecture` that differ
    request    tokens, rows of the alignment, templates, recycles, and steps of one rollout
    """
    import numpy as np
    from openfold3.projects.of3_all_atom.config.model_config import model_config
    from openfold3.projects.of3_all_atom.model import OpenFold3
    from openfold3.tests.utils.data_utils import random_of3_features  # shipped in the wheel

    config = deepcopy(model_config)
    shared = config.architecture.shared
    if device.type == "cpu":
        config.settings.memory.eval.use_triton_triangle_kernels = False
    _set(config.architecture, given.get("architecture", {}))
    shared.num_recycles = int(sizes["recycles"])
    shared.diffusion.no_full_rollout_samples, shared.diffusion.no_full_rollout_steps = 1, int(sizes["steps"])
    model = _ready(OpenFold3(config), device, dtype)
    names = {"n_token": "tokens", "n_msa": "rows", "n_templ": "templates"}
    counts = {name: int(sizes[own]) for name, own in names.items()}

    def make(batch: int, draw: torch.Generator) -> list[tuple[int, dict[str, Any]]]:
        made = []
        for _ in range(batch):
            seed = int(torch.randint(1 << 31, (), generator=draw))
            with torch.random.fork_rng([]):
                torch.manual_seed(seed)
                np.random.seed(seed)
                found = random_of3_features(batch_size=1, is_eval=True, **counts)
            made.append((seed, {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}))
        return made

    def run(seed: int, features: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the atoms, and logits of their confidences."""
        torch.manual_seed(seed)  # of the noise
        moved = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in features.items()}
        outputs = model(moved)[1]
        return outputs["atom_positions_predicted"].float(), outputs["plddt_logits"].float()

    def call(made: list[tuple[int, dict[str, Any]]]) -> torch.Tensor:
        found = [run(seed, features) for seed, features in made]
        # Few steps leave positions that are mostly noise.
        return torch.cat([part.flatten() for xyz, confidence in found for part in (xyz / NOISE, confidence)])

    def answer(made: list[tuple[int, dict[str, Any]]]) -> torch.Tensor:
        return run(*made[0])[0].reshape(-1, 3)

    return Subject(model, make, call, {"model": model}, answer)


def _gaussians(given: Sizes, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Subject:
    """gsplat's `rasterization` of a scene. arguments: gaussians, degree; request: width, height."""
    import gsplat

    from fastkernels.overrides.geometry.cases import cameras, scene

    width, height = int(sizes["width"]), int(sizes["height"])
    own = scene(given["gaussians"], torch.Generator().manual_seed(0), given["degree"])
    held = torch.nn.ParameterDict({k: torch.nn.Parameter(v, False) for k, v in vars(own).items()}).to(device)

    def make(batch: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return cameras(batch, width, height, draw)

    def call(made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        views, intrinsics = (t.to(device) for t in made)
        scene_ = held["means"], held["quats"], held["scales"], held["opacities"], held["coeffs"]
        return gsplat.rasterization(
            *scene_, views, intrinsics, width, height, sh_degree=given["degree"], packed=False
        )[0]

    return Subject(gsplat, make, call, {"scene": held})


# Of a workload of requests: {name: (host, its model)}.
MODELS: dict[str, tuple[str, Build]] = {
    "dlrm_dcn": ("torchrec", _dlrm),
    "lightgcn": ("torch_geometric", _lightgcn),
    "detector": ("ultralytics", _detector),
    "openfold3": ("openfold3", _structures),
    "gaussians": ("gsplat", _gaussians),
}


class Library(Recorded, Patched):
    """A model of MODELS, as the library runs it."""

    def __init__(self, options: dict[str, Any]):
        super().__init__(options)
        _, build = MODELS[options["model"]]
        self._device = torch.device("cuda" if options["gpu"] else "cpu")
        torch.manual_seed(0)
        arguments = {"dtype": options["dtype"], **options["arguments"]}
        dtype = getattr(torch, str(arguments.pop("dtype")))
        self.subject = build(arguments, options["request"], self._device, dtype)
        self.target = self.subject.target
        self._inputs: list[Any] = []
        self._outputs = []
        self._planting = Planting(self.subject.parts)

    def prepare(self, batch: int, seed: int, calls: int) -> None:
        """Make the inputs of a round, which depend on the seed alone."""
        draw = torch.Generator().manual_seed(seed)
        self._inputs = [self.subject.make(batch, draw) for _ in range(calls)]
        self._outputs = []

    @torch.inference_mode()
    def run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._outputs = [self.subject.call(made).float().clone() for made in self._inputs]
        if self.options["gpu"]:
            torch.cuda.synchronize()

    def plant(self, fault: str) -> dict[str, Any]:
        """`Planting.answer` of the model."""
        return self._planting.answer(fault)
