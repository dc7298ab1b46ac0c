"""The HTTP face: OpenAI routes, limits, streaming and metrics. Never imports torch."""
