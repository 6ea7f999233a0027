"""The classes of live modules: their methods, the choice between the host's code and ours, and the calls they count."""
