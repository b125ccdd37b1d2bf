"""Generates load for a running server, ours or another, and reports what its clients measured."""
