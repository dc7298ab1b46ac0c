"""The path of the book: static batching, contiguous cache, and what breaks without each mechanism."""
