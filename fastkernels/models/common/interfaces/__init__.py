"""Interfaces of models that do not write text alone, and checks of what requests give them."""
