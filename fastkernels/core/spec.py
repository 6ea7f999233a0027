"""What an op is: its cases, tolerances, cost and the host classes that it overrides."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SEAMS = {
    "leaf": "a leaf module: `__class__` of the live instance is swapped for a subclass with our forward",
    "quant_method": "a linear-like module: its `quant_method` is replaced, the host keeps bias, gather and reduce",
    "kernel": "a quantized linear layer: the kernel object that its method or scheme holds as `fp8_linear` is replaced",
    "scheme": "a quantized linear layer: the scheme that it holds, which computes it, is replaced",
    "experts": "a mixture of experts: the object that runs its experts, on the host's own weights and routing",
    "attention": "the attention backend's implementation, on the host's own KV layout",
    "module": "a plain module of several parts: `__class__` of the live instance is swapped",
    "function": "a function of the host",
    "standalone": "a drop-in class for forks and for our engine; not put into a live host (see its note)",
}


@dataclass(frozen=True)
class Target:
    """One host class (or function) that an op overrides.

    host      'vllm', 'sglang' or 'transformers'
    path      'module.path:Name' in the host
    cls       name of our class (or function) in the op's file
    seam      a key of SEAMS
    versions  PEP 440 specifier of the host versions this header is for, '' for all
    default   whether patch() without a list of ops puts it in
    note      why the live seam is not used or what differs and cannot be otherwise
    """

    host: str
    path: str
    cls: str
    seam: str
    versions: str = ""
    default: bool = True
    note: str = ""
    module: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.seam not in SEAMS:
            raise ValueError(f"seam {self.seam!r} of {self.path} is not one of {', '.join(SEAMS)}")

    def applies_to(self, version: str) -> bool:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return Version(Version(version).base_version) in SpecifierSet(self.versions)


@dataclass(frozen=True)
class Tolerance:
    """|out - reference| <= atol + rtol * |reference|, elementwise."""

    atol: float
    rtol: float


TOLERANCE = {
    "float32": Tolerance(1e-5, 1e-5),
    "float16": Tolerance(2e-3, 2e-3),
    "bfloat16": Tolerance(1.6e-2, 1.6e-2),
}


# Dims that count values: distinct embedding rows, experts with a token, (token, expert) pairs whose expert is here,
# tokens with a slot, cached tokens that are read (a prefix that sequences share is read once).
COUNTED = ("distinct", "experts_hit", "pairs", "stored", "kv_tokens")


@dataclass(frozen=True)
class Case:
    """One concrete call: `dims` are the sizes the input maker reads, `weight` how often production makes it."""

    name: str
    dims: Mapping[str, Any]
    dtype: str = "bfloat16"
    weight: float = 1.0
    tags: tuple[str, ...] = ()  # 'odd' sizes for tests, 'model' shapes for the benchmark


@dataclass(frozen=True)
class Moves:
    """How the values of a call may move so that it is another call, with no choice nearer to a tie than it was.

    rows     positions of the arguments with a row for each token: all of them may be rolled, by as many rows
    columns  positions of the arguments whose last dimensions belong together: all may be rolled, by as many columns
    group    columns that stay together: groups are rolled among each other, and each in itself; 0: all are one
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    group: int = 0


@dataclass(frozen=True)
class OpSpec:
    """The description of one op file (fastkernels/overrides/l*/NAME.py, which ends with SPEC = OpSpec(...)).

    reference     plain PyTorch; computes in at least float32 (pass float64 inputs for a float64 oracle); returns
                  the outputs, with the new values of mutated arguments after them
    op            the functional op (fastkernels.core.dispatch.Op), None for modules that only call other ops
    inputs        inputs(case, device, generator) -> the op's positional arguments (list)
    bytes_moved   bytes_moved(case): compulsory reads and writes of device memory
    flops         flops(case)
    tolerance     by the case's dtype; 'float8_e4m3fn' is for outputs of that dtype, which `reference` gives unrounded
                  from float64 arguments: half a step and what comes before it
    calls         other ops that the modules of this file call by name
    parts         ops of whose modules those of this file are made, standalone and in our engine
    by_table      the functional op whose tuned table puts the modules of this file into a host without their being
                  named, where it is not `op` itself (a Key with `module`); see tuned_by
    stands_for  other ops whose calls a layer of our engine may leave to this one, where nobody asked for them by name
    batch_invariant  no provider's result for a token depends on the other tokens or on how many there are: no tile,
                  split or schedule is chosen by the batch. Others are off where a host promises that
    dims_of       dims_of(*args) -> the dims of the case that these arguments (of `inputs`' kind) are a call of. It may
                  read integer tensors. `inputs` makes tensors of the same shapes and dtypes from them. Keys named in
                  COUNTED say what the values say (the experts that have a token); without them bytes_moved and flops
                  take what `inputs` makes at most
    dtype_arg     position of the argument whose dtype is the case's; None: the first floating-point tensor
    mutates       positions of the arguments that the modules write to; of a functional op its schema says it
    vary          vary(case, rng) -> the same kind of call with other sizes: shapes that no author has seen, at most
                  twice as costly as `case` (fastkernels.core.shapes.varied)
    activations   positions of the arguments whose values may be of any size: where adversarial values go
    chooses       a tie between inputs decides what is computed, as of a token's experts: `inputs` keeps away from ties,
                  and the judge moves the values that it has made as `moves` says, or not at all
    moves         moves(*args) -> Moves, for ops that choose or return integers: without it the judge's inputs repeat
    extremes      name: edit(args), which puts in place what only this op may meet (empty experts, masked logits)
    build         build(cls, args) -> call(): an instance of cls, a class of `targets` or a candidate's with its
                  name, that has its weights from args (the same memory); call() runs it on the rest and returns what
                  `reference` returns. Building is not timed. ValueError where cls cannot express the arguments. None
                  for an op without classes: functions of a host are called through the functional op

    Every op has dims_of and vary, and build where it has classes. tests/core/test_spec.py checks this.
    """

    name: str
    level: int
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    inputs: Callable[..., list[Any]]
    bytes_moved: Callable[[Case], int]
    flops: Callable[[Case], int]
    op: Any = None
    targets: tuple[Target, ...] = ()
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: dict(TOLERANCE))
    calls: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    by_table: Any = None
    stands_for: tuple[str, ...] = ()
    baseline: str = "reference"
    batch_invariant: bool = False
    dims_of: Callable[..., dict[str, Any]] | None = None
    vary: Callable[[Case, random.Random], Case] | None = None
    activations: tuple[int, ...] = (0,)
    chooses: bool = False
    moves: Callable[..., Moves] | None = None
    extremes: Mapping[str, Callable[[list[Any]], None]] = field(default_factory=dict)
    build: Callable[[type, list[Any]], Callable[[], Any]] | None = None
    dtype_arg: int | None = None
    mutates: tuple[int, ...] = ()

    @property
    def tuned_by(self) -> Any:
        """The functional op whose tuned table puts the modules into a host without their being named; None: none."""
        key = getattr(self.op, "key", None)
        return self.by_table or (self.op if key is not None and key.module is not None else None)

    def tolerance_for(self, case: Case, dtype: Any) -> Tolerance:
        """For an output of that torch dtype: a float8 has its own where `tolerance` names it, others the case's."""
        name = str(dtype).rpartition(".")[2]
        return self.tolerance[name if name.startswith("float8") and name in self.tolerance else case.dtype]

    def targets_for(self, host: str, version: str | None = None) -> list[Target]:
        """The targets of `host`; with a version, only those whose header is for it."""
        found = [t for t in self.targets if t.host == host]
        return found if version is None else [t for t in found if t.applies_to(version)]

    def case_of(
        self, args: Sequence[Any], name: str, weight: float = 1.0, tags: tuple[str, ...] = ()
    ) -> Case:
        """The case that these arguments are a call of; those left out have their defaults."""
        assert self.dims_of is not None, f"{self.name} has no dims_of"
        return Case(name, self.dims_of(*args), dtype_of(args, self.dtype_arg), weight, tags)


def dtype_of(args: Sequence[Any], position: int | None = None) -> str:
    """Case.dtype of a call: of the argument there, or of the first floating-point tensor; float32 without any."""
    if position is not None:
        return str(args[position].dtype).removeprefix("torch.")
    for value in args:
        dtype = getattr(value, "dtype", None)
        if dtype is not None and getattr(dtype, "is_floating_point", False):
            return str(dtype).removeprefix("torch.")
    return "float32"
