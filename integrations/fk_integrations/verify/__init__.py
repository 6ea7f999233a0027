"""Measuring a model's shapes at patch time, and agreeing on the choices among ranks."""
