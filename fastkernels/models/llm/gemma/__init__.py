"""Google's Gemma models, without vision."""
