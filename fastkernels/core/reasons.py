"""Why an op or a module is not ours: a kind, on which code decides, and a text for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phrase(str, Enum):
    """The three phrases for what is not ours; docs/patch.md defines them."""

    LEFT = "left to the host"
    UNSUPPORTED = "unsupported"
    FELL_BACK = "fell back"


class Kind(str, Enum):
    """The outcomes of a patch that need a reason. Values are part of the report's JSON."""

    LEFT_TO_HOST = "left_to_host"  # not requested, and the host's own code is not known to be slower
    UNTUNED = "untuned"  # not requested, and no table has measurements of this chip
    NO_OP = "no_op"  # no op computes modules of this class in this host
    UNSUPPORTED = "unsupported"  # our code does not serve this module
    REPLACED = "replaced"  # another patch has changed the class or the instance
    DISABLED = "disabled"  # FASTKERNELS_DISABLE
    BATCH_INVARIANT = "batch_invariant"  # the host promises results that do not depend on the batch
    NOT_IN_HOST = "not_in_host"  # this host version has no such class
    UNKNOWN_VERSION = "unknown_version"  # the source of the host's class is not a recorded one
    NO_SUCH_MODULE = "no_such_module"  # the model has no module of the class
    OTHER_CLASS = (
        "other_class"  # a subclass, or another class of the same name: not known to compute the same
    )
    UNRECOGNIZED = (
        "unrecognized"  # requested, and all that may compute the op is not known to compute the same
    )
    NO_SEAM = "no_seam"  # requested, and a live host has no place for the op
    CANDIDATE = "candidate"  # a user's candidate runs here
    CANDIDATE_UNCALLED = "candidate_uncalled"  # installed, and no call yet
    CANDIDATE_UNUSED = "candidate_unused"  # nothing in the model can run it
    FUSED = "fused"  # another op of ours runs in its place

    @property
    def left(self) -> bool:
        """Whether the host's code stays by our choice. Such a reason is never an error."""
        return self in (Kind.LEFT_TO_HOST, Kind.UNTUNED, Kind.NO_OP)

    @property
    def phrase(self) -> Phrase:
        """The words of reports and logs for a module that is not ours for this reason."""
        chosen = self.left or self in (Kind.DISABLED, Kind.BATCH_INVARIANT)
        return Phrase.LEFT if chosen else Phrase.UNSUPPORTED

    @property
    def harmless(self) -> bool:
        """Whether a strict patch accepts it."""
        return self.left or self in _HARMLESS


_HARMLESS = (
    Kind.DISABLED, Kind.NO_SUCH_MODULE, Kind.OTHER_CLASS, Kind.CANDIDATE, Kind.CANDIDATE_UNCALLED, Kind.FUSED,
)  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """One outcome. Rewording `text` changes no decision."""

    kind: Kind
    text: str
