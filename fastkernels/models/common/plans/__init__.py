"""Plans and blocks of models, and models built from checkpoints."""
