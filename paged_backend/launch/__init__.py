"""Writes model repositories, and starts tritonserver and the gateway as child processes.

The settings of ``config.pbtxt`` are chosen here. It imports no engine, and works without torch.
Begin with `serve`.
"""
