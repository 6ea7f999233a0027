"""vLLM's CPU platform with Ray's name for its devices: an installed platform plugin of the checks on Ray.

vLLM starts workers on Ray on platforms that name a device of Ray. Its CPU platform names none, and nothing else keeps
it from doing so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ENTRY = "[vllm.platform_plugins]\nray_on_cpu = support.hosts.ray_on_cpu:register\n"


def register() -> str:
    return f"{__name__}.RayOnCpu"


def __getattr__(name: str) -> Any:
    if name != "RayOnCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform

    class RayOnCpu(CpuPlatform):
        ray_device_key = "GPU"

        @classmethod
        def set_device(cls, device: Any) -> None:
            """RayDistributedExecutor sets the device of its thread."""

    globals()[name] = RayOnCpu
    return RayOnCpu


def install(folder: Path, packages: Path) -> None:
    """Put this plugin, and Ray from another environment, on the path of this process and its children.

    folder    where they are put
    packages  the site-packages of that environment, of the same Python
    """
    metadata = folder / "ray_on_cpu-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-on-cpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY)
    for name in ("ray", "msgpack"):
        if importlib.util.find_spec(name) is None:
            for found in [packages / name, *packages.glob(f"{name}-*.dist-info")]:
                (folder / found.name).symlink_to(found)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
