"""Architectures, weight loading and quantisation."""
