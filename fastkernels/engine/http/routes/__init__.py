"""Routes by what a model does, and the state that their handlers share."""
