"""`fk-bench explain`: the time of a model step, call by call, and what measured kernels would save."""
