"""A live patch of SGLang is refused by name where its RPC does not reach every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fk_integrations.sglang.host import HOST

from fastkernels.patch import PatchError, Request


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2}, "the engine runs on several machines: start it with FASTKERNELS=1 on each of them"),
        ({"dp_size": 2}, "reaches one data-parallel replica only: start the engine with FASTKERNELS=1"),
    ],
)
def test_unreachable_ranks_refuse_a_live_patch(arguments: dict[str, Any], message: str) -> None:
    engine = SimpleNamespace(send_to_rpc=object(), server_args=SimpleNamespace(**arguments))
    for action in ("patch", "undo"):
        with pytest.raises(PatchError, match=message):
            HOST.call(engine, Request(action))
