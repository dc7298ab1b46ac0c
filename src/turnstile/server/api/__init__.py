"""The routes: each form of request, and what the server tells of itself."""
