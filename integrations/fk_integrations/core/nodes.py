"""The machine that a process runs on, as users know it. Sent to other machines by value: it needs only Python there."""

from __future__ import annotations

import socket
import sys


def node() -> str:
    """The name of this machine; in a process of Ray also the id of its node, of which one machine can have several."""
    name, ray = socket.gethostname(), sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return name
    return f"{name}, Ray node {ray.get_runtime_context().get_node_id()[:12]}"
