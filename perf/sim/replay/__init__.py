"""The real orchestrator and the real worker on virtual time.

- ``loop``     time that jumps to the next timer
- ``worker``   the real worker without Triton and a model; ``lane`` connects to it
- ``service``  the orchestrator in front of such workers
"""
