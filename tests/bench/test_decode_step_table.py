"""The tuned table that decode_step.py makes of skinny_linear.py's rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "scenarios"))
from decode_step import table_of
from linear_kernels import label

from fastkernels.overrides.l1 import _wgmma_linear_cuda as wgmma


def test_sets_with_other_parameters_than_the_first_are_found(tmp_path: Path) -> None:
    best = next(p for p in wgmma.PARAMS if len(p) > len(wgmma.PARAMS[0]))
    times = [
        ("cublas", 10.0, ""),
        ("cuda-wgmma", 8.0, label(wgmma.PARAMS[0])),
        ("cuda-wgmma", 5.0, label(best)),
    ]
    case = {"kind": "time", "out": 4096, "in": 4096, "tokens": 8}
    lines = [
        {
            "status": "ok",
            "subject": {"provider": p},
            "case": {**case, "params": params},
            "metrics": {"us": us},
        }
        for p, us, params in times
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, lines)))
    (entry,) = json.loads(table_of(rows, tmp_path / "table.json", "a chip").read_text())["entries"]
    assert (entry["provider"], entry["params"], entry["speedup"]) == ("cuda-wgmma", best, 2.0)
