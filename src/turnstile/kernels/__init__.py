"""What touches K and V: one backend interface and its implementations."""
