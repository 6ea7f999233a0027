"""One run of `fk-bench serve-compare`, and the commands on runs: `diff` and `report`."""
