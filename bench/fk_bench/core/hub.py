"""Models of the hub, as far as a second tells: the form of an id, the local cache, and whether the hub answers."""

from __future__ import annotations

import re
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

ANSWERS_WITHIN_S = 1.0  # the libraries retry for most of a minute


class ModelError(ValueError):
    """A model without a usable config; the message says why, and what to give instead."""


def is_id(model: str) -> bool:
    """Whether a name has the form OWNER/NAME or OWNER/NAME@REVISION."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", model) is not None


def check(model: str) -> None:
    """Raise ModelError for an id that is not in the local cache if the hub is off or does not answer."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE

    owner, _, name = model.partition("@")[0].partition("/")
    if (Path(HF_HUB_CACHE) / f"models--{owner}--{name}").is_dir():
        return
    if HF_HUB_OFFLINE:
        raise ModelError(f"{model} is not in the local cache, {HF_HUB_CACHE}, and HF_HUB_OFFLINE is set.")
    if not answers(ENDPOINT):
        raise ModelError(
            f"{model} is not in the local cache, {HF_HUB_CACHE}, and {ENDPOINT} does not answer."
        )


def answers(url: str, seconds: float = ANSWERS_WITHIN_S) -> bool:
    """Whether a connection to the server, or to the proxy in front of it, opens in time; its name included."""
    parts = urlsplit(url)
    proxy = urlsplit(getproxies().get(parts.scheme, ""))
    where = proxy if proxy.hostname else parts
    address = (where.hostname or "", where.port or (443 if where.scheme == "https" else 80))
    opened = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=seconds).close()
            opened.set()
        except OSError:
            pass
        finally:
            ended.set()

    # looking up a name has no time limit of its own
    ended = threading.Event()
    threading.Thread(target=connect, daemon=True).start()
    ended.wait(seconds)
    return opened.is_set()
