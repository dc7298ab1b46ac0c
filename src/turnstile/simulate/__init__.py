"""The scheduler that serves, on virtual time."""
