"""`fk-bench e2e`: whole models offline in several hosts, their startup times, the CPU cost of a scheduler step."""
