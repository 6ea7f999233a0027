"""The judge of kernels: candidate and baseline in processes of their own, inputs, clock and oracle outside both."""

from .judge import Judge, Options, judge_ops

__all__ = ["Judge", "Options", "judge_ops"]
