"""`fk-bench tables`: the tables of the documents and the README's figure, made from row files only."""
