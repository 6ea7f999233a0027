"""Record, compare and check the signatures and surfaces of a host's classes, from their source."""
