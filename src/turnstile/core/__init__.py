"""The algorithms: pages, prefix cache, admission, fairness, scheduling. No I/O, no clock."""
