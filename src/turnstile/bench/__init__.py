"""Load generator, workloads and reports, against any OpenAI-compatible server."""
