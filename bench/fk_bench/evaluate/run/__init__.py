"""The run of `fk-bench eval`: items in processes of their own, drop and retry, rows, score and report."""
