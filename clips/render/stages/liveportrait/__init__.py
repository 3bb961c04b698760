"""LivePortrait (arXiv 2407.03168): a portrait that moves by implicit keypoints, driven by speech.

::

    portrait ─┬─▶ appearance ─▶ volume ──┐
              └─▶ motion ─▶ keypoints ─┬─┴▶ warping ─▶ generator ─▶ frame
    speech ─────▶ lips, lids, head ────┘   (for each frame)

The networks are our own; their weights have the names and shapes of the published checkpoints, so
that those load (github.com/KwaiVGI/LivePortrait, MIT).
"""
