"""The prefix cache's second tier: KV blocks on disk, under the same hashes as in memory.

::

    engine's thread    disk_tier    what to save and to restore; pins pool blocks for the two below
    two threads        transfers    saver: pool → staging → files
                                    loader: files → staging → pool
    below              block_store  what is on disk: bounded, least recently used goes first
                       block_file   one block as one safetensors file
                       base         copies between pool and staging; ``cuda_copies`` for tensors

A file is found by its block's hash alone, so that a restarted worker, or another worker on the same
disk, can continue a conversation. A faulty file is a miss, never an error.
"""
