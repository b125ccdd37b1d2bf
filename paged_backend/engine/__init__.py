"""The engine in one process: scheduler and worker joined, and the offline API around them.

Begin with `engine`: its method `step` runs one step. `worker` holds a model on a device:
`read_model` finds its kind, and `decoders` or `encoders` loads it. `llm` has the class `LLM`.
"""
