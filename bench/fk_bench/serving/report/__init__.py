"""The results of a serve-compare run for people, made from its rows: verdict, HTML page, terminal table, CSV."""
