"""Reading and checking the configs of checkpoints, without transformers where possible."""
