"""The board: a static site that ranks sets by their rows, from folders that anyone may submit.

submission reads and checks a folder, standings ranks, figures draws, site writes the pages.
"""
