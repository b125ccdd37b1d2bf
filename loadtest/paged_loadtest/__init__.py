"""Load for a running server, ours or a peer's, and what its clients saw of it."""
