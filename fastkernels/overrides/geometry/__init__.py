"""Rendering: projection, colors, tiles and rasterization of 3-D Gaussians; encodings, marching and compositing of rays."""
