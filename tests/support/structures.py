"""A tiny OpenFold3 with random weights, under the reference's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastkernels.models.common.configs.config import plain
from fastkernels.models.science import openfold3

SINGLE, PAIR, TOKEN, INPUTS = 24, 16, 24, 24 + 65
_PAIRS = {"c_hidden_mul": 10, "c_hidden_pair_att": 4, "no_heads_pair": 2}
_PAIRFORMER = {
    "c_s": SINGLE,
    "c_z": PAIR,
    "c_hidden_pair_bias": 6,
    "no_heads_pair_bias": 4,
    "no_blocks": 1,
    **_PAIRS,
}
_ATOMS = {"c_atom": 16, "c_atom_pair": 8, "c_hidden": 4, "no_heads": 4, "no_blocks": 2}
_ENCODER = {**_ATOMS, "c_s": SINGLE, "c_z": PAIR, "c_token": 32}
ARCHITECTURE: dict[str, Any] = {
    "shared": {
        "c_s_input": INPUTS, "c_s": SINGLE, "c_z": PAIR, "num_recycles": 1,
        "diffusion": {"no_full_rollout_samples": 2, "no_full_rollout_steps": 4},
    },
    "input_embedder": {"atom_attn_enc": {**_ENCODER, "c_token": TOKEN}},
    "template": {
        "c_t": 8, "c_z": PAIR,
        "template_pair_stack": {"c_hidden_tri_att": 4, "c_hidden_tri_mul": 8, "no_blocks": 1, "no_heads": 2},
    },
    "msa": {
        "msa_module": {
            "c_m": 12, "c_z": PAIR, "c_hidden_msa_att": 4, "no_heads_msa": 2, "c_hidden_opm": 5, "no_blocks": 2,
            **_PAIRS,
        },
    },
    "pairformer": {**_PAIRFORMER, "no_blocks": 2},
    "diffusion_module": {
        "diffusion_module": {"c_token": 32},
        "diffusion_conditioning": {"c_fourier_emb": 20},
        "atom_attn_enc": _ENCODER,
        "diffusion_transformer": {"c_hidden": 8, "no_heads": 4, "no_blocks": 2},
        "atom_attn_dec": {**_ATOMS, "c_token": 32},
    },
    "heads": {"pairformer_embedding": {"pairformer": _PAIRFORMER}},
}  # fmt: skip
CONFIG = {
    "architectures": ["OpenFold3"], "model_type": "openfold3", "dtype": "float32", "architecture": ARCHITECTURE,
}  # fmt: skip
CHAINS = [
    {"sequence": "MKVAGWTYRNDCQE"}, {"sequence": "HILF", "count": 2}, {"sequence": "ACGU", "kind": "rna"},
    {"sequence": "ACGT", "kind": "dna"},
]  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes of the checkpoint's tensors."""
    with torch.device("meta"):
        model = openfold3.OpenFold3(plain(CONFIG))
    made: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        above, _, last = name.rpartition(".")
        for kind, parameter in module.named_parameters(recurse=False):
            parts = openfold3.ARCH.packed.get(last)
            if parts is None:
                made[f"{name}.{kind}".removeprefix(".")] = tuple(parameter.shape)
                continue
            assert isinstance(module, openfold3.Linear)
            for part, rows in zip(parts, module.parts, strict=True):
                if kind == "weight" or part == "linear_q":
                    made[f"{above}.{part}.{kind}"] = (rows, *parameter.shape[1:])
    return made


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ones; no part of the model is without effect."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in sorted(shapes().items()):
        x = torch.randn(shape, generator=generator)
        norm = "norm" in name.split(".")[-2] and name.endswith("weight")
        made[name] = x * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.2 * x if norm else 0.2 * x
    return made


def checkpoint(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(seed), folder / "model.safetensors")
    return folder


def batch() -> dict[str, torch.Tensor]:
    """Features of CHAINS by the names of openfold3's batch, with an alignment and templates of random values."""
    from fastkernels.models.common.folding import features

    generator = torch.Generator().manual_seed(3)
    found = features.read({"chains": CHAINS}, 23)
    n, atoms, rows, templates = found.tokens, found.atoms, 6, 2
    own = {name: torch.from_numpy(array) for name, array in found.arrays.items()}
    kinds = own["restype"].argmax(-1)
    names = (
        "residue_index", "token_index", "asym_id", "entity_id", "sym_id", "restype", "profile", "deletion_mean",
        "token_mask", "atom_mask", "ref_pos", "ref_charge", "ref_mask", "ref_element", "ref_space_uid",
        "atom_to_token_index",
    )  # fmt: skip
    made = {name: own[name] for name in names}
    counts = torch.bincount(own["atom_to_token_index"], minlength=n)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    def types(*shape: int) -> torch.Tensor:
        return torch.nn.functional.one_hot((rand(*shape) * 32).long(), 32).int()

    mask = torch.ones(rows, n)
    mask[2, 3:] = 0
    made |= {
        "is_protein": (kinds < 21).int(), "is_rna": ((kinds >= 21) & (kinds < 26)).int(),
        "is_dna": ((kinds >= 26) & (kinds < 31)).int(), "is_ligand": torch.zeros(n).int(),
        "is_atomized": torch.zeros(n).int(), "ref_atom_name_chars": own["ref_atom_name_chars"].view(atoms, 4, 64),
        "num_atoms_per_token": counts.int(), "start_atom_index": (counts.cumsum(0) - counts).int(),
        "token_bonds": (rand(n, n) < 0.1).int(), "msa": types(rows, n), "has_deletion": rand(rows, n).round(),
        "deletion_value": rand(rows, n), "msa_mask": mask, "num_paired_seqs": torch.tensor(1),
        "template_restype": types(templates, n), "template_pseudo_beta_mask": rand(templates, n).round(),
        "template_backbone_frame_mask": rand(templates, n).round(),
        "template_distogram": rand(templates, n, n, 39), "template_unit_vector": rand(templates, n, n, 3) - 0.5,
        "cyclic_mask": torch.zeros(n, dtype=torch.bool),
    }  # fmt: skip
    return {name: value[None] for name, value in made.items()}


def features_of(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The input that these features are."""
    from fastkernels.models.common.folding import features

    return {"features": {name: value for name, value in given.items() if name in features.ARRAYS}}
