"""The memory of inputs and outputs: layout, slots, sharing between processes, permuted copies."""
