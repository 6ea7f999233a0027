"""OpenFold3: against values that openfold3 0.5.0 computed, padding, its text, and inputs that are refused.

tests/integrations/structures compares all results with openfold3. `pytest tests/models/test_openfold3.py -m gpu` runs
the CUDA graphs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import structures

from fastkernels import LLM, FoldParams
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.folding import features, residues, structure_text
from fastkernels.models.common.plans import build
from fastkernels.models.science import openfold3

RECORDED = json.loads((Path(structures.__file__).parent / "openfold3.json").read_text())
SEED = 5
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return structures.checkpoint(tmp_path_factory.mktemp("openfold3"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(str(folder), device="cpu", max_model_len=64, max_images=4) as made:
        yield made


def close(found: Any, name: str, step: int, tolerance: float = 1e-4) -> None:
    want = torch.tensor(RECORDED[name])
    torch.testing.assert_close(
        torch.as_tensor(found).flatten()[::step],
        want,
        rtol=tolerance,
        atol=tolerance * float(want.abs().max()),
    )


def trunk(model: Any, found: features.Features, tokens: int = 0, atoms: int = 0) -> tuple[Any, Any, Any, Any]:
    arrays = found.padded(tokens or found.tokens, atoms or found.atoms)
    inputs = model.inputs({name: torch.from_numpy(array) for name, array in arrays.items()})
    begin = model.embed(inputs)
    s, z = torch.zeros_like(begin[1]), torch.zeros_like(begin[2])
    for _ in range(2):
        s, z = model.cycle(inputs, begin, s, z, torch.arange(found.sequences))
    return inputs, begin[0], s, z


def test_results_equal_the_recorded_ones(folder: Path) -> None:
    """The trunk, four denoising steps with the reference's noise, and the confidence"""
    model = build.build(folder, build.load_config(folder), CPU, torch.float32)
    found = model.read(structures.features_of(structures.batch()))
    generator = torch.Generator().manual_seed(SEED)
    torch.randint(1, (2,), generator=generator)  # as check_models.py

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((2, *shape), generator=generator)

    with torch.inference_mode():
        inputs, s_input, s, z = trunk(model, found)
        close(s, "si_trunk", 37)
        close(z, "zij_trunk", 997)
        given = model.condition(inputs, s_input, s, z, 2)
        x = model.noise_levels(4)[0] * normal(found.atoms, 3)
        for step in model.schedule(4):
            x = model.denoise(
                given.like(given.tensors()), x, step, normal(4), normal(3), normal(found.atoms, 3)
            )
        close(x, "atom_positions_predicted", 53)
        heads = [model.confidence(inputs, s_input, s, z, one) for one in x]
        for name, step in (("plddt", 1499), ("pae", 4999)):
            close(torch.stack([one[name] for one in heads]), f"{name}_logits", step)


def test_padding_changes_no_result(folder: Path) -> None:
    model = build.build(folder, build.load_config(folder), CPU, torch.float32)
    found = features.read({"chains": structures.CHAINS}, 23)
    n, atoms = found.tokens, found.atoms
    results = []
    with torch.inference_mode():
        for tokens, places in ((n, atoms), (n + 2, atoms + 26), (n, atoms + 5)):
            inputs, s_input, s, z = trunk(model, found, tokens, places)
            given = model.condition(inputs, s_input, s, z, 2)
            generator = torch.Generator().manual_seed(1)
            noise = torch.zeros(2, places, 3)
            noise[:, :atoms] = torch.randn(2, atoms, 3, generator=generator)
            turn, shift = (torch.randn(2, k, generator=generator) for k in (4, 3))
            x = model.denoise(given, 90 * noise, model.schedule(4)[1], turn, shift, noise)
            heads = model.confidence(inputs, s_input, s, z, x[0])
            results.append(
                (s[:, :n], z[:, :n, :n], x[:, :atoms], heads["plddt"][:atoms], heads["pae"][:n, :n])
            )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def test_seed_decides_the_structures(llm: LLM) -> None:
    given = {"chains": [{"sequence": "MKVAGW", "count": 2}]}
    first, other, again = (
        llm.fold(given, FoldParams(num_samples=2, num_steps=21, seed=seed), use_tqdm=False)[0]
        for seed in (1, 2, 1)
    )
    places = first.structures.positions
    assert places.shape == (2, 2 * 47, 3) and np.isfinite(places).all()
    np.testing.assert_array_equal(places, again.structures.positions)
    assert np.abs(places - other.structures.positions).max() > 1
    plddt, pae, iptm = first.structures.plddt, first.structures.pae, first.structures.iptm
    assert pae is not None and pae.shape == (2, 12, 12) and iptm is not None and len(iptm) == 2
    assert plddt.shape == (2, 94) and (plddt > 0).all() and (plddt < 100).all()
    assert first.num_tokens == 12 and first.seed == 1


def test_one_residue_of_each_kind_folds(llm: LLM) -> None:
    kinds = {"protein": ("G", 4), "rna": ("u", 20), "dna": ("A", 21)}
    chains = [{"chains": [{"sequence": letter, "kind": kind}]} for kind, (letter, _) in kinds.items()]
    found = llm.fold(chains, FoldParams(num_samples=1, num_steps=2, num_recycles=0, seed=3), use_tqdm=False)
    assert [o.structures.positions.shape for o in found] == [(1, atoms, 3) for _, atoms in kinds.values()]
    assert found[0].structures.iptm is None and found[0].structures.ptm is not None


@pytest.mark.parametrize("kind", structure_text.FORMATS)
def test_text_has_the_atoms(llm: LLM, kind: str) -> None:
    chains = [{"sequence": "MW", "id": "Q"}, {"sequence": "GU", "kind": "rna"}]
    found = llm.fold({"chains": chains}, FoldParams(num_samples=1, num_steps=2, seed=3), use_tqdm=False)[0]
    found.structures.positions[:] = np.arange(found.structures.positions.size).reshape(1, -1, 3) / 7 - 5
    lines = [line for line in found.text(0, kind).splitlines() if line.startswith("ATOM")]
    names = [a.name for residue in ("MET", "TRP", "G", "U") for a in residues.atoms()[residue]]
    assert len(lines) == len(names)
    for i, (line, name) in enumerate(zip(lines, names, strict=True)):
        if kind == "cif":
            fields = line.split()
            atom, place, b, chain = fields[3].strip('"'), fields[10:13], fields[14], fields[16]
        else:
            atom, b, chain = line[12:16].strip(), line[60:66], line[21]
            place = [line[30 + 8 * k : 38 + 8 * k] for k in range(3)]
        assert atom == name and chain == ("Q" if i < 22 else "A")
        np.testing.assert_allclose([float(v) for v in place], found.structures.positions[0, i], atol=6e-4)
        assert abs(float(b) - found.structures.plddt[0, i]) < 6e-3
    with pytest.raises(ValueError, match="sample must be an integer from 0 to 0, got 1"):
        found.text(1, kind)


def test_pdb_without_room_is_refused() -> None:
    place = features.Place("CA", "C", "ALA", "AA", 1)
    with pytest.raises(ValueError, match=r"no room .* the chain id 'AA'.*: use 'cif'"):
        structure_text.write("pdb", [place], np.zeros((1, 3)), np.zeros(1))
    with pytest.raises(ValueError, match="format must be one of cif, pdb, got 'xyz'"):
        structure_text.write("xyz", [place], np.zeros((1, 3)), np.zeros(1))


def test_numbers_below_the_columns_of_pdb_are_refused() -> None:
    place = features.Place("CA", "C", "ALA", "A", -1000)
    with pytest.raises(ValueError, match="no room for 1 atoms, residue number -1000"):
        structure_text.write("pdb", [place], np.zeros((1, 3)), np.zeros(1))


@pytest.mark.parametrize("kind", ["cif", "pdb"])
def test_nan_is_no_text(kind: str) -> None:
    place = features.Place("CA", "C", "ALA", "A", 1)
    with pytest.raises(ValueError, match="the structure is NaN"):
        structure_text.write(kind, [place], np.full((1, 3), np.nan), np.zeros(1))


@pytest.mark.parametrize(
    ("atom", "written"), [("C A", '"C A"'), ("O5'", '"O5\'"'), ('A"', "'A\"'"), ("#C", '"#C"')]
)
def test_unusual_names_are_quoted_in_mmcif(atom: str, written: str) -> None:
    text = structure_text.write(
        "cif", [features.Place(atom, "C", "ALA", "A", 1)], np.zeros((1, 3)), np.zeros(1)
    )
    assert f"ATOM 1 C {written} . ALA A" in text


def test_null_is_the_default_of_a_chain() -> None:
    plain = features.read({"chains": [{"sequence": "MK"}]}, 23)
    same = features.read({"chains": [{"sequence": "MK", "kind": None, "count": None, "id": None}]}, 23)
    assert plain.places == same.places


def _features(**changes: Any) -> dict[str, Any]:
    return {"features": {**structures.features_of(structures.batch())["features"], **changes}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "must be an object with `chains` or `features`, got 3"),
        ({}, "needs either `chains` or `features`"),
        ({"chains": [], "more": 1}, "unknown field 'more'"),
        ({"chains": []}, "with at least one, got \\[\\]"),
        ({"chains": ["MKV"]}, "as chain 0 'MKV', which is no object"),
        ({"chains": [{"sequence": ""}]}, "letters of at least one residue, got ''"),
        ({"chains": [{"sequence": "MK"}, {"sequence": "MKZV"}]}, "in chain 1 the letter 'Z' at position 3"),
        ({"chains": [{"sequence": "MKX"}]}, "the letter 'X' at position 3"),
        ({"chains": [{"sequence": "ACGT", "kind": "rna"}]}, "the letter 'T' at position 4; .* ACGU"),
        ({"chains": [{"sequence": "C", "kind": "ligand"}]}, "kind 'ligand', which is none of protein, rna, dna"),
        ({"chains": [{"sequence": "M" * 20_000}]}, "has 20000 residues, and a request may have 64"),
        ({"chains": [{"sequence": "MKV", "count": 30}]}, "has 90 residues"),
        ({"chains": [{"sequence": "M", "count": 0}]}, "count 0: an integer from 1 to 128"),
        ({"chains": [{"sequence": "M", "id": "A"}, {"sequence": "K", "id": "A"}]}, "chain id 'A' twice"),
        ({"chains": [{"sequence": "M", "id": "A B"}]}, "id 'A B': 1 to 4 letters and digits"),
        ({"chains": [{"sequence": "M", "id": "é"}]}, "id 'é': 1 to 4 letters and digits"),
        ({"chains": [{"sequence": "M", "smiles": "C"}]}, "unknown field 'smiles'"),
        ({"features": {"msa": [[1]]}}, "has no residue_index, "),
        (_features(ref_pos=np.full((1, 358, 3), np.nan)), "no finite numbers in `ref_pos`"),
        (_features(ref_pos=np.zeros((3, 3))), "ref_charge of shape \\[358\\]|ref_pos of shape"),
        (_features(restype=["ALA"]), "`restype` of <U3: numbers are needed"),
        (_features(num_atoms_per_token=np.full((1, 30), 40)), "each must be from 1 to 23"),
        (_features(token_mask=np.zeros((1, 30))), "padding in `token_mask`"),
        (_features(residue_index=np.full((1, 30), 1e30)), "`residue_index` from 1e\\+30 to 1e\\+30: integers below"),
        (_features(num_atoms_per_token=np.full((1, 30), 1.5)), "`num_atoms_per_token` from 1.5 to 1.5: integers"),
        (_features(cyclic_mask=np.ones((1, 30))), "cyclic chains"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(llm: LLM, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match="^the input .*" + words):
        llm.fold([given], use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"num_samples": 5}, "num_samples must be at most 4"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_recycles": 51}, "num_recycles must be at most 50"),
        ({"num_steps": 101}, "num_steps must be at most 100"),
        ({"seed": -1}, "seed must be an integer from 0"),
    ],
)
def test_wrong_params_are_refused(llm: LLM, params: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.fold({"chains": [{"sequence": "M"}]}, FoldParams(**params), use_tqdm=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pairformer": {"no_blocks": -1}}, "config.architecture.pairformer.no_blocks=-1 must be an integer"),
        ({"pairformer": {"fuse_projection_weights": True}}, "only False"),
        ({"shared": {"c_z": 0}}, "config.architecture.shared.c_z=0 must be an integer of at least 1$"),
        ({"pairformer": 3}, "config.architecture.pairformer=3 is not an object"),
        ({"msa": {"msa_module": {"transition_type": "relu"}}}, "only 'swiglu'"),
    ],
)
def test_wrong_configs_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        openfold3.read_config({**structures.CONFIG, "architecture": changes})


def test_checkpoints_without_a_tensor_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder, missing = (
        structures.checkpoint(tmp_path),
        "pairformer_stack.blocks.0.attn_pair_bias.mha.linear_q.bias",
    )
    state = structures.weights()
    del state[missing]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing):
        LLM(str(folder), device="cpu")


def test_second_copy_of_the_denoiser_may_stand_for_the_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = structures.checkpoint(tmp_path)
    own = "diffusion_module."
    state = {
        f"sample_diffusion.{n}" if n.startswith(own) else n: t for n, t in structures.weights().items()
    } | {"version_tensor": torch.ones(3)}
    save_file(state, folder / "model.safetensors")
    with LLM(str(folder), device="cpu", max_model_len=16) as llm:
        assert len(llm.fold({"chains": [{"sequence": "M"}]}, FoldParams(1, 0, 1, 0), use_tqdm=False)) == 1


def test_random_weights_fold(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with LLM(str(tmp_path), device="cpu", load_format="dummy") as llm:
        found = llm.fold({"chains": [{"sequence": "MK"}]}, FoldParams(1, 0, 2, 0), use_tqdm=False)[0]
    assert np.isfinite(found.structures.positions).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_equal_eager_steps(folder: Path, dtype: str) -> None:
    """Requests of two sizes in turn, so that graphs change their request; and the CPU's structures in float32"""
    chains = [[{"sequence": "MKVAGW", "count": 2}], structures.CHAINS]
    inputs = [{"chains": chains[i % 2]} for i in range(4)]
    params = [FoldParams(num_samples=2, num_steps=30, seed=i) for i in range(4)]
    found = []
    for more in ({"enforce_eager": True}, {}, {"device": "cpu", "dtype": "float32"}):
        with LLM(str(folder), **{"dtype": dtype, "device": "cuda", **more}) as llm:
            found.append([o.structures.positions for o in llm.fold(inputs, params, use_tqdm=False)])
    for eager, graphed, cpu in zip(*found, strict=True):
        scale = np.abs(eager).max()
        np.testing.assert_allclose(graphed, eager, atol=scale * (1e-5 if dtype == "float32" else 1e-2))
        if dtype == "float32":
            np.testing.assert_allclose(eager, cpu, atol=scale * 1e-3)
