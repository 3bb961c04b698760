"""The clip pipeline: a short clip from a recipe, on time or not at all (SL-1 to SL-8).

::

    recipe ─▶ plan ─┬─ speech ──┬─▶ video ─▶ check ─▶ clip
                    └─ portrait ┘
"""
