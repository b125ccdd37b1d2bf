"""Generates load for a running server, ours or another, and reports what its clients measured.

It talks to servers over their public protocols only. Begin with `bench`; ``locustfile.py`` beside
this package is for Locust.
"""
