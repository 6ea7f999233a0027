"""Detectors of ultralytics: convolutions with norm and activation, and attention, before and after `fuse()`."""
