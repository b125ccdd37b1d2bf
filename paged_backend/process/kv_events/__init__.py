"""Publishes the changes of the prefix cache over ZeroMQ, in vLLM's format (``docs/routing.md``).

The engine's thread hands over events and never waits (``publisher.py``). Another thread encodes and
sends them, keeps the last batches for replays, and answers requests for snapshots (``sender.py``).
A subscriber that reads slowly loses messages, which it notices by their sequence numbers.
"""
