"""Hosts' engines that force tokens or encode inputs, one a file; each is run by its host's own interpreter.

`Engine(model, options)` has `target`, which a patch takes, `decode` or `encode`, and `close()`."""
