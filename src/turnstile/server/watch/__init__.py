"""What is counted, shown and written down of requests and steps."""
