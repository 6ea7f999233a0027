"""`fk-bench capture`: records the calls that a model makes to each op; replays them as cases. data/ ships some."""
