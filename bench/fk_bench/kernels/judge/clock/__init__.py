"""From timed batches to times: slopes, confidence intervals, and the lower bound that the hardware sets."""
