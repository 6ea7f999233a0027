"""Our classes against the signatures recorded from the hosts' wheels, and the recorder itself."""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import importlib.metadata
import inspect
import json
from pathlib import Path

import pytest
import torch
from fk_integrations.core import versions
from fk_integrations.signatures import diff as compare
from fk_integrations.signatures import recorder as record
from torch import nn

from fastkernels.core import registry

ROOT = Path(__file__).resolve().parents[2]
OPS = [name for name in registry.op_names() if registry.get(name).targets]


@functools.cache
def all_rows() -> list[compare.SignatureDiff]:
    return list(compare.comparisons())


@pytest.mark.parametrize("op", OPS)
def test_signatures_are_the_hosts(op: str) -> None:
    """Signatures are exact; each exception has a reason in its Target's note."""
    for row in (r for r in all_rows() if r.op == op):
        target = next(t for t in registry.get(op).targets if (t.path, t.cls) == (row.path, row.cls))
        if not row.exact and target.note:
            assert target.note in row.difference
        else:
            assert row.exact, f"{op} {row.cls} for {row.host} {row.version}: {row.difference}"


def test_hosts_of_this_process_have_no_exception() -> None:
    rows = [row for row in all_rows() if row.host in ("diffusers", "timm", "transformers", "torch")]
    assert len({(row.host, row.version) for row in rows}) == 10
    later = {
        ("1.0.29", "TimmAttentionRope"),
        ("1.0.29", "TimmEvaBlock"),
    }  # ours have timm 1.0.30's keywords, too
    assert {(r.version, r.cls) for r in rows if not r.exact} == later


def test_surface_of_every_replaced_class_is_recorded() -> None:
    for row in all_rows():
        entry = versions.recorded(row.host)[row.version]["classes"][row.path]
        if row.host != "torch" and entry["kind"] == "class":
            assert "surface" in entry, f"{row.host} {row.version}: {row.path}"


def test_every_op_has_a_row_in_every_version_it_is_for() -> None:
    seen = {(r.op, r.host, r.version) for r in all_rows()}
    for name in registry.op_names():
        for target in registry.get(name).targets:
            found = [v for v in compare.versions(target.host) if target.applies_to(v)]
            assert found, (
                f"{name}: {target.cls} is for {target.host} {target.versions}, of which no version is recorded"
            )
            assert {(name, target.host, v) for v in found} <= seen


@pytest.mark.parametrize("name", registry.op_names())
def test_one_class_a_version(name: str) -> None:
    """One class, never two, for a path and version."""
    spec = registry.get(name)
    for host in {t.host for t in spec.targets}:
        for version in compare.versions(host):
            paths = [t.path for t in spec.targets_for(host, version)]
            assert len(paths) == len(set(paths)), f"{name}, {host} {version}: {sorted(paths)}"


def test_nothing_sets_its_signature() -> None:
    for file in (ROOT / "fastkernels").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        names |= {n.id for n in nodes if isinstance(n, ast.Name)}
        names |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not names & {"__signature__", "__text_signature__"}, file


@pytest.mark.parametrize("op", OPS)
def test_calls_bind(op: str) -> None:
    """A call with all recorded names binds, by keyword where allowed."""
    for row in (r for r in all_rows() if r.op == op and r.exact):
        bind(row)


def bind(row: compare.Comparison) -> None:
    ours = registry.op_class(row.op, row.cls)
    entry = versions.recorded(row.host)[row.version]["classes"][row.path]
    for method, text in entry["methods"].items():
        if method not in ("__init__", entry["call"]):
            continue
        text = compare.accepted(entry, method) or text
        function = (
            ours
            if entry["kind"] == "function"
            else getattr(ours, "forward" if method == "forward_native" else method)
        )
        theirs = ast.parse(f"def f{text}: pass").body[0]
        assert isinstance(theirs, ast.FunctionDef)
        bound = method != "__call__" and method not in entry["static"]
        static = isinstance(
            inspect.getattr_static(ours, getattr(function, "__name__", ""), None), staticmethod
        )
        first = [] if not bound or static else [object()]
        first += [] if bound or entry["kind"] == "function" or static else [object()]
        positional = [object() for _ in theirs.args.posonlyargs]
        keywords = {a.arg: object() for a in (*theirs.args.args, *theirs.args.kwonlyargs)}
        inspect.signature(function).bind(*first, *positional, **keywords)


class _Kind(enum.Enum):
    DECODER = "decoder"


class _Example(nn.Module):
    def __init__(
        self, a: int, /, b: float = 1e-6, *c: int, d: str = "x", kind: _Kind = _Kind.DECODER, **e: int
    ) -> None:
        super().__init__()

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None: ...


def _module(folder: Path, name: str, text: str) -> None:
    file = folder.joinpath(*name.split("."))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".py").write_text(text)


def test_recorder_reads_kinds_defaults_and_inherited_methods(tmp_path: Path) -> None:
    _module(tmp_path, "host.sizes", "PAD = 64\n")
    _module(
        tmp_path, "host.base",
        "import torch\nfrom .sizes import PAD\n"
        "class Base(torch.nn.Module):\n"
        "    def __init__(self, a, /, b: float = 1e-06, *c, d='x', kind=_Kind.DECODER, **e): ...\n"
        "    def forward(self, x, y=None, *, dtype=torch.float32): ...\n"
        "class Dispatched(Base):\n"
        "    def __init__(self, size=PAD, ratio=1.0 / 16): ...\n"
        "    def forward(self, *args, mode='a', **kwargs): ...\n"
        "    @staticmethod\n"
        "    def forward_native(x): ...\n",
    )  # fmt: skip
    _module(
        tmp_path, "host.derived", "from host.base import Base as B\n@dec\nclass Derived(B):\n    size = 3\n"
    )
    paths = ["host.derived:Derived", "host.base:Dispatched", "host.base:Absent", "host.base:Base"]
    data = record.record("host", "1.0", tmp_path, paths)["classes"]
    assert set(data) == set(paths) - {"host.base:Absent"}
    derived, dispatched = data["host.derived:Derived"], data["host.base:Dispatched"]
    assert derived["methods"]["__init__"] == "(a, /, b=1e-06, *c, d='x', kind=_Kind.DECODER, **e)"
    assert (derived["call"], derived["methods"]["forward"]) == (
        "forward",
        "(x, y=None, *, dtype=torch.float32)",
    )
    assert dispatched["methods"] == {"__init__": "(size=64, ratio=0.0625)", "forward_native": "(x)"}
    assert dispatched["dispatch"] == "(*args, mode='a', **kwargs)" and "dispatch" not in derived
    assert (dispatched["call"], dispatched["static"]) == ("forward_native", ["forward_native"])
    assert derived["fingerprint"] == versions.fingerprint("@dec\nclass Derived(B):\n    size = 3")
    assert compare.difference(derived, _Example) == compare.difference(data["host.base:Base"], _Example) == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("(a, /, b=1e-05, *c, d='x', kind=_Kind.DECODER, **e)", "b=1e-05"),
        ("(a, b=1e-06, *c, d='x', kind=_Kind.DECODER, **e)", "(a, b"),
        ("(a, /, b=1e-06, *, d='x', kind=_Kind.DECODER, **e)", "*, d"),
        ("(a, /, c=1e-06, *b, d='x', kind=_Kind.DECODER, **e)", "*b"),
        ("(a, /, b=1e-06, *c, kind=_Kind.DECODER, d='x', **e)", "kind=_Kind.DECODER, d"),
        (None, "has none of its own"),
    ],
)
def test_a_difference_is_found(text: str | None, message: str) -> None:
    """Defaults, kinds, names and order all count."""
    methods = {"forward": "(x, y=None, *, dtype=torch.float32)", **({"__init__": text} if text else {})}
    entry = {"kind": "class", "call": "forward", "methods": methods, "static": []}
    assert message in compare.difference(entry, _Example)


def test_keyword_of_a_dispatching_forward_is_compared() -> None:
    """Ours accepts what the host's forward(*args) accepts: the call's arguments and the dispatcher's keywords."""
    entry = {
        "kind": "class", "call": "forward_native", "static": [], "dispatch": "(*args, backend=None, **kwargs)",
        "methods": {"__init__": "()", "forward_native": "(x, y=1)"},
    }  # fmt: skip

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor, y: int = 1) -> None: ...

    class Accepting(Ours):
        def forward(self, x: torch.Tensor, y: int = 1, *, backend: object = None) -> None: ...

    assert compare.difference(entry, Ours) == "forward_native: host (x, y=1, *, backend=None), ours (x, y=1)"
    assert compare.difference(entry, Accepting) == ""
    older = {**entry, "dispatch": "(*args, **kwargs)"}  # one class for versions with and without the keyword
    assert compare.difference(older, Accepting) == compare.difference(older, Ours) == ""
    fixed = {**older, "call": "forward", "methods": {"__init__": "()", "forward": "(x, y=1)"}}
    assert compare.difference(fixed, Accepting) == "forward: host (x, y=1), ours (x, y=1, *, backend=None)"


def test_a_set_signature_is_ignored() -> None:
    class Liar(_Example):
        def forward(self, x: torch.Tensor) -> None: ...  # type: ignore[override]

    Liar.forward.__signature__ = inspect.signature(_Example.forward)  # type: ignore[attr-defined]
    assert compare.our_signature(Liar, "forward") == "(x)"


def test_fingerprint_ignores_space_only() -> None:
    text = "class A:\n    x = 1\n"
    assert versions.fingerprint(text) == versions.fingerprint("    class A:   \n\n        x = 1")
    assert versions.fingerprint(text) != versions.fingerprint(text.replace("1", "2"))


def test_versions_are_written_as_differences_and_read_whole(tmp_path: Path) -> None:
    """In any order: of each version only what differs from the next is in its file."""
    same, kept = {"call": "f", "static": []}, {"fingerprint": "1", "surface": {"used": ["a"]}}
    old = {"m:A": same, "m:B": {"fingerprint": "0"}, "m:Gone": same}
    new = {"m:A": same, "m:B": kept, "m:New": same}
    made = {"1.9.0": old, "1.10.0": {**new, "m:C": same}, "1.11.0": new}
    for version in ("1.10.0", "1.11.0", "1.9.0"):
        record.write({"host": "host", "version": version, "classes": made[version]}, tmp_path)
    found = versions.recorded("host", tmp_path)
    assert list(found) == list(made) and {v: d["classes"] for v, d in found.items()} == made
    files = {v: json.loads((tmp_path / "host/signatures" / f"{v}.json").read_text()) for v in made}
    assert files["1.11.0"]["classes"] == new and files["1.10.0"]["classes"] == {"m:C": same}
    assert files["1.9.0"] == {
        "host": "host", "version": "1.9.0", "next": "1.10.0",
        "classes": {
            "m:B": {"fingerprint": "0", "surface": None}, "m:C": None, "m:Gone": same, "m:New": None,
        },
    }  # fmt: skip


def test_an_overload_is_not_the_function(tmp_path: Path) -> None:
    text = "@overload\ndef f(x: int) -> int: ...\n@typing.overload\ndef f(x: str) -> str: ...\ndef f(x, y=3): ...\n"
    _module(tmp_path, "host.overloaded", text)
    entry = record.record("host", "1.0", tmp_path, ["host.overloaded:f"])["classes"]["host.overloaded:f"]
    assert entry["methods"] == {"__call__": "(x, y=3)"}
    assert entry["fingerprint"] == versions.fingerprint("def f(x, y=3): ...")


HOST_ROPE = """
import torch
class Dispatched(torch.nn.Module):
    def forward(self, *args): return self.forward_native(*args)
    @classmethod
    def enabled(cls): return True
class Rope(Dispatched):
    def __init__(self, size):
        self.size, self.table = size, self._table()
    def _table(self): ...
    def _rotate(self, x): ...
    def _unused(self): ...
    def forward_native(self, x): return self._rotate(x)
    def describe(self): ...
"""
HOST_MODEL = """
from host.layers.rope import Rope
from host import layers
def get_rope(size) -> "Rope | None": return Rope(size)
class Yarn(Rope):
    def _table(self): return self.size
class Whole(Yarn):
    def _rotate(self, x): return super().forward_native(x)
class Attention:
    def __init__(self): self.rope = get_rope(3)
    def forward(self, x): return self.rope.table
def plan(module, other: Rope):
    if isinstance(module, Rope):
        module.describe()
    other.of_no_class, x.enabled
    return Rope.enabled()
"""


def test_recorder_finds_what_the_host_uses_of_a_class(tmp_path: Path) -> None:
    """Overridden by subclasses at any depth; used on the class, on `self.NAME`, on arguments; passed by the call."""
    for name, text in (
        ("__init__", ""),
        ("layers.__init__", ""),
        ("layers.rope", HOST_ROPE),
        ("model", HOST_MODEL),
    ):
        _module(tmp_path, f"host.{name}", text)
    _module(
        tmp_path,
        "host.modular_model",
        "from host.layers.rope import Rope\nclass A(Rope):\n    def _unused(self): ...",
    )
    path = "host.layers.rope:Rope"
    entry = record.record("host", "1.0", tmp_path, [path], [path])["classes"][path]
    assert entry["surface"] == {
        "overridden": ["_rotate", "_table"],
        "used": ["describe", "enabled", "forward_native", "size", "table"],
        "reached": ["_rotate"],
    }

    class Ours(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size
            self.register_buffer("table", None)

        def describe(self) -> None: ...

    assert compare.lacking(entry, Ours) == ("_rotate", "_table", "enabled", "forward_native")
    assert "surface" not in record.record("host", "1.0", tmp_path, [path])["classes"][path]


def test_class_that_lacks_what_the_host_uses_is_not_exact() -> None:
    rows = {
        (r.op, r.path.partition(":")[2]): r for r in all_rows() if (r.host, r.version) == ("vllm", "0.32.0")
    }
    head, rope = rows["logits_processor", "LogitsProcessor"], rows["rotary_emb", "RotaryEmbedding"]
    assert not head.exact and {"get_top_tokens"} <= set(head.lacks) and "lacks" in head.difference
    assert rope.exact and rope.inherits and {"forward_native", "enabled"} <= set(rope.lacks)


def test_overrides_of_host_subclasses_reach_a_fork() -> None:
    """A subclass that overrides a part of a replaced call keeps the host's forward in a fork."""
    for row in all_rows():
        surface = versions.recorded(row.host)[row.version]["classes"].get(row.path, {}).get("surface", {})
        if row.inherits:
            cls = registry.op_class(row.op, row.cls)
            ours = {"forward", *getattr(cls, "live_methods", ())}
            parts = set(surface.get("reached", ())) - ours
            # Its only subclass, MRotaryEmbedding, has forward methods of its own.
            parts -= {"_match_cos_sin_cache_dtype"}
            assert all(name.startswith("forward_") for name in parts), (row.path, row.version, parts)


def test_wrong_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(record.RecordError, match="no folder 'vllm'"):
        record.record("vllm", "1.0", tmp_path, [])
    with pytest.raises(SystemExit):
        record.main(["vllm", "1.0", str(tmp_path)])
    assert "the wheel was unpacked into" in capsys.readouterr().err


@pytest.mark.parametrize("host", compare.hosts())
def test_installed_classes_are_known(host: str) -> None:
    """If a recorded version is installed, its sources are the recorded ones, read from the wheel or by import."""
    try:
        version = importlib.metadata.version(host).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{host} is not installed in this environment")
    if version not in compare.versions(host):
        pytest.skip(f"{host} {version} is not recorded")
    wanted = {t.path for name in registry.op_names() for t in registry.get(name).targets_for(host, version)}
    entries = versions.recorded(host)[version]["classes"]
    for path in wanted or list(entries)[:4]:
        module, _, name = path.partition(":")
        found = getattr(importlib.import_module(module), name)
        assert versions.unknown(host, version, path, found) is None
        assert versions.unknown_source(host, version, path, entries[path]["fingerprint"]) is None
    assert "which we do not know" in (versions.unknown_source(host, version, path, "0" * 16) or "")


def test_wrapper_of_other_code_is_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper that transformers' base class of layers makes is none, one around it is."""
    module = pytest.importorskip("transformers.models.dinov2.modeling_dinov2")
    text, stock = inspect.getsource(module), module.Dinov2Layer.forward
    assert versions.replaced(text, "Dinov2Layer", module.Dinov2Layer) is None

    @functools.wraps(stock)
    def forward(*args: object, **kwargs: object) -> object:
        return stock(*args, **kwargs)

    monkeypatch.setattr(module.Dinov2Layer, "forward", forward)
    found = versions.replaced(text, "Dinov2Layer", module.Dinov2Layer)
    assert found is not None and "Dinov2Layer.forward was replaced" in found.text
