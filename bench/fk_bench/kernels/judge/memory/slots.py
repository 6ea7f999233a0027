"""The judge's private slots: inputs with secret values, fresh for every batch. No other process maps this memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastkernels.core.spec import OpSpec, Tensor
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.memory import filling, layout
from fk_bench.kernels.judge.memory.permutations import Permuter

# Numbers of value sets for the slots of a batch: if slots are scaled, and if they are only permuted.
MASTERS, MASTERS_EXACT = 4, 32
FLUSH_BYTES = 256 << 20
CHUNK = 256 << 20  # bytes of slots that are filled at once


def outputs_of(spec: OpSpec, args: list[Any], mode: str) -> list[torch.Tensor]:
    """The outputs of the call by the reference in the arguments' own dtypes (arguments are not written)."""
    return split(spec, spec.reference(*layout.mapped(args, torch.clone)), args, mode)[0]


def split(
    spec: OpSpec, result: Any, args: list[Any], mode: str
) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
    """Split the reference's result into (outputs of the call, {position: new value of a written argument})."""
    values = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if v is not None]
    if mode == "module":
        return values, {}
    written = [i for i in written_arguments(spec) if i < len(args) and args[i] is not None]
    if not written:
        return values, {}
    return values[: -len(written)], dict(zip(written, values[-len(written) :], strict=True))


def weights(spec: OpSpec) -> frozenset[int]:
    """Positions of the arguments that a module holds as weights: their sizes are constants of a model.

    None of a module with a router, whose activations are made for its weights: each token's choice is clear.
    """
    if spec.tie_sensitive:
        return frozenset()
    varies = {name for name, axis in spec.axes.items() if axis.varies}
    own = {*spec.activations, *spec.mutates, *(spec.declaration.mutated if spec.arguments else ())}
    return frozenset(
        i for i, a in enumerate(spec.arguments)
        if isinstance(a, Tensor) and i not in own
        and not any(d.expr.names & varies for _, dims in a.shapes for d in dims)
    )  # fmt: skip


def writable(spec: OpSpec, cls: str | None, args: list[Any]) -> set[int]:
    """Positions of the arguments that a class may write: what its op mutates, and what the host's own class overwrites.

    A layer of level 3 hands its activations to norms that write them.
    """
    if spec.level > 2:
        return {*spec.activations, *spec.mutates}
    mutated = {*spec.mutates, *(spec.declaration.mutated if spec.arguments else ())}
    found = {i for i in mutated if i < len(args) and args[i] is not None}
    if found:  # without a residual the hosts' norms write nothing
        found |= {spec.position(n) for t in spec.targets if t.cls == cls for n in t.writes}
    return found


def written_arguments(spec: OpSpec) -> list[int]:
    """Positions of the arguments that the op writes, by its schema."""
    if spec.op is None:
        return []
    arguments = enumerate(spec.op.overload._schema.arguments)
    return [i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


@dataclass
class Out:
    """One output of the call: its place in an output slot.

    contiguous  whether a candidate's must be: the arguments and the reference's result are
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    contiguous: bool = False

    @property
    def bytes(self) -> int:
        n = self.dtype.itemsize
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return -(-max(self.bytes, 1) // layout.ALIGN) * layout.ALIGN

    def to_json(self) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.")
        return {
            "dtype": name, "shape": list(self.shape), "bytes": self.bytes, "nbytes": self.nbytes,
            "contiguous": self.contiguous,
        }  # fmt: skip


@dataclass
class Slots:
    """`count` slots of one case; `memory.arena` copies them to the sides.

    make   make(generator) -> the arguments of a call with new values; called with secret seeds
    cls    the class whose modules are called. Its weights are the same in all slots and refreshes, as in a model: what
           it derives from them is made once
    recipe of a slot, as `recipe_of` gave it: all slots have its values
    rolls  whether values may be rolled and permuted; not for extreme values, whose positions matter
    """

    spec: OpSpec
    make: Callable[[torch.Generator], list[Any]]
    device: str
    count: int
    mode: str
    rolls: bool = False
    masters: list[list[Any]] = field(default_factory=list)
    cls: str | None = None
    recipe: Mapping[str, Any] | None = None

    @PHASES.of("inputs")
    def __post_init__(self) -> None:
        self.seeds: list[int] = []  # of the masters
        self._held_seed = secrets.randbits(62) if self.recipe is None else int(self.recipe["weights"])
        self.masters = [self.make(self._generator(self._held_seed))]
        self.seeds.append(self._held_seed)
        first = self.masters[0]
        written = set(written_arguments(self.spec)) if self.mode == "op" else set(range(len(first)))
        if self.mode == "module":
            written = {*self.spec.activations, *self.spec.mutates}
        self.may_change = written if self.mode == "op" else writable(self.spec, self.cls, first)
        held = weights(self.spec) if self.mode == "module" else frozenset()
        self.own = self.may_change | held  # what an output may share memory with, and a module's weights
        self._weights = {p: a for p, a in enumerate(first) if p in held}
        if self.recipe is not None:
            self.masters, self.seeds = [], []
            self.masters.append(self._new())
        self._steady = {i for i, (p, _) in enumerate(self._positions()) if p in held}
        # Data larger than the cache is cold in every call, whether it has one place or many.
        self.layout = layout.describe(first, FLUSH_BYTES // 2 if self.device == "cuda" else 1 << 62, written)
        plain = all(t.is_contiguous() for t in layout.tensors(first))
        self.outs = [
            Out(o.dtype, tuple(o.shape), plain and o.is_contiguous())
            for o in outputs_of(self.spec, first, self.mode)
        ]
        # Integers computed from floats (chosen experts) depend on near ties, so these values stay as the op's own maker
        # made them.
        floats = any(scalable(t) for t in layout.tensors(first))
        self.scales = floats and all(o.dtype.is_floating_point for o in self.outs)
        self.out_bytes = sum(o.nbytes for o in self.outs)
        total = max(self.layout.arena_bytes(self.count), layout.ALIGN)
        self.private = torch.zeros(total, dtype=torch.uint8, device=self.device)
        self.grid = self.private[: self.count * self.layout.stride].view(self.count, self.layout.stride)
        self.plan = self.layout.to_json()
        self._bound: dict[int, list[Any]] = {}
        self.factors, self.origin = [1.0] * self.count, [0] * self.count
        self.shifts, self.codes = [0] * self.count, [0] * self.count
        self._alone = self._alone_in_their_regions()
        self._permuter = None
        if self.rolls and self.spec.permutable is not None:
            free = [a and not r["shared"] for a, r in zip(self._alone, self._regions(), strict=True)]
            self._permuter = Permuter(first, self.spec.permutable(*first), free)
        self._numel = [t.numel() for t in layout.tensors(first)]
        self.by_kernel = self.device == "cuda"

    def args_of(self, slot: int) -> list[Any]:
        """A slot's arguments in private memory."""
        if slot not in self._bound:
            self._bound[slot] = layout.bind(self.plan, self.private, slot, self.count)
        return self._bound[slot]

    def _new(self, change: Callable[[list[Any]], None] | None = None) -> list[Any]:
        """New arguments around the weights that modules hold."""
        self.seeds.append(secrets.randbits(62) if self.recipe is None else int(self.recipe["seed"]))
        made = self.make(self._generator(self.seeds[-1]))
        if change is not None:
            change(made)
        return [self._weights.get(p, a) for p, a in enumerate(made)]

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def recipe_of(self, slot: int) -> dict[str, Any]:
        """All that the values of a slot are made from."""
        return {
            "seed": self.seeds[self.origin[slot]], "weights": self._held_seed, "factor": self.factors[slot],
            "shift": self.shifts[slot], "code": self.codes[slot], "rolls": self.rolls,
        }  # fmt: skip

    # -- inputs

    @PHASES.of("inputs")
    def refresh(self, start: int = 0, count: int | None = None) -> None:
        """Refill `count` slots from `start` (None: to the last). Some masters are new, and each is used equally often.

        Other slots keep their values, but `expected` no longer knows them.
        """
        count = self.count - start if count is None else count
        wanted = min(MASTERS if self.scales else MASTERS_EXACT, count)
        kept = self.masters[1 - wanted :] if self.scales and wanted > 1 else []
        self.seeds = self.seeds[len(self.masters) - len(kept) :] if kept else []
        self.masters = [*kept, *(self._new() for _ in range(wanted - len(kept)))]
        self.fill((_drawn(count).argsort() % wanted).tolist(), start)

    @PHASES.of("inputs")
    def edit(self, change: Callable[[list[Any]], None]) -> None:
        """Fill all slots with new values that `change` has edited; from now on values are not moved."""
        self.seeds = []
        made = self._new(change)
        self.rolls, self._permuter, self.masters = False, None, [made]
        self.fill([0] * self.count)

    @PHASES.of("inputs")
    def fill(self, origin: list[int], start: int = 0) -> None:
        """Give slot start + i the values of master origin[i]: floats are multiplied by a secret factor in (0.8, 1] and
        rolled, or permuted as the op allows, so that all slots have different results.

        Without rolling, a cached output of a master would also give that of its multiple: norms and products scale.
        """
        part = slice(start, start + len(origin))
        self.origin[part] = origin
        if self._permuter is not None:
            self.codes[part] = self._permuter.draw(origin)
        drawn = _drawn(len(origin))  # 40 bits for the shift, 16 for the factor
        self.shifts[part] = (drawn >> 24).tolist()
        span = 0.2 if self.scales else 0.0
        self.factors[part] = (1.0 - span * (drawn & 0xFFFF) / (1 << 16)).tolist()
        if (recipe := self.recipe) is not None:
            for own, name in ((self.factors, "factor"), (self.shifts, "shift"), (self.codes, "code")):
                own[part] = [recipe[name]] * len(origin)  # type: ignore[call-overload]
        if len(origin) == 1:
            for into, value in zip(layout.tensors(self.args_of(start)), self.expected(start), strict=True):
                into.copy_(value)
            return
        self._fill_at_once(part)

    @PHASES.of("inputs")
    def renew(self, slot: int) -> None:
        """Give one slot new values, from another master if there is one."""
        self.origin[slot] = secrets.randbelow(len(self.masters))
        if self._permuter is not None:
            self.codes[slot] = self._permuter.draw([0])[0]
        self.shifts[slot] = secrets.randbits(40)
        span = 0.2 if self.scales else 0.0
        self.factors[slot] = 1.0 - span * secrets.randbelow(1 << 16) / (1 << 16)
        shared = [r["shared"] for r in self._regions()]
        masters = layout.tensors(self.masters[self.origin[slot]])
        for i, (into, value) in enumerate(zip(layout.tensors(self.args_of(slot)), masters, strict=True)):
            # Memory of all slots keeps the values of slot 0.
            if not shared[i] and not self._filled(into, i, slot, [value]):
                into.copy_(self._value(slot, i, value))

    def _fill_at_once(self, slots: slice) -> None:
        start, count = slots.start, slots.stop - slots.start
        origin = np.array(self.origin[slots])
        # On the host, because the judge would wait for the GPU to count them
        chosen = [np.flatnonzero(origin == m).tolist() for m in range(len(self.masters))]
        rows_of = [torch.tensor(c, dtype=torch.int64, device=self.device) for c in chosen]
        factor = torch.tensor(self.factors[slots], device=self.device, dtype=torch.float32)
        per_slot = [layout.tensors(m) for m in self.masters]
        shared = [r["shared"] for r in self._regions()]
        for i, first in enumerate(layout.tensors(self.args_of(start))):
            if not first.numel():
                continue
            sources = [per_slot[m][i] for m in ([self.origin[0]] if shared[i] else origin)]
            if self._filled(first, i, 0 if shared[i] else start, sources):
                continue
            if shared[i]:
                first.copy_(self._value(0, i, sources[0]))
                continue
            step = self.layout.stride // first.element_size()
            pool = first.as_strided((count, *first.shape), (step, *first.stride()), first.storage_offset())
            rolled = self._scaled(i, first) and self._rolled(i)
            for m, value in enumerate([p[i] for p in per_slot]):
                rows = rows_of[m]
                if not len(rows):
                    continue
                chunk = max(1, CHUNK // max(first.nbytes * 2, 1))
                turns = value.flatten().repeat(2).unfold(0, value.numel(), 1) if rolled else None
                for at in range(0, len(rows), chunk):
                    part, numbers = rows[at : at + chunk], chosen[m][at : at + chunk]
                    made = value
                    if self._permuter is not None and self._permuted(i):
                        made = self._permuter.apply(i, value, [self.codes[start + s] for s in numbers])
                    elif turns is not None:
                        from_ = [self._shift(start + s, i) for s in numbers]
                        made = turns[torch.tensor(from_, device=self.device)].view(len(part), *value.shape)
                    if self._scaled(i, first):
                        made = made * factor[part].view(-1, *([1] * first.dim())).to(value.dtype)
                    pool[part] = made
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _filled(self, first: torch.Tensor, i: int, start: int, sources: list[torch.Tensor]) -> bool:
        """Let one kernel write tensor i of the slots from `start`, one for each source; False if it cannot."""
        scales = self._scaled(i, first)
        if not self.by_kernel or self._permuted(i) or not filling.fits(first, scales):
            return False
        slots = range(start, start + len(sources))
        shifts = [self._shift(s, i) if scales and self._rolled(i) else 0 for s in slots]
        factors = [self.factors[s] for s in slots] if scales else None
        filling.fill(first, self.layout.stride // first.element_size(), sources, shifts, factors)
        return True

    def expected(self, slot: int) -> list[torch.Tensor]:
        """The tensors that a slot was filled with, from memory that no other process sees."""
        master = self.masters[self.origin[slot]]
        tensors = layout.tensors(master)
        shared = [r["shared"] for r in self._regions()]
        return [
            self._value(0 if s else slot, i, self._tensor(0, i) if s else t)
            for i, (t, s) in enumerate(zip(tensors, shared, strict=True))
        ]

    def _value(self, slot: int, i: int, value: torch.Tensor) -> torch.Tensor:
        """The value of tensor i in a slot, derived from the master's."""
        if self._permuter is not None and i not in self._steady:
            value = self._permuter.apply(i, value, [self.codes[slot]])[0]
        if not self._scaled(i, value):
            return value
        if self._rolled(i):
            value = value.flatten().roll(-self._shift(slot, i)).view(value.shape)
        return self.scaled(value, self.factors[slot])

    def _scaled(self, i: int, t: torch.Tensor) -> bool:
        return scalable(t) and i not in self._steady

    def _permuted(self, i: int) -> bool:
        return self._permuter is not None and self._permuter.permutes(i) and i not in self._steady

    def _rolled(self, i: int) -> bool:
        return self.rolls and self.scales and not self.spec.tie_sensitive and self._alone[i]

    def _shift(self, slot: int, i: int) -> int:
        """The offset by which tensor i is rolled, different for each tensor."""
        return (self.shifts[slot] >> i % 8) % max(self._numel[i], 1)

    def _alone_in_their_regions(self) -> list[bool]:
        """Whether each tensor shares no memory with another: overlapping views must agree."""
        regions = [id(r) for r in self._regions()]
        return [regions.count(r) == 1 for r in regions]

    def _regions(self) -> list[dict[str, Any]]:
        """The region of each tensor, in order."""
        found: list[dict[str, Any]] = []

        def walk(value: Any) -> None:
            if isinstance(value, dict) and "tensor" in value:
                found.append(self.layout.regions[value["tensor"]["region"]])
            elif isinstance(value, dict) and ("dict" in value or "list" in value):
                inner = value["dict"] if "dict" in value else value["list"]
                for v in inner.values() if isinstance(inner, dict) else inner:
                    walk(v)

        for a in self.layout.args:
            walk(a)
        return found

    def read_only(self) -> list[tuple[int, int]]:
        """(offset, bytes) in a slot of each region that no argument lies in which the op may write."""
        written = {
            id(region) for region, (position, _) in zip(self._regions(), self._positions(), strict=True)
            if position in self.may_change
        }  # fmt: skip
        own = [r for r in self.layout.regions if not r["shared"] and id(r) not in written]
        return [(r["offset"], r["nbytes"]) for r in own if r["nbytes"]]

    def _positions(self) -> list[tuple[int, torch.Tensor]]:
        """(position of its argument, tensor) of each tensor, in order."""
        return [(i, t) for i, a in enumerate(self.masters[0]) for t in layout.tensors(a)]

    def _tensor(self, slot: int, i: int) -> torch.Tensor:
        return layout.tensors(self.masters[self.origin[slot]])[i]

    def scaled(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        return value * torch.tensor(factor, dtype=torch.float32).to(value) if scalable(value) else value


def _drawn(count: int) -> np.ndarray:
    """Secret 64-bit numbers, by one call of the operating system."""
    return np.frombuffer(secrets.token_bytes(8 * count), np.uint64)


def scalable(t: torch.Tensor) -> bool:
    """Whether values may be multiplied: not integers, and not 8-bit floats, which have no arithmetic."""
    return t.is_floating_point() and t.element_size() > 1


def poison(views: list[torch.Tensor]) -> None:
    """Write NaN to floats and secret values to integers; views may have any strides."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for v in views:
        if v.dtype is torch.bool:
            v.fill_(secrets.randbelow(2))
        elif v.is_floating_point():
            v.view(kinds[v.element_size()]).fill_(255 if v.element_size() == 1 else -1)
        else:
            v.fill_(1 + secrets.randbelow(120))
