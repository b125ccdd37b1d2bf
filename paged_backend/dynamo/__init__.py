"""A worker of NVIDIA Dynamo: tokens come from its router and go back to it.

Dynamo's frontend renders chats, tokenizes and detokenizes. `streams` sends requests to the engine's
process and resumes them if it dies; begin there. `worker` alone imports Dynamo's package.
"""
