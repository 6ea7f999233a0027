"""OpenFold3 against openfold3 0.5.0 on a CPU: the same weights, features and noise, in float32.

Run by tests/integrations/test_structures.py. As a program it prints what tests/support/openfold3.json records.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from support import structures

from fastkernels.models.common.plans import build
from fastkernels.models.science.openfold3 import OpenFold3

SEED, SAMPLES, STEPS = 5, 2, 4


def _set(config: Any, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(value, Mapping):
            _set(config[name], value)
        elif name in config:
            config[name] = value


@cache
def reference() -> Any:
    """openfold3's model of the tiny checkpoint."""
    from openfold3.projects.of3_all_atom.config.model_config import model_config
    from openfold3.projects.of3_all_atom.model import OpenFold3 as Reference

    config = model_config.copy_and_resolve_references()
    config.settings.memory.eval.use_triton_triangle_kernels = False
    own = config.architecture
    _set(own, structures.ARCHITECTURE)
    single, pair, inputs = structures.SINGLE, structures.PAIR, structures.INPUTS
    own.input_embedder.update({"c_s_input": inputs, "c_s": single, "c_z": pair})
    own.template.template_pair_embedder.update({"c_in": pair, "c_out": own.template.c_t})
    own.template.template_pair_stack.c_t = own.template.c_t
    own.msa.msa_module_embedder.update({"c_m": own.msa.msa_module.c_m, "c_s_input": inputs})
    diffusion = own.diffusion_module
    diffusion.diffusion_module.c_s = single
    diffusion.diffusion_conditioning.update({"c_s_input": inputs, "c_s": single, "c_z": pair})
    diffusion.diffusion_transformer.update({"c_a": 32, "c_s": single, "c_z": pair})
    own.heads.pairformer_embedding.update({"c_s_input": inputs, "c_z": pair})
    for name in ("pae", "pde", "distogram"):
        own.heads[name].c_z = pair
    for name in ("lddt", "experimentally_resolved"):
        own.heads[name].c_s = single
    model = Reference(config).eval()
    missing, unknown = model.load_state_dict(structures.weights(), strict=False)
    assert not unknown
    assert all(name.startswith("sample_diffusion.") or name == "version_tensor" for name in missing)
    return model


@cache
def predicted() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The batch, and what the reference predicts of it with SEED."""
    batch, model = structures.batch(), reference()
    torch.manual_seed(SEED)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, found = model({name: value.clone() for name, value in batch.items()})
    return batch, found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> OpenFold3:
    folder = structures.checkpoint(tmp_path_factory.mktemp("openfold3"))
    made = build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    assert isinstance(made, OpenFold3)
    return made


def rolled_out(model: OpenFold3) -> dict[str, torch.Tensor]:
    """Results as predicted() has them, of our model with the same random numbers."""
    found = model.read(structures.features_of(structures.batch()))
    with torch.inference_mode():
        inputs = model.inputs({name: torch.from_numpy(array) for name, array in found.arrays.items()})
        begin = model.embed(inputs)
        s, z = torch.zeros_like(begin[1]), torch.zeros_like(begin[2])
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(model.num_recycles + 1):
            torch.randint(1, (1,), generator=generator)  # the reference draws how many sequences it reads
            s, z = model.cycle(inputs, begin, s, z, torch.arange(found.sequences))
        given, schedule = model.condition(inputs, begin[0], s, z, SAMPLES), model.schedule(STEPS)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn((1, SAMPLES, *shape), generator=generator)[0]

        x = model.noise_levels(STEPS)[0] * normal(found.atoms, 3)
        for step in schedule:
            x = model.denoise(given, x, step, normal(4), normal(3), normal(found.atoms, 3))
        made = {"si_trunk": s[0], "zij_trunk": z[0], "atom_positions_predicted": x}
        heads = [model.confidence(inputs, begin[0], s, z, one) for one in x]
    for name in heads[0]:
        made[f"{name}_logits"] = torch.stack([one[name] for one in heads])
    return {**made, "distogram_logits": model.distogram(z)}


def test_openfold3_predicts_what_the_reference_predicts(ours: OpenFold3) -> None:
    _, want = predicted()
    found = rolled_out(ours)
    for name, value in found.items():
        expected = want[name].reshape(value.shape)
        error = float((value - expected).abs().max() / expected.abs().max())
        print(f"{name}: {tuple(value.shape)}, error {error:.1e} of the largest value")
        assert error < 1e-4, name


def test_trained_names_include_the_second_copy(ours: OpenFold3) -> None:
    """The public state dict has the denoiser twice, under sample_diffusion, too."""
    names = {name for name in reference().state_dict() if not name.startswith("sample_diffusion.")}
    assert names - set(structures.shapes()) == {"version_tensor"} and not set(structures.shapes()) - names


if __name__ == "__main__":
    _, found = predicted()
    kept = {
        "si_trunk": found["si_trunk"].flatten()[::37], "zij_trunk": found["zij_trunk"].flatten()[::997],
        "atom_positions_predicted": found["atom_positions_predicted"].flatten()[::53],
        "plddt_logits": found["plddt_logits"].flatten()[::1499], "pae_logits": found["pae_logits"].flatten()[::4999],
    }  # fmt: skip
    print(json.dumps({name: [round(float(v), 5) for v in values] for name, values in kept.items()}))
