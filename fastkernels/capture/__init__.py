"""Record the calls of our ops while a model runs in any host: signatures, counts and integer inputs.

`record` has an example. The names below are the package's interface.
"""

from fastkernels.capture.calls import FLOAT_VALUES, extent
from fastkernels.capture.keep import SCHEMA, Limits
from fastkernels.capture.modules import Modules, record_modules
from fastkernels.capture.recording import Recording, record, start, stop

__all__ = [
    "FLOAT_VALUES", "SCHEMA", "Limits", "Modules", "Recording", "extent", "record", "record_modules", "start", "stop",
]  # fmt: skip
