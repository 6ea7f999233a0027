"""The description of an op: its arguments, cases, tolerances, cost and the host classes that it replaces."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastkernels.core import assemble
from fastkernels.core.case import TOLERANCE, Case, Tolerance, dtype_of
from fastkernels.core.declaration import Axis, Call, Declaration, Scalar, Sizes, Tensor, fan_in, full, uniform
from fastkernels.core.expressions import Expr
from fastkernels.core.shapes import varied

__all__ = [
    "SEAMS", "TOLERANCE", "Axis", "Call", "Case", "Expr", "OpSpec", "Permutable", "Ranking", "Scalar", "Sizes",
    "Target", "Tensor", "Tolerance", "dtype_of", "fan_in", "full", "uniform",
]  # fmt: skip

SEAMS = {
    "leaf": "a leaf module: `__class__` of the live instance is swapped for a subclass with our forward",
    "quant_method": "a linear-like module: its `quant_method` is replaced, the host keeps bias, gather and reduce",
    "kernel": "a quantized linear layer: the kernel object that its method or scheme holds as `fp8_linear` is replaced",
    "scheme": "a quantized linear layer: the scheme that it holds, which computes it, is replaced",
    "experts": "a mixture of experts: the object that runs its experts, on the host's own weights and routing",
    "attention": "the attention backend's implementation, on the host's own KV layout",
    "module": "a plain module of several parts: `__class__` of the live instance is swapped",
    "head": "a module that multiplies by an LM head's weight itself: `__class__` of the live instance is swapped",
    "processor": "an attention layer of diffusers: its `processor`, which computes it, is replaced",
    "function": "a function of the host",
    "called_function": "a function that modules call by name: they get methods that call ours",
    "library_function": "a function that a library offers: its modules get ours, for all callers in the process",
    "block": "a block of a model in our engine, at its places: `__class__` of the live instance is swapped",
    "router": "a function that routers of experts call: a layer's `router` gets a method that calls ours",
    "communicator": "the object that sums over a host's tensor-parallel ranks: its `__class__` is swapped in all ranks",
    "dispatcher": "the object that brings tokens to experts of other ranks: its `__class__` is swapped in all ranks",
    "standalone": "a drop-in class for forks and for our engine; not put into a live host (see its note)",
}


@dataclass(frozen=True)
class Target:
    """One host class (or function) that an op overrides.

    host      'vllm', 'sglang', 'transformers', 'diffusers', 'timm', or 'torch' for classes of torch.nn in all models
    path      'module.path:Name' in the host
    cls       name of our class (or function)
    seam      a key of SEAMS
    versions  PEP 440 specifier of the host versions that the class is for, '' for all
    default   whether patch() without a list of ops applies it, if the op's `by_default` is set
    tried     whether patch() without a list of ops lets the first calls decide, on a GPU, by time against the host
    note      why the class is not applied to live hosts, or how it differs from the host's
    compiled  with `tried`: whether code that torch.compile traces may keep ours, which is measured as it is traced; for
              classes with products or attention, since a compiler fuses all else better
    computes  arguments of the op that the class has built in: {"approximate": "tanh"}, or a tensor that it cannot take
              or does not write, as None
    writes    arguments that the host's class overwrites although the op does not, with its mutated arguments: ("x",)
    module    module of our class; the registry sets it
    """

    host: str
    path: str
    cls: str
    seam: str
    versions: str = ""
    default: bool = True
    note: str = ""
    computes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    writes: tuple[str, ...] = ()
    tried: bool = False
    compiled: bool = False
    module: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.seam not in SEAMS:
            raise ValueError(f"seam {self.seam!r} of {self.path} is not one of {', '.join(SEAMS)}")

    @property
    def of_a_model(self) -> bool:
        """Whether only some models have this class: one of torch, or of a serving host's file for one model."""
        shared = self.host in ("transformers", "diffusers")  # their ".models." has all classes
        if self.seam == "called_function":  # layers of other files may import it
            return False
        return self.host == "torch" or (not shared and ".models." in self.path)

    @property
    def name(self) -> str:
        """The class's name in reports, with its file where names repeat: RMSNorm, commandr.LayerNorm, nn.LayerNorm."""
        module, _, name = self.path.partition(":")
        if self.host == "torch":
            return f"nn.{name}"
        return f"{module.rpartition('.')[2]}.{name}" if self.of_a_model else name

    def applies_to(self, version: str) -> bool:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return Version(Version(version).base_version) in SpecifierSet(self.versions)


@dataclass(frozen=True)
class Permutable:
    """How the values of a call can be permuted into another call without bringing any choice closer to a tie.

    rows     positions of the arguments with one row per token: all can be rolled by the same number of rows
    columns  positions of the arguments with corresponding columns: all can be rolled by the same number of columns
    group    columns per group: groups are rolled among each other, and columns within their group; 0: one group
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    group: int = 0


@dataclass(frozen=True)
class Ranking:
    """An output of ids that the op orders by scores which it computes: rounding may exchange nearly equal ones.

    Ids are correct if their exact scores are the expected ones, within the tolerance of the scores, and if no row has
    an id twice.

    ids     position of this output [..., k]; -1 stands for no id
    scores  position of the output with the scores [..., k] of these ids
    score   score(ids, *args) -> (scores of any ids, whether each of them may be chosen), computed as `reference` does
    """

    ids: int
    scores: int
    score: Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class OpSpec:
    """The description of one op. The file fastkernels/overrides/FAMILY/NAME.py ends with SPEC = OpSpec(...).

    The op:
    name         the file's stem
    level        1 primitive, 2 fused op, 3 layer
    reference    plain PyTorch, computed in at least float32 (float64 for float64 inputs). Returns the outputs, then
                 the new values of mutated arguments
    op           the functional op (fastkernels.core.dispatch.Op); None for modules that only call other ops
    cases        concrete calls, each a binding of axes

    The declaration, from which inputs, dims_of, bytes_moved, vary and build follow:
    arguments    a Tensor or Scalar for each argument, in order
    outputs      a Tensor for each output, without the mutated arguments
    axes         {name: Axis} of all names in shapes. Flags of optional tensors and axes of scalars need an entry only
                 if their default is not False, or not Scalar.default
    constraints  expressions over axes that hold in every case: "hidden % group == 0"
    flops        operations of a call, an expression over axes: "4 * tokens * hidden"
    values       values(call) -> {name: tensor} for arguments whose values depend on each other: routing, block tables
    constructor  {parameter of a class's constructor: expression over axes}, for parameters that are not named like an
                 axis or a scalar argument

    Functions that replace the derived ones:
    inputs       inputs(case, device, generator) -> the op's positional arguments (list)
    dims_of      dims_of(*args) -> the dims of the case that these arguments are a call of
    bytes_moved  bytes_moved(case): compulsory reads and writes of device memory
    flops        flops(case)
    vary         vary(case, rng) -> the same kind of call with other sizes, at most twice as costly
    build        build(cls, args) -> call(): an instance of cls (a class of `targets`, or a candidate's of that name)
                 whose weights are the tensors in args. call() returns what `reference` returns. Building is not
                 timed. Raises ValueError where cls cannot express the arguments
    dtype_arg    position of the argument whose dtype is the case's; None: the first floating-point tensor
    mutates      positions of the arguments that modules write to, for an op without a functional op

    How it is judged:
    tolerance    by the case's dtype; 'float8_e4m3fn' is for outputs of that dtype, which `reference` gives unrounded
                 from float64 arguments
    activations  positions or names of the arguments whose values can be of any size: where adversarial values go
    contained    position or name of the argument whose NaN and infinity change only the results for which `reference`
                 gives NaN or infinity, to unspecified values. None: they have the results of `reference`
    mixed        an algorithm, such as Winograd's, may carry a NaN to results that `reference` leaves finite: no NaN
    bounded      positions or names of arguments whose values stay near those of `inputs`: no outliers
    extremes     {name: edit(args)}: in-place edits that make inputs specific to this op (empty experts, masked logits)
    tie_sensitive  a tie between inputs decides what is computed, such as a token's experts. `inputs` avoids ties, and
                 the judge changes values only as `permutable` allows
    permutable   permutable(*args) -> Permutable, for ops that are tie-sensitive or return integers
    ranking      the output of ids whose order rounding may change; other integers must be exact
    baseline     the provider that production uses

    A collective, whose result depends on the tensors of several ranks:
    ranks        the axis that counts them; '' for other ops. The declaration is of one rank's call; `reference` takes
                 for each tensor the list of all ranks' tensors, and returns the list of their results
    replicated   names of the arguments that are the same in all ranks
    same_bits    all ranks get the same bits, in every run
    traffic      bytes that each rank has to send, an expression over axes: for the bus bandwidth

    How it is used:
    targets      the host classes and functions that it replaces
    by_default   patch() without a list of ops may replace modules by it: set it after a measurement in a host, or a
                 decision. Without it, `default` of every target is False
    calls        ops that the modules of this op call
    parts        ops whose modules are submodules of this op's modules, standalone and in our engine
    by_table     functional op whose tuned table decides whether the modules go into a host by default, where it is
                 not `op`; see tuned_by
    stands_for   ops that this op fuses: our engine runs it instead of them unless they are explicitly requested
    batch_invariant  in every provider, the result for a token is independent of the other tokens and their number.
                 Other ops are off in a host's batch-invariant mode
    """

    name: str
    level: int
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    arguments: tuple[Tensor | Scalar, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    axes: Mapping[str, Axis] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    values: Callable[[Call], Mapping[str, Any]] | None = None
    constructor: Mapping[str, str] = field(default_factory=dict)
    flops: Any = None
    inputs: Callable[..., list[Any]] = None  # type: ignore[assignment]
    bytes_moved: Callable[[Case], int] = None  # type: ignore[assignment]
    dims_of: Callable[..., dict[str, Any]] = None  # type: ignore[assignment]
    vary: Callable[[Case, random.Random], Case] = None  # type: ignore[assignment]
    build: Callable[[type, list[Any]], Callable[[], Any]] | None = None
    op: Any = None
    targets: tuple[Target, ...] = ()
    by_default: bool = False
    tolerance: Mapping[str, Tolerance] = field(default_factory=lambda: dict(TOLERANCE))
    calls: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    by_table: Any = None
    stands_for: tuple[str, ...] = ()
    baseline: str = "reference"
    ranks: str = ""
    replicated: tuple[str, ...] = ()
    same_bits: bool = False
    traffic: Any = None
    batch_invariant: bool = False
    activations: tuple[Any, ...] = (0,)
    contained: Any = None
    mixed: bool = False
    bounded: tuple[Any, ...] = ()
    tie_sensitive: bool = False
    permutable: Callable[..., Permutable] | None = None
    ranking: Ranking | None = None
    extremes: Mapping[str, Callable[[list[Any]], None]] = field(default_factory=dict)
    dtype_arg: int | None = None
    mutates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("activations", "bounded"):
            given = getattr(self, name)
            keep(name, tuple(self.position(a) if isinstance(a, str) else a for a in given))
        if isinstance(self.contained, str):
            keep("contained", self.position(self.contained))
        if isinstance(self.flops, str):
            keep("flops", self.declaration.expression(self.flops))
        if isinstance(self.traffic, str):
            keep("traffic", self.declaration.expression(self.traffic))
        if not self.arguments:
            return
        if self.dtype_arg is None:
            keep("dtype_arg", self.declaration.dtype_argument)
        if self.op is None:
            keep("mutates", self.declaration.mutated)
        for name in ("inputs", "bytes_moved", "dims_of", "vary", "build"):
            given = getattr(self, name)
            if given is None or isinstance(given, _Derived):  # one that dataclasses.replace has handed on
                keep(name, _Derived(self, name))

    @cached_property
    def declaration(self) -> Declaration:
        """Raises ValueError for expressions that name no axis."""
        return Declaration(self.name, self.arguments, self.outputs, self.axes, self.constraints, self.values)

    @property
    def counted(self) -> tuple[str, ...]:
        """The axes that count values: they make a cost exact, and `inputs` ignores them."""
        return self.declaration.counted

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the op's arguments: those of its reference."""
        parameters = inspect.signature(self.reference).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def position(self, argument: str) -> int:
        """Of an argument by name. Raises ValueError for an unknown one."""
        return self.declaration.position(argument)

    @property
    def tuned_by(self) -> Any:
        """The functional op whose tuned table decides whether the modules go into a host by default; None: none."""
        key = getattr(self.op, "key", None)
        return self.by_table or (self.op if key is not None and key.module is not None else None)

    def tolerance_for(self, case: Case, dtype: Any) -> Tolerance:
        """For an output of that torch dtype: the case's, or that of its own dtype if it is wider.

        An output in a dtype of fewer bits than the case's, such as a state, is rounded to that. Float8 that `tolerance`
        names has its own alone.
        """
        name, of_case = str(dtype).rpartition(".")[2], self.tolerance[case.dtype]
        own = self.tolerance.get(name, of_case)
        if name.startswith("float8"):
            return own
        return Tolerance(max(own.atol, of_case.atol), max(own.rtol, of_case.rtol))

    def targets_for(self, host: str, version: str | None = None) -> list[Target]:
        """The targets of `host`; with a version, only those for that version."""
        found = [t for t in self.targets if t.host == host]
        return found if version is None else [t for t in found if t.applies_to(version)]

    def case_of(
        self, args: Sequence[Any], name: str, weight: float = 1.0, tags: tuple[str, ...] = ()
    ) -> Case:
        """The case that these arguments are a call of; those that were left out have their defaults."""
        return Case(name, self.dims_of(*args), dtype_of(args, self.dtype_arg), weight, tags)


@dataclass(frozen=True)
class _Derived:
    """A function of an OpSpec that follows from its declaration."""

    spec: OpSpec
    name: str

    def __call__(self, *args: Any) -> Any:
        return getattr(self, f"_{self.name}")(*args)

    def __repr__(self) -> str:
        return f"{self.name} of the declaration of {self.spec.name}"

    def _inputs(self, case: Case, device: str, generator: Any) -> list[Any]:
        return self.spec.declaration.inputs(case, device, generator)

    def _bytes_moved(self, case: Case) -> int:
        return self.spec.declaration.bytes_moved(case)

    def _dims_of(self, *args: Any) -> dict[str, Any]:
        return self.spec.declaration.dims_of(args, self.spec.defaults)

    def _vary(self, case: Case, rng: random.Random) -> Case:
        spec = self.spec
        return varied(
            case, lambda: spec.declaration.drawn(case.dims, case.dtype, rng), spec.bytes_moved, spec.flops
        )

    def _build(self, cls: type, args: list[Any]) -> Callable[[], Any]:
        spec = self.spec
        computes = next((t.computes for t in spec.targets if t.cls == cls.__name__), {})
        return assemble.build(spec.declaration, spec.constructor, computes, spec.defaults, cls, args)
