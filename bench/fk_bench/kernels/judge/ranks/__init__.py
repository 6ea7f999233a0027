"""Collectives, judged over several processes: a cage for each rank of both sides, and the judge between them."""
