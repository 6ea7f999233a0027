"""Structures as text: mmCIF, and PDB for those that fit into its columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fastkernels.models.common.folding.features import Place

FORMATS = ("cif", "pdb")
PLAIN = re.compile(r"[A-Za-z0-9]\S*(?<!['\"])")  # a name that mmCIF has without quotes
PDB_ATOMS, PDB_NUMBERS = 99_999, 9_999  # what five and four columns can hold
COLUMNS = (
    "group_PDB", "id", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id",
    "label_entity_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy",
    "B_iso_or_equiv", "auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num",
)  # fmt: skip


def write(kind: str, places: Sequence[Place], positions: np.ndarray, plddt: np.ndarray) -> str:
    """positions: [A, 3] in angstroms; plddt: [A], 0 to 100. Raises ValueError for another kind, or for too much."""
    if kind not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {kind!r:.80}")
    if not (np.isfinite(positions).all() and np.isfinite(plddt).all()):
        raise ValueError("the structure is NaN: numbers of the input are too large for the model")
    return (_cif if kind == "cif" else _pdb)(places, positions, plddt)


def _quoted(name: str) -> str:
    if PLAIN.fullmatch(name):
        return name
    return f'"{name}"' if '"' not in name else f"'{name}'"


def _entities(places: Sequence[Place]) -> tuple[dict[str, int], dict[str, list[tuple[int, str]]]]:
    """Of chains by name their entity, and their residues. Chains of the same residues are one entity."""
    chains: dict[str, dict[int, str]] = {}
    for place in places:
        chains.setdefault(place.chain, {})[place.number] = place.residue
    known: dict[tuple[str, ...], int] = {}
    entities = {name: known.setdefault(tuple(own.values()), len(known) + 1) for name, own in chains.items()}
    return entities, {name: list(own.items()) for name, own in chains.items()}


def _cif(places: Sequence[Place], positions: np.ndarray, plddt: np.ndarray) -> str:
    entities, chains = _entities(places)
    lines = ["data_structure", "#", "loop_", "_entity.id", "_entity.type"]
    lines += [f"{entity} polymer" for entity in dict.fromkeys(entities.values())]
    lines += ["#", "loop_", "_struct_asym.id", "_struct_asym.entity_id"]
    lines += [f"{name} {entity}" for name, entity in entities.items()]
    lines += ["#", "loop_", "_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"]
    first = {entity: name for name, entity in reversed(entities.items())}
    for entity in dict.fromkeys(entities.values()):
        lines += [f"{entity} {number} {residue}" for number, residue in chains[first[entity]]]
    lines += ["#", "loop_", *(f"_atom_site.{name}" for name in COLUMNS)]
    for i, (place, (x, y, z), b) in enumerate(
        zip(places, positions.tolist(), plddt.tolist(), strict=True), start=1
    ):
        lines.append(
            f"ATOM {i} {place.element} {_quoted(place.atom)} . {place.residue} {place.chain} {entities[place.chain]}"
            f" {place.number} ? {x:.3f} {y:.3f} {z:.3f} 1.00 {b:.2f} {place.number} {place.chain} 1"
        )
    return "\n".join([*lines, "#", ""])


def _pdb(places: Sequence[Place], positions: np.ndarray, plddt: np.ndarray) -> str:
    long = next((p.chain for p in places if len(p.chain) > 1), None)
    numbers = [p.number for p in places]
    most = max(numbers, key=abs)
    if (
        len(places) > PDB_ATOMS
        or long is not None
        or max(numbers) > PDB_NUMBERS
        or min(numbers) < -999
        or positions.max() >= 9999
        or positions.min() <= -999
    ):
        raise ValueError(
            f"format 'pdb' has no room for {len(places)} atoms, residue number {most}"
            f"{'' if long is None else f', the chain id {long!r}'} or places as far as"
            f" {np.abs(positions).max():.0f} angstroms: use 'cif'"
        )
    lines = []
    for i, (place, (x, y, z), b) in enumerate(
        zip(places, positions.tolist(), plddt.tolist(), strict=True), start=1
    ):
        name = place.atom if len(place.atom) > 3 or len(place.element) > 1 else f" {place.atom}"
        lines.append(
            f"ATOM  {i:5d} {name:<4.4} {place.residue:>3.3} {place.chain}{place.number:4d}    {x:8.3f}{y:8.3f}{z:8.3f}"
            f"{1:6.2f}{b:6.2f}          {place.element:>2}"
        )
        if i == len(places) or places[i].chain != place.chain:
            lines.append("TER")
    return "\n".join([*lines, "END", ""])
