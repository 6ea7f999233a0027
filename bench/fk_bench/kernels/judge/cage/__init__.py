"""The cage of a candidate's process: its root, system calls, privileges and limits of memory."""
