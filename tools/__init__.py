"""Programs that generate this checkout's documents and data, or test servers from outside.

They are not in Tidegate's wheel, and no running part needs them.
"""
