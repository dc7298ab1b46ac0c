"""HTTP itself: connections, bodies, keys, what an exchange is."""
