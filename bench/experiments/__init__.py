"""Scripts that answer one question each; see the README of each folder. Not part of the installed package."""
