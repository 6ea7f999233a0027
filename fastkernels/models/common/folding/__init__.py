"""Features of proteins and nucleic acids for structure prediction, and structures as text."""
