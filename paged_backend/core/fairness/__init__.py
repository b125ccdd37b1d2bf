"""The order of waiting sequences: by priority, then by what each tenant was served.

Begin with `fair_queue`, the queue of all waiting sequences. `tenant_queue` has the sequences of one
priority.
"""
