"""The path of the book: static batching, a contiguous cache, and what breaks without what."""
