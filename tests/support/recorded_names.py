"""Add a checkpoint's names and shapes to tests/models/checkpoints.json.xz: FOLDER SOURCE, where it is from."""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "models" / "checkpoints.json.xz"
LEFT_OUT = ("transformers_version", "_name_or_path", "auto_map")


def shapes(folder: Path) -> dict[str, list[int]]:
    """{key: shape}, from the headers of the safetensors files alone."""
    found: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found |= {key: entry["shape"] for key, entry in header.items() if key != "__metadata__"}
    return found


def patterns(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """The same with one key, `layers.{0..31}.mlp`, for keys of one shape whose first number runs through a range."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for key, shape in found.items():
        number = re.search(r"(?<=\.)\d+(?=\.)", key)
        text = f"{key[: number.start()]}{{}}{key[number.end() :]}" if number else key
        groups[text, tuple(shape)].append(int(number[0]) if number else -1)
    made: dict[str, list[int]] = {}
    for (text, shape), numbers in groups.items():
        first, last = min(numbers), max(numbers)
        if first >= 0 and len(numbers) == last - first + 1 > 1:
            made[text.replace("{}", f"{{{first}..{last}}}")] = list(shape)
        else:
            made |= {text.replace("{}", str(number)): list(shape) for number in numbers}
    return dict(sorted(made.items()))


def row(folder: Path, source: str) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    name = config.get("_name_or_path") or folder.name
    kept = {key: value for key, value in sorted(config.items()) if key not in LEFT_OUT}
    return {"id": name, "source": source, "config": kept, "keys": patterns(shapes(folder))}


def add(folder: Path, source: str) -> None:
    made = row(folder, source)
    if not made["keys"]:
        sys.exit(f"{folder} has no *.safetensors: download the checkpoint, or save random weights there")
    rows = [old for old in json.loads(lzma.decompress(FILE.read_bytes())) if old["id"] != made["id"]]
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in [*rows, made])
    FILE.write_bytes(lzma.compress(f"[\n{lines}\n]\n".encode(), preset=9))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tests/support/recorded_names.py FOLDER SOURCE")
    add(Path(sys.argv[1]), sys.argv[2])
