"""The algorithms of serving: pages, prefix cache, admission, fairness, scheduling. No I/O, no clock, no torch."""
