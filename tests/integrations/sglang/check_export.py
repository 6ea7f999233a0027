"""Exported files over real SGLang classes, in a process without FastKernels."""

import subprocess
import sys

from fastkernels.export.exporter import export

CODE = """
import sys, torch
sys.modules.update(dict.fromkeys(["fastkernels", "fk_integrations", "fk_bench"]))  # importing them fails
sys.path.insert(0, sys.argv[1])
from sglang.srt import server_args
server_args.set_global_server_args_for_scheduler(server_args.ServerArgs(model_path="dummy"))
import rms_norm, silu_and_mul
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm

ours, theirs = rms_norm.RMSNorm(128, 1e-5), RMSNorm(128, 1e-5)
assert isinstance(ours, RMSNorm)
ours.weight.data.normal_(1.0, 0.1)
theirs.load_state_dict(ours.state_dict())
x = torch.randn(5, 128)
torch.testing.assert_close(ours(x.clone()), theirs.forward_native(x.clone()))
torch.testing.assert_close(silu_and_mul.SiluAndMul()(x), SiluAndMul().forward_native(x))
print("same")
"""


def test_pasted_files_equal_the_host(tmp_path):
    import sglang

    for op in ("rms_norm", "silu_and_mul"):
        (tmp_path / f"{op}.py").write_text(export(op, "sglang", sglang.__version__))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("same\n"), done.stderr[-3000:]
