"""Engines: one for each kind of model, from requests to outputs."""
