"""The order of waiting sequences: by priority, then by what each tenant was served.

Begin with `policy`, the interface; `fair_queue` implements it.
"""
