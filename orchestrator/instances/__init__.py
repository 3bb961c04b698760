"""The workers' side: which instances there are, and how they are.

- ``registry``      the instances, their lanes, cards and states; ``candidate`` is one as placement
  sees it
- ``discovery``     keeps the registry in step with where addresses come from
- ``breaker``       takes one out that fails; ``conduct`` says what a job's end counts as
- ``concurrency``   how many jobs to have in flight there
- ``prefix_index``  which instance holds which KV blocks
- ``metrics``
"""
