"""The engine as a process: the messages to and from it, its loop, and its supervisor.

Begin with `wire`, the messages; then `engine_loop` on one side and `engine_supervisor` on the
other. `engines` has the supervisors of all engines of a model, of which there is usually one.
"""
