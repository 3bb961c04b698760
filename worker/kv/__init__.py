"""The prefix cache's second tier: KV blocks on disk, under the names that they have in memory.

::

    engine's thread    disk_tier  what to save and to restore; lends pool blocks to the two below
    two threads        save       pool → staging → files, and a session's manifest
                       load       files → staging → pool
    beneath            store      which names are on disk: bounded, least recently used goes first
                       files      one block as one safetensors file
                       memory     copies between the pool and staging; ``torch_memory`` for tensors

A file is found by name alone, so that a restarted worker, or another one on the same disk, goes on
where a conversation was. Whatever is wrong with a file makes it a miss, never an error.
"""
