"""Runners: how a model of each kind runs a step on one rank."""
