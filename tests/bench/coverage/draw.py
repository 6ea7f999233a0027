"""Draw the modeling files that are checked by hand: `python tests/bench/coverage/draw.py`.

The draw was made from transformers 5.19.0, before the audit existed; a later version may draw other files.
"""

from __future__ import annotations

import random
from pathlib import Path

SEED, SIZE = 24, 40


def draw(root: Path) -> list[str]:
    """The drawn files below transformers' `models` folder, as "folder/modeling_name.py"."""
    files = sorted(file.relative_to(root).as_posix() for file in root.glob("*/modeling_*.py"))
    return sorted(random.Random(SEED).sample(files, SIZE))


if __name__ == "__main__":
    import transformers

    print("\n".join(draw(Path(transformers.__file__).parent / "models")))
