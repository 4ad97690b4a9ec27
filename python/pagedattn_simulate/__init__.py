"""A deployment without its hardware: the real scheduler, or another system's, on a clock that a cost model moves.

It computes with ints and floats, and imports neither torch nor the engine: of pagedattn_serve only `scheduling` and the
modules of plain data. `cli` and `command` are `pagedattn simulate`, which reads a model's shapes as the engine does.
"""
