"""The Python of README and of docs/start.md that patches a live engine, in a real vLLM with a tiny model."""

import gc
import os

import pytest
from support import guides

NAME = '"meta-llama/Llama-3.1-8B-Instruct"'


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_patch_of_the_guide(page, capsys):
    (block,) = (b for b in guides.blocks(guides.ROOT / page, "python") if "import LLM" in b)
    assert block.count(NAME) == 1
    scope = {}
    exec(block.replace(NAME, repr(os.environ["TINY_LLAMA"])), scope)
    assert "left to the host" in capsys.readouterr().out  # on a CPU all is
    assert scope["llm"].generate("The", use_tqdm=False)[0].outputs[0].token_ids
    scope.clear()
    gc.collect()
