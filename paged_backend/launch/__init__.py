"""Writes model repositories, and starts tritonserver and the gateway as child processes.

It imports no engine, and works without torch. Begin with `serve`.
"""
