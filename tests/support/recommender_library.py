"""torchrec and torch_geometric in a folder of their own, in the cache: torchrec pins another torchmetrics than ours.

`PYTHONPATH=tests python tests/support/recommender_library.py` prints the folder, for PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path

from support.fla_library import installed

# torchrec 1.8 and fbgemm 1.8 are for torch 2.13, whose kernels for a CPU are in fbgemm-gpu-cpu
PACKAGES = (
    "torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", "tensordict==0.15.3", "pyvers==0.2.3", "orjson==3.13.0",
    "pyre-extensions==0.0.32", "typing-inspect==0.9.0", "mypy-extensions==1.2.0", "torch_geometric==2.8.1",
    "xxhash==4.1.0", "pyparsing==3.3.3",
)  # fmt: skip


def library_path() -> Path:
    """The folder of the packages, without their dependencies; installs them first if they are not in the cache."""
    return installed("recommenders-1.8.0-2.8.1", PACKAGES)


if __name__ == "__main__":
    print(library_path())
