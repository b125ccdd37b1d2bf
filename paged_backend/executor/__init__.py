"""What the engine asks of whatever computes its steps, and the messages between the two.

It may import `core`. Begin with `base`.
"""
