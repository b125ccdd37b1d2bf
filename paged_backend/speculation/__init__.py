"""Guesses the next tokens of sequences, so that one step can verify several of them.

Begin with `lookup.py`, the drafter that finds guesses in earlier text. It knows token ids and no
tensors; `core/drafter.py` is its interface.
"""
