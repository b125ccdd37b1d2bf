"""The way of a request inside the front end, from tensors to the last response.

Begin with `front_end`. `intake` and `preparation` make requests, `answer` makes text, and
`delivery` sends it.
"""
