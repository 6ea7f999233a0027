"""Vision encoders: images to vectors and classes."""
