"""`fk-bench scaffold`: the model file, the unmatched modules and the task files of an architecture of transformers."""
