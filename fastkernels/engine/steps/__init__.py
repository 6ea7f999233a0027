"""The inputs and outputs of a step, and their way to the device."""
