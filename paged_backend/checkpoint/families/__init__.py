"""What is particular about each family of models in its ``config.json``, one module per family.

Begin with `llama`; ``docs/adding-a-model.md`` walks through a new one.
"""
