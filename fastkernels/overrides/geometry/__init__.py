"""Rendering: projection, colors, tiles and rasterization of 3-D Gaussians; encodings, marching, compositing of rays."""
