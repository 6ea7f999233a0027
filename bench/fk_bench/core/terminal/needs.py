"""Messages of commands that need a name: they have no small default."""

from __future__ import annotations

# what to give to a command that has no small default
NEEDS = {
    "tune": "give a model, as in `fk-bench tune qwen3-8b`, a folder with config.json, or ops, as in"
    " `fk-bench tune linear`; `fk-bench tune all` measures every op that is dispatched by shape",
    "patch-compare": "give models, as in `fk-bench patch-compare qwen2.5-7b`, or all; or with --out the folder of an"
    " earlier run, whose rows are shown",
    "track": "give folders of runs, as in `fk-bench track fk-bench-runs/agents-1`, or show [OP], best OP, or"
    " diff DIGEST DIGEST",
    "profile": "give an op, as in `fk-bench profile rms_norm`, a model, as in `fk-bench profile llama-3.1-8b`, or a"
    " run of `fk-bench kernels`",
    "trace": "give a folder, as in `fk-bench trace export dataset --ops rms_norm` or `fk-bench trace import dataset`",
    "agent-loop": "give an agent and ops, as in `fk-bench agent-loop --command ./improve.sh --ops rms_norm`, or a known"
    " agent, as in `fk-bench agent-loop --agent codex --ops rms_norm --budget 20m`",
}
