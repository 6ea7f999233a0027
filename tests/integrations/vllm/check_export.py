"""Exported files over real vLLM classes, in a process without FastKernels."""

import subprocess
import sys

from fastkernels.export.exporter import export

CODE = """
import sys, torch
sys.modules.update(dict.fromkeys(["fastkernels", "fk_integrations", "fk_bench"]))  # importing them fails
sys.path.insert(0, sys.argv[1])
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)

with set_current_vllm_config(VllmConfig()):
    import rms_norm, rotary_emb, silu_and_mul

    ours, theirs = rms_norm.RMSNorm(128, 1e-5), RMSNorm(128, 1e-5)
    assert isinstance(ours, RMSNorm)
    ours.weight.data.normal_(1.0, 0.1)
    theirs.load_state_dict(ours.state_dict())
    x, residual = torch.randn(5, 128), torch.randn(5, 128)
    close([ours(x.clone())], [theirs.forward_native(x.clone())])
    close(ours(x.clone(), residual.clone()), theirs.forward_native(x.clone(), residual.clone()))
    close([silu_and_mul.SiluAndMul()(x)], [SiluAndMul().forward_native(x)])
    rope = (64, 64, 256, 10000.0, True, torch.float32)
    ours, theirs = rotary_emb.RotaryEmbedding(*rope), RotaryEmbedding(*rope)
    positions, query, key = torch.arange(7), torch.randn(7, 128), torch.randn(7, 64)
    close(
        ours(positions, query.clone(), key.clone()),
        theirs.forward_native(positions, query.clone(), key.clone()),
    )
print("same")
"""


def test_pasted_files_equal_the_host(tmp_path):
    import vllm

    for op in ("rms_norm", "silu_and_mul", "rotary_emb"):
        (tmp_path / f"{op}.py").write_text(export(op, "vllm", vllm.__version__.partition("+")[0]))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("same\n"), done.stderr[-3000:]
