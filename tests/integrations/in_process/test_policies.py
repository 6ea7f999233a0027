"""Pi0 of transformers, and blocks of diffusion_policy_3d where a checkout is on the path, patched and undone."""

from __future__ import annotations

import pytest
import torch
from support import policies
from torch import nn

import fastkernels


def inputs() -> dict[str, torch.Tensor]:
    """Two rows with two cameras; the second prompt is shorter."""
    generator = torch.Generator().manual_seed(0)
    images = torch.full((2, 2 * policies.IMAGE_TOKENS), policies.IMAGE_TOKEN)
    ids = torch.cat((images, torch.tensor([[2, 5, 6], [2, 9, 0]])), 1)
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    return {
        "state": torch.randn(2, 9, generator=generator), "input_ids": ids, "attention_mask": mask,
        "pixel_values": torch.randn(2, 2, 3, 16, 16, generator=generator),
        "pixel_attention_mask": torch.ones(2, 2, dtype=torch.bool),
        "noise": torch.randn(2, 5, 6, generator=generator),
    }  # fmt: skip


def test_patched_pi0_gives_the_same_actions() -> None:
    model, given = policies.pi0_reference(), inputs()
    want, classes = model.sample_actions(**given), [type(m) for m in model.modules()]
    ops = ["gated_gelu_mlp", "gemma_rms_norm", "layer_norm", "rotary_emb", "attention_dense"]
    report = fastkernels.patch(model, ops=ops)
    found = model.sample_actions(**given)
    rows = {row.op: row for row in report.refresh().rows if row.modules}
    assert set(rows) == set(ops) and all(row.calls > 0 and row.proof == "calls" for row in rows.values()), (
        report
    )
    assert rows["gated_gelu_mlp"].modules == 6 and rows["gemma_rms_norm"].modules == 14
    assert rows["gemma_rms_norm"].calls == 7 + 4 * 7  # the prefix once, and four steps
    torch.testing.assert_close(found, want, atol=2e-5, rtol=2e-5)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model.sample_actions(**given), want)


def test_patched_block_of_dp3_gives_the_same() -> None:
    """Needs a checkout of github.com/YanjieZe/3D-Diffusion-Policy on PYTHONPATH: it is in no registry."""
    theirs = pytest.importorskip("diffusion_policy_3d.model.diffusion.conv1d_components")
    torch.manual_seed(0)
    model = nn.Sequential(theirs.Conv1dBlock(6, 16, 5), theirs.Conv1dBlock(16, 24, 3, n_groups=4)).eval()
    even = theirs.Conv1dBlock(24, 8, 4)  # another length: the host's
    x, classes = torch.randn(3, 6, 9), [type(m) for m in model.modules()]
    with torch.no_grad():
        want = even(model(x))
        report = fastkernels.patch(nn.Sequential(model, even), ops=["conv1d_norm_mish"])
        found = even(model(x))
    (row,) = [row for row in report.refresh().rows if row.modules]
    assert (row.modules, row.calls) == (2, 2), report
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
