"""The library's autotuners measure on a GPU, also in Triton's interpreter: with one configuration they do not."""

from typing import Any

from triton.runtime.autotuner import Autotuner

_stock = Autotuner.__init__


def _with_one(self: Any, *args: Any, **kwargs: Any) -> None:
    _stock(self, *args, **kwargs)
    self.configs = self.configs[:1]


Autotuner.__init__ = _with_one
