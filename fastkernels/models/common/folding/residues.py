"""The standard residues: letters, atoms and reference conformers.

residues.json has, of each residue, its atoms in the order of AlphaFold 3's tokens (supplement, table 13): name,
element, formal charge, and the ideal coordinates of the wwPDB's Chemical Component Dictionary, which is in the public
domain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KINDS = ("protein", "rna", "dna")
# AlphaFold 3's 32 types of residues, in the order of its one-hot vectors
TYPES = (
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE", "LEU", "LYS", "MET", "PHE", "PRO", "SER",
    "THR", "TRP", "TYR", "VAL", "UNK", "A", "G", "C", "U", "N", "DA", "DG", "DC", "DT", "DN", "GAP",
)  # fmt: skip
GAP = len(TYPES) - 1
LETTERS = {
    "protein": dict(zip("ARNDCQEGHILKMFPSTWYV", TYPES, strict=False)),
    "rna": {letter: letter for letter in "AGCU"},
    "dna": {letter: f"D{letter}" for letter in "AGCT"},
}
ELEMENTS = {"C": 6, "N": 7, "O": 8, "P": 15, "S": 16}


@dataclass(frozen=True)
class Atom:
    name: str
    element: str
    charge: int
    place: tuple[float, float, float]  # in angstroms


@cache
def atoms() -> dict[str, tuple[Atom, ...]]:
    """{residue: its heavy atoms without those that only a chain's end has}."""
    found = json.loads(Path(__file__).with_name("residues.json").read_text(encoding="utf-8"))
    return {
        name: tuple(Atom(a, e, charge, (x, y, z)) for a, e, charge, x, y, z in rows)
        for name, rows in found.items()
    }


@cache
def names() -> dict[str, tuple[str, ...]]:
    """{residue: the names of its atoms}, also of those without a conformer."""
    found = {name: tuple(a.name for a in rows) for name, rows in atoms().items()}
    backbone = {"N": "A", "DN": "DA"}  # unknown nucleotides have the others' backbone
    return {
        **found,
        "UNK": ("N", "CA", "C", "O", "CB", "CG"),
        **{
            name: tuple(a for a in found[other] if a == "P" or "P" in a or "'" in a)
            for name, other in backbone.items()
        },
        "GAP": (),
    }


def representative(residue: str) -> int:
    """The place of the atom that stands for a residue in distances: CB (CA of glycine), C4 of purines, C2 of others."""
    own = names()[residue]
    wanted = "CA" if residue == "GLY" else "CB" if "CA" in own else "C4" if "N9" in own else "C2"
    return own.index(wanted) if wanted in own else 0
