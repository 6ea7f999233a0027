"""gsplat: the functions that its `rasterization` calls."""
