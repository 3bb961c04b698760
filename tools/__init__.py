"""Programs that write documents and data of this checkout, or test servers from outside.

In Tidegate's wheel is none of them, and nothing that runs needs them.
"""
