"""The input of structure prediction: chains by sequence, or features that openfold3 has made."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastkernels.models.common.folding import residues

MOST_CHAINS = 128
MOST_INTEGER = 2**31
NAMES = 64  # characters of a name that a one-hot vector has: codes 32 to 95
ELEMENTS = 119
FIELDS = ("chains", "features")
CHAIN_FIELDS = ("id", "kind", "sequence", "count")
OTHERS = "alignments, templates, ligands and changed residues need `features`"
# Arrays of openfold3's batch, without the batch dimension: their axes, which are sizes by name or numbers
N, A, S, TT = "tokens", "atoms", "sequences", "templates"
ARRAYS: dict[str, tuple[str | int, ...]] = {
    "residue_index": (N,), "token_index": (N,), "asym_id": (N,), "entity_id": (N,), "sym_id": (N,),
    "restype": (N, 32), "profile": (N, 32), "deletion_mean": (N,), "is_protein": (N,), "is_rna": (N,),
    "is_dna": (N,), "is_atomized": (N,), "token_bonds": (N, N), "num_atoms_per_token": (N,),
    "msa": (S, N, 32), "has_deletion": (S, N), "deletion_value": (S, N), "msa_mask": (S, N),
    "template_restype": (TT, N, 32), "template_pseudo_beta_mask": (TT, N), "template_backbone_frame_mask": (TT, N),
    "template_distogram": (TT, N, N, 39), "template_unit_vector": (TT, N, N, 3),
    "ref_pos": (A, 3), "ref_charge": (A,), "ref_mask": (A,), "ref_element": (A, ELEMENTS),
    "ref_atom_name_chars": (A, 4, NAMES), "ref_space_uid": (A,),
}  # fmt: skip
INTEGERS = (
    "residue_index",
    "token_index",
    "asym_id",
    "entity_id",
    "sym_id",
    "num_atoms_per_token",
    "ref_space_uid",
)
TEMPLATES = tuple(name for name in ARRAYS if name.startswith("template_"))
OPTIONAL = (*TEMPLATES, "is_atomized", "token_bonds", "msa_mask")


@dataclass(frozen=True)
class Place:
    """An atom in the answer: its name, element, residue, chain, and the residue's number in the chain."""

    atom: str
    element: str
    residue: str
    chain: str
    number: int


@dataclass(frozen=True, eq=False)
class Features:
    """The checked input of one request. arrays: as the fields of models/science/openfold3.py's Inputs."""

    arrays: Mapping[str, np.ndarray]
    places: tuple[Place, ...]
    standard: bool = True  # all tokens are residues

    @property
    def tokens(self) -> int:
        return len(self.arrays["token_mask"])

    @property
    def atoms(self) -> int:
        return len(self.arrays["atom_mask"])

    @property
    def sequences(self) -> int:
        return len(self.arrays["msa_mask"])

    def padded(self, tokens: int, atoms: int) -> dict[str, np.ndarray]:
        """The arrays with more tokens and atoms, which the masks hide."""
        more: dict[str | int, int] = {N: tokens - self.tokens, A: atoms - self.atoms}
        made = {
            name: np.pad(array, [(0, more.get(axis, 0)) for axis in AXES[name]])
            for name, array in self.arrays.items()
        }
        starts = self.arrays["segment_starts"]
        made["segment_starts"] = np.concatenate(
            (starts, np.full(tokens - self.tokens, starts[-1], starts.dtype))
        )
        return made


# Of the arrays in Features: those of ARRAYS, and what is made of others
AXES: dict[str, tuple[str | int, ...]] = {
    **{n: a for n, a in ARRAYS.items() if n not in ("msa", "has_deletion", "deletion_value", "num_atoms_per_token")},
    "msa": (S, N, 34), "ref_atom_name_chars": (A, 4 * NAMES), "token_mask": (N,), "atom_mask": (A,),
    "atom_to_token_index": (A,), "atom_of_token": (A,), "representative": (N,), "segment_starts": ("starts",),
}  # fmt: skip
for _name in ("is_protein", "is_rna", "is_dna", "is_atomized"):
    del AXES[_name]


def read(given: Any, most_atoms: int, most_tokens: int | None = None) -> Features:
    """The checked features of a request: {"chains": [...]}, or {"features": {...}}.

    chains    {"sequence": letters, "kind": "protein", "rna" or "dna" (default: protein), "id": name, "count": copies}
    features  arrays by the names of openfold3's batch, with or without its batch dimension of 1
    Raises ValueError, whose message begins with "the input". most_atoms: of a token; most_tokens: see check_size.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"the input must be an object with `chains` or `features`, got {reprlib.repr(given)}"
        )
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(f"the input has the unknown field {unknown[0]!r:.80}; known: {', '.join(FIELDS)}")
    if (given.get("chains") is None) == (given.get("features") is None):
        raise ValueError("the input needs either `chains` or `features`")
    if given.get("features") is not None:
        return _of_features(given["features"], most_atoms, most_tokens)
    return _of_chains(given["chains"], most_tokens)


def check_size(tokens: int, most: int | None) -> None:
    """Raise ValueError for more tokens than a request may have."""
    if most is not None and tokens > most:
        raise ValueError(
            f"the input has {tokens} residues, and a request may have {most} (max_model_len): pairs of them need"
            " memory and time"
        )


@dataclass(frozen=True)
class Chain:
    id: str
    kind: str
    sequence: str
    entity: int
    copy: int


def _chains(given: Any, most: int | None) -> list[Chain]:
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(
            f"the input needs `chains`, a list of {{'sequence': ...}} with at least one, got {reprlib.repr(given)}"
        )
    wanted: list[tuple[str | None, str, str, int]] = []
    total = 0
    for i, chain in enumerate(given):
        if not isinstance(chain, Mapping):
            raise ValueError(f"the input has as chain {i} {reprlib.repr(chain)}, which is no object")
        if unknown := [name for name in chain if name not in CHAIN_FIELDS]:
            raise ValueError(
                f"the input has in chain {i} the unknown field {unknown[0]!r:.80}; known: {', '.join(CHAIN_FIELDS)};"
                f" {OTHERS}"
            )
        chain = {name: value for name, value in chain.items() if value is not None}
        sequence, kind = chain.get("sequence"), chain.get("kind", "protein")
        if kind not in residues.KINDS:
            raise ValueError(
                f"the input has in chain {i} kind {kind!r:.80}, which is none of {', '.join(residues.KINDS)};"
                f" {OTHERS}"
            )
        if not isinstance(sequence, str) or not sequence:
            raise ValueError(
                f"the input needs in chain {i} `sequence`, letters of at least one residue, got"
                f" {reprlib.repr(sequence)}"
            )
        count = chain.get("count", 1)
        if type(count) is not int or not 1 <= count <= MOST_CHAINS:
            raise ValueError(
                f"the input has in chain {i} count {count!r:.80}: an integer from 1 to {MOST_CHAINS}"
            )
        total += len(sequence) * count
        check_size(total, most)  # before letters of a whole genome are read
        known = residues.LETTERS[kind]
        for at, letter in enumerate(sequence):
            if not letter.isascii() or letter.upper() not in known:
                raise ValueError(
                    f"the input has in chain {i} the letter {letter!r} at position {at + 1}; a sequence of kind {kind}"
                    f" has {''.join(sorted(known))}"
                )
        name = chain.get("id")
        if name is not None and (
            not isinstance(name, str) or not (name.isascii() and name.isalnum()) or len(name) > 4
        ):
            raise ValueError(f"the input has in chain {i} id {name!r:.80}: 1 to 4 letters and digits")
        if name is not None and count > 1:
            raise ValueError(f"the input has in chain {i} an id and count {count}: an id is for one chain")
        wanted.append((name, kind, sequence.upper(), count))
    if sum(count for *_, count in wanted) > MOST_CHAINS:
        raise ValueError(f"the input has more than {MOST_CHAINS} chains")
    taken = [name for name, *_ in wanted if name is not None]
    if twice := [name for name in taken if taken.count(name) > 1]:
        raise ValueError(f"the input has the chain id {twice[0]!r} twice")
    free = (name for name in map(chain_name, range(2 * MOST_CHAINS)) if name not in taken)
    entities: dict[tuple[str, str], int] = {}
    copies: dict[int, int] = {}
    made = []
    for name, kind, sequence, count in wanted:
        entity = entities.setdefault((kind, sequence), len(entities) + 1)
        for _ in range(count):
            copies[entity] = copies.get(entity, 0) + 1
            made.append(Chain(name or next(free), kind, sequence, entity, copies[entity]))
    return made


def chain_name(i: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    letters = ""
    i += 1
    while i:
        i, rest = divmod(i - 1, 26)
        letters = chr(65 + rest) + letters
    return letters


def _of_chains(given: Any, most: int | None) -> Features:
    chains = _chains(given, most)
    rows: list[tuple[Chain, int, str]] = [
        (chain, i, residues.LETTERS[chain.kind][letter])
        for chain in chains
        for i, letter in enumerate(chain.sequence, start=1)
    ]
    kinds = np.array([residues.TYPES.index(name) for *_, name in rows])
    one_hot = np.eye(len(residues.TYPES), dtype=np.float32)[kinds]
    chain_number = {chain.id: i for i, chain in enumerate(chains, start=1)}
    n = len(rows)
    arrays: dict[str, Any] = {
        "residue_index": [i for _, i, _ in rows], "token_index": range(n),
        "asym_id": [chain_number[chain.id] for chain, *_ in rows], "entity_id": [c.entity for c, *_ in rows],
        "sym_id": [c.copy for c, *_ in rows], "restype": one_hot, "profile": one_hot, "deletion_mean": np.zeros(n),
        "msa": one_hot[None], "has_deletion": np.zeros((1, n)), "deletion_value": np.zeros((1, n)),
        **{f"is_{kind}": [float(c.kind == kind) for c, *_ in rows] for kind in residues.KINDS},
        "num_atoms_per_token": [len(residues.atoms()[name]) for *_, name in rows],
    }  # fmt: skip
    places, atoms = [], []
    for at, (chain, number, name) in enumerate(rows):
        own = residues.atoms()[name]
        places += [Place(a.name, a.element, name, chain.id, number) for a in own]
        turned = _turned(np.array([a.place for a in own]), at)
        atoms += [(a, place, at) for a, place in zip(own, turned, strict=True)]
    arrays["ref_pos"] = np.array([place for _, place, _ in atoms])
    arrays["ref_charge"] = [a.charge for a, *_ in atoms]
    arrays["ref_mask"] = np.ones(len(atoms))
    arrays["ref_space_uid"] = [at for *_, at in atoms]
    numbers = [residues.ELEMENTS[a.element] - 1 for a, *_ in atoms]
    arrays["ref_element"] = np.eye(ELEMENTS, dtype=np.float32)[numbers]
    codes = np.array([[ord(c) - 32 for c in a.name.ljust(4)] for a, *_ in atoms])
    arrays["ref_atom_name_chars"] = np.eye(NAMES, dtype=np.float32)[codes]
    return _finished(arrays, tuple(places))


def _turned(conformer: np.ndarray, residue: int) -> np.ndarray:
    """The conformer at its center, turned at random as in training, and always the same for a residue's number."""
    q = np.random.default_rng(residue).standard_normal(4)
    w, x, y, z = q / np.linalg.norm(q)
    matrix = np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip
    return (conformer - conformer.mean(0)) @ matrix.T


def _of_features(given: Any, most_atoms: int, most_tokens: int | None) -> Features:
    if not isinstance(given, Mapping):
        raise ValueError(f"the input needs `features`, arrays by name, got {reprlib.repr(given)}")
    missing = [name for name in ARRAYS if name not in given and name not in OPTIONAL]
    if missing:
        raise ValueError(f"the input has no {', '.join(missing)} in `features`")
    if len(has := [name for name in TEMPLATES if name in given]) not in (0, len(TEMPLATES)):
        raise ValueError(
            f"the input has {', '.join(has)} in `features` and not the other features of templates"
        )
    found = {name: _array(given[name], name, len(axes)) for name, axes in ARRAYS.items() if name in given}
    sizes: dict[str, int] = {}
    for name, axes in ARRAYS.items():
        if name not in found:
            continue
        for axis, size in zip(axes, found[name].shape, strict=True):
            wanted = sizes.setdefault(axis, size) if isinstance(axis, str) else axis
            if wanted != size:
                raise ValueError(
                    f"the input has {name} of shape {list(found[name].shape)} in `features`, whose axes are"
                    f" {', '.join(map(str, axes))} with {sizes}"
                )
    check_size(sizes[N], most_tokens)
    for name in (N, A, S):
        if not sizes[name]:
            raise ValueError(f"the input has no {name} in `features`")
    for name in ("token_mask", "atom_mask"):
        if name in given and not (_array(given[name], name, 1) > 0).all():
            raise ValueError(f"the input has padding in `{name}`: leave padded tokens and atoms out")
    if "cyclic_mask" in given and (_array(given["cyclic_mask"], "cyclic_mask", 1) > 0).any():
        raise ValueError("the input has cyclic chains, which are not supported")
    counts = found["num_atoms_per_token"]
    if (counts < 1).any() or (counts > most_atoms).any() or counts.sum() != sizes[A]:
        raise ValueError(
            f"the input has num_atoms_per_token from {int(counts.min())} to {int(counts.max())} with a sum of"
            f" {int(counts.sum())}: each must be from 1 to {most_atoms}, and the sum the {sizes[A]} atoms"
        )
    return _finished(found, _places(found))


def _array(given: Any, name: str, dims: int) -> np.ndarray:
    try:
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the input has {reprlib.repr(given)} as `{name}`, which is no array") from error
    if found.dtype.kind not in "fiub" or found.dtype.itemsize < 1:
        raise ValueError(f"the input has `{name}` of {found.dtype}: numbers are needed")
    if found.ndim == dims + 1 and len(found) == 1:
        found = found[0]
    if found.ndim != dims:
        raise ValueError(f"the input has `{name}` of shape {list(found.shape)}: it needs {dims} dimensions")
    with np.errstate(over="ignore"):
        finite = np.isfinite(found.astype(np.float32)).all()
    if not finite:
        raise ValueError(f"the input has no finite numbers in `{name}`")
    if (
        name in INTEGERS
        and not ((np.abs(found.astype(float)) < MOST_INTEGER) & (found == np.rint(found))).all()
    ):
        raise ValueError(
            f"the input has `{name}` from {found.min():.9g} to {found.max():.9g}"
            f": integers below {MOST_INTEGER} are needed"
        )
    return found


def _places(found: Mapping[str, np.ndarray]) -> tuple[Place, ...]:
    """Names for the answer: of atoms from their characters, of residues from their types."""
    counts = found["num_atoms_per_token"].astype(np.int64)
    token = np.repeat(np.arange(len(counts)), counts)
    letters = found["ref_atom_name_chars"].argmax(-1)
    kinds, elements = found["restype"].argmax(-1), found["ref_element"].argmax(-1) + 1
    symbols = {number: symbol for symbol, number in residues.ELEMENTS.items()}
    return tuple(
        Place(
            "".join(chr(32 + c) for c in letters[i]).strip() or f"X{i}", symbols.get(int(elements[i]), "X"),
            residues.TYPES[kinds[t]], chain_name(max(int(found["asym_id"][t]) - 1, 0)), int(found["residue_index"][t]),
        )
        for i, t in enumerate(token)
    )  # fmt: skip


def _finished(given: Mapping[str, Any], places: tuple[Place, ...]) -> Features:
    """Fill in what is left out, and compute what follows."""
    arrays: dict[str, Any] = {
        name: np.asarray(value).astype(np.int64 if name in INTEGERS else np.float32)
        for name, value in given.items()
    }
    n, counts = len(arrays["restype"]), arrays.pop("num_atoms_per_token")
    token = np.repeat(np.arange(n), counts)
    starts = np.concatenate(([0], counts.cumsum()))
    arrays.setdefault("token_bonds", np.zeros((n, n), np.float32))
    arrays.setdefault("msa_mask", np.ones(arrays["msa"].shape[:2], np.float32))
    own = arrays.pop("is_atomized", np.zeros(n, np.float32))
    standard = (arrays.pop("is_protein") + arrays.pop("is_rna") + arrays.pop("is_dna") > 0) & (own == 0)
    offsets = np.array([residues.representative(name) for name in residues.TYPES])[
        arrays["restype"].argmax(-1)
    ]
    offsets = np.where(standard, np.minimum(offsets, counts - 1), 0)
    parts = (arrays["msa"], *(arrays.pop(name)[..., None] for name in ("has_deletion", "deletion_value")))
    arrays["msa"] = np.concatenate(parts, axis=-1)
    arrays["ref_atom_name_chars"] = arrays["ref_atom_name_chars"].reshape(len(token), -1)
    arrays |= {
        "token_mask": np.ones(n, np.float32), "atom_mask": np.ones(len(token), np.float32),
        "atom_to_token_index": token, "atom_of_token": np.arange(len(token)) - starts[token],
        "representative": starts[:-1] + offsets, "segment_starts": starts.astype(np.int32),
    }  # fmt: skip
    return Features({**arrays, **_templates(arrays, n)}, places, bool(standard.all()))


def _templates(arrays: Mapping[str, np.ndarray], n: int) -> dict[str, np.ndarray]:
    """The features of templates. Their mean is taken: of equal ones, such as empty ones, one is left."""
    if TEMPLATES[0] in arrays and len(arrays[TEMPLATES[0]]):
        own = {name: arrays[name] for name in TEMPLATES}
        same = all((array[:1] == array).all() for array in own.values())
        return {name: array[:1] for name, array in own.items()} if same else own
    made = {
        name: np.zeros([1, *(n if a == N else int(a) for a in ARRAYS[name][1:])], np.float32)
        for name in TEMPLATES
    }
    made["template_restype"][..., residues.GAP] = 1
    return made
