"""On import, a fork server loads our compiled C++ kernels: its children are in cages without the files."""

from fastkernels.overrides.kit import cpp

LOADED = cpp.load_kept()
