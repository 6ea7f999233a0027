"""Commands that inform and measure nothing: `doctor`, `list`, `stubs`, `export`."""
