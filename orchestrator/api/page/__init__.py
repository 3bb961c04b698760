"""The page at ``/``: a playground and a board, in files that are sent as they are."""
