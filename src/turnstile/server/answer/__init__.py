"""From a checked request to the bytes of its answer."""
