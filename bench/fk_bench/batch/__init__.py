"""Long measurements in parts, each on GPUs of its own: queue, plan and preflight checks."""
