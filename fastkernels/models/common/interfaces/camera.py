"""Cameras of requests to models that render, and the interface of these models.

Every model of the runner Render has render(cameras), which returns for each camera the image [height, width, 4] in
float32 on the model's device: red, green and blue, with the background behind them, and the opacity. All cameras have
the same size. ready(folder, dummy) is called once the weights are loaded, and refresh() after
the model's code has changed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

FIELDS = ("width", "height", "K", "viewmat", "pose", "background")
RIGID = 1e-3  # by which a rotation's columns may differ from an orthonormal basis


@dataclass(frozen=True)
class Camera:
    """A pinhole camera; its axes are OpenCV's: x to the right, y down, z forward.

    intrinsics  [3, 3] float32, in pixels
    viewmat     [4, 4] float32, world to camera
    background  (red, green, blue)
    """

    width: int
    height: int
    intrinsics: np.ndarray
    viewmat: np.ndarray
    background: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height


def read(given: Any, max_pixels: int) -> Camera:
    """The camera of a request: {"width", "height", "K": 3 x 3, "viewmat" or "pose": 4 x 4, "background": 3 numbers}.

    pose: camera to world, the inverse of viewmat. Raises ValueError, whose message begins with the field.
    """
    if isinstance(given, Camera):
        given = {
            name: getattr(given, {"K": "intrinsics"}.get(name, name)) for name in FIELDS if name != "pose"
        }
    if not isinstance(given, Mapping):
        raise ValueError(f"camera must be an object with {', '.join(FIELDS)}, got {reprlib.repr(given)}")
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(f"{unknown[0]} is not a field of a camera; known: {', '.join(FIELDS)}")
    width, height = (_size(given, name) for name in ("width", "height"))
    if width * height > max_pixels:
        raise ValueError(
            f"width times height must be at most {max_pixels} pixels, got {width * height} ({width} x {height})"
        )
    k = _matrix(given, "K", 3)
    if not (k[0, 0] > 0 and k[1, 1] > 0):
        raise ValueError(f"K must have focal lengths above 0, got {k[0, 0]:g} and {k[1, 1]:g}")
    if k[0, 1] or k[1, 0] or k[2].tolist() != [0, 0, 1]:
        raise ValueError(f"K must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]], got {k.tolist()}")
    if (given.get("viewmat") is None) == (given.get("pose") is None):
        raise ValueError("viewmat or pose is needed, and not both: world to camera, or camera to world")
    name = "viewmat" if given.get("viewmat") is not None else "pose"
    view = _matrix(given, name, 4)
    turn = view[:3, :3]
    if view[3].tolist() != [0, 0, 0, 1] or not np.allclose(turn @ turn.T, np.eye(3), atol=RIGID):
        raise ValueError(
            f"{name} must be a rotation and a translation above [0, 0, 0, 1], got {view.tolist()}"
        )
    if np.linalg.det(turn) < 0:
        raise ValueError(f"{name} mirrors the scene: the determinant of its rotation is -1")
    if name == "pose":
        view = np.block([[turn.T, -turn.T @ view[:3, 3:]], [view[3:]]])
    color = given.get("background")
    background = _numbers((0.0, 0.0, 0.0) if color is None else color, "background", (3,))
    return Camera(width, height, k.astype(np.float32), view.astype(np.float32), tuple(background.tolist()))


def _size(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {reprlib.repr(value)}")
    return int(value)


def _matrix(given: Mapping[str, Any], name: str, size: int) -> np.ndarray:
    return _numbers(given.get(name), name, (size, size))


def _numbers(value: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float64 array of this shape. Raises ValueError."""
    wanted = f"{name} must be {' x '.join(map(str, shape))} finite numbers in float32"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        made = np.asarray(value)
    except ValueError:  # rows of different lengths
        made = np.empty(0)
    if made.shape != shape or made.dtype.kind not in "iuf":
        raise ValueError(f"{wanted}, got {reprlib.repr(value)}")
    made = made.astype(np.float64)
    if not (np.abs(made) <= np.finfo(np.float32).max).all():
        raise ValueError(f"{wanted}, got {reprlib.repr(value)}")
    return made


def stacked(
    cameras: Sequence[Camera], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(viewmats [C, 4, 4], intrinsics [C, 3, 3], backgrounds [C, 3]) in float32, by one copy."""
    rows = [
        np.concatenate((c.viewmat.ravel(), c.intrinsics.ravel(), np.array(c.background, np.float32)))
        for c in cameras
    ]
    table = torch.from_numpy(np.stack(rows).astype(np.float32))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    views, ks, backgrounds = table.split((16, 9, 3), 1)
    return views.reshape(-1, 4, 4), ks.reshape(-1, 3, 3), backgrounds


def rays(
    viewmats: torch.Tensor, intrinsics: torch.Tensor, width: int, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(origins, directions), each [C * height * width, 3]: the unit rays through the centers of all pixels."""
    device, dtype = viewmats.device, viewmats.dtype
    y, x = torch.meshgrid(
        torch.arange(height, device=device, dtype=dtype), torch.arange(width, device=device, dtype=dtype),
        indexing="ij",
    )  # fmt: skip
    fx, fy, cx, cy = (intrinsics[:, i, j, None, None] for i, j in ((0, 0), (1, 1), (0, 2), (1, 2)))
    across, along = (x + 0.5 - cx) / fx, (y + 0.5 - cy) / fy
    local = torch.stack((across, along, torch.ones_like(across)), -1)  # [C, H, W, 3]
    rotation = viewmats[:, :3, :3]
    directions = F.normalize(torch.einsum("chwi,cij->chwj", local, rotation), dim=-1)
    origins = -torch.einsum("cji,cj->ci", rotation, viewmats[:, :3, 3])
    return origins[:, None, None].expand_as(directions).reshape(-1, 3), directions.reshape(-1, 3)
