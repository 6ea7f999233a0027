"""The key of vLLM's compile cache: any change of a file that ships changes it. Compiled code that an undo restores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fk_integrations.vllm import compiled
from fk_integrations.vllm.compiled import Code, fingerprint, source_digest
from torch import nn

import fastkernels
from fastkernels.patch import PatchError, Request

ROOTS = (Path(fastkernels.__file__).parent, Path(compiled.__file__).parents[1])
FILES = {
    "core/env.py": "x = 1\n",
    "overrides/norm/rms_norm.py": "SPEC = 1\n",
    "overrides/norm/csrc/rms_norm.cu": "__global__ void f() {}\n",
    "tuned/cpu.json": "{}\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def move(source: str, target: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / source).rename(root / target)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "change a .py": lambda root: (root / "core/env.py").write_text("x = 2\n"),
    "change a .cu": lambda root: (root / "overrides/norm/csrc/rms_norm.cu").write_text("\n"),
    "change a table": lambda root: (root / "tuned/cpu.json").write_text("[]\n"),
    "add a .cu": lambda root: (root / "overrides/norm/csrc/more.cu").write_text(""),
    "add a table": lambda root: (root / "tuned/nvidia-h200.json").write_text("{}\n"),
    "add a header": lambda root: (root / "overrides/norm/csrc/kit.cuh").write_text(""),
    "remove a .cu": lambda root: (root / "overrides/norm/csrc/rms_norm.cu").unlink(),
    "remove a table": lambda root: (root / "tuned/cpu.json").unlink(),
    "move a .py": move("overrides/norm/rms_norm.py", "overrides/kit/rms_norm.py"),
    "move a .cu": move("overrides/norm/csrc/rms_norm.cu", "overrides/kit/csrc/rms_norm.cu"),
    "swap contents": lambda root: [
        (root / "core/env.py").write_text(FILES["overrides/norm/rms_norm.py"]),
        (root / "overrides/norm/rms_norm.py").write_text(FILES["core/env.py"]),
    ],
    "shift a byte from name to content": move("tuned/cpu.json", "tuned/cpu.jso"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_file_changes_the_digest(change: Callable[[Path], object], package: Path) -> None:
    before = source_digest(package)
    assert source_digest(package) == before
    change(package)
    assert source_digest(package) != before


def test_compiled_python_and_the_folder_do_not_count(
    package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = source_digest(package)
    (package / "core" / "__pycache__").mkdir()
    (package / "core" / "__pycache__" / "env.cpython-311.pyc").write_bytes(b"x")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(package, elsewhere)
    assert source_digest(package) == before == source_digest(elsewhere)


def test_a_missing_file_or_package_is_an_error(package: Path) -> None:
    (package / "tuned" / "gone.json").symlink_to(package / "nothing")
    with pytest.raises(FileNotFoundError, match=r"gone\.json"):
        source_digest(package)
    with pytest.raises(ValueError, match="no Python source"):
        source_digest(package / "absent")
    with pytest.raises(PatchError, match=r"candidate for rms_norm: there is no file .*none\.py"):
        fingerprint(Request("patch", candidates={"rms_norm": str(package / "none.py")}))


@pytest.mark.parametrize("suffix", [".py", ".cu", ".json"])
def test_the_fingerprint_reads_every_file_that_ships(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[Path] = set()
    plain = Path.read_bytes

    def note(self: Path) -> bytes:
        read.add(self)
        return plain(self)

    monkeypatch.setattr(Path, "read_bytes", note)
    fingerprint(Request("patch"))
    ships = {file for root in ROOTS for file in root.rglob(f"*{suffix}")}
    assert len(ships) > 3 and ships <= read


def test_requests_providers_and_tables_change_the_fingerprint(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = package / "core/env.py"
    keys = [fingerprint(Request("patch"))]
    assert fingerprint(Request("undo")) == keys[0]
    keys.append(fingerprint(Request("patch", ("rms_norm",))))
    keys.append(fingerprint(Request("patch", strict=True)))
    keys.append(fingerprint(Request("patch", candidates={"rms_norm": str(candidate)})))
    candidate.write_text("x = 2\n")
    keys.append(fingerprint(Request("patch", candidates={"rms_norm": str(candidate)})))
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "rms_norm:reference")
    keys.append(fingerprint(Request("patch")))
    monkeypatch.delenv("FASTKERNELS_PROVIDER")
    table = package / "tuned" / "cpu.json"
    for i, tables in enumerate((table.parent, table.parent, table)):
        table.write_text(f"{i}")
        monkeypatch.setenv("FASTKERNELS_TUNED", str(tables))
        keys.append(fingerprint(Request("patch")))
    monkeypatch.setenv("FASTKERNELS_TUNED", "0")
    keys.append(fingerprint(Request("patch")))
    assert len(set(keys)) == len(keys)


def test_code_before_a_patch_is_restored_without_other_changes() -> None:
    config, model, before, after = SimpleNamespace(cache_dir="stock"), nn.Module(), object(), object()
    model.aot_compiled_fn, model.sleeping = before, False
    stock = Code.of(config, [model])
    assert stock.restorable
    config.cache_dir, model.aot_compiled_fn, model.added = "ours", after, 1
    changes = stock.changes()
    model.sleeping = True
    changes.restore()
    assert model.aot_compiled_fn is before and config.cache_dir == "stock"
    assert model.sleeping and not hasattr(model, "added")


def test_code_of_dynamo_alone_is_not_restorable() -> None:
    model = nn.Module()
    model.aot_compiled_fn = None
    assert not Code.of(SimpleNamespace(), [model]).restorable
