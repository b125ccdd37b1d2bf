"""Other engines as peers: each file runs under the interpreter of that engine's environment."""
