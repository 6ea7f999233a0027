"""Defaults of openfold3's arguments that are objects of its own: biases of layers and their first values.

Apart from the modules, so that a candidate may use them: they lead to no kernel.
"""

from __future__ import annotations


class Named:
    """An object of the host, by its name there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ADA_LN, ATT, DIFFUSION = (
    Named(f"lin_init.{n}_init") for n in ("ada_ln", "att_pair_bias", "diffusion_att_pair_bias")
)
OPM, SWIGLU, TRI_ATT, TRI_MUL = (
    Named(f"lin_init.{n}_init") for n in ("opm", "swiglu_transition", "tri_att", "tri_mul")
)
