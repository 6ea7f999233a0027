"""Options of the engine: its configuration, runners by name, and speculation."""
