"""The engine in one process: scheduler and worker joined, and the offline API around them.

Begin with `engine`, whose `step` runs one step; `worker` holds a model on a device, and `llm` has
the class `LLM`.
"""
