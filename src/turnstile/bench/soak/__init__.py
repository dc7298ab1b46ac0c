"""Hours of everything at once against one server, and what must be left of it: nothing.

``python -m turnstile.bench.soak --minutes 10`` starts a server with a tiny pool, lets users of
every bad habit loose on it, kills its engine three times, and then counts: pages, tasks, file
descriptors, memory, answers. Exit code 1 if anything is missing or left over.
"""
