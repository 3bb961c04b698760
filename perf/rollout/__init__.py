"""``python -m perf.rollout``: both sides are upgraded under load, as Kubernetes would do it.

- ``pods``     processes that are started, found and ended as a kubelet and its endpoints do
- ``clients``  requests, each of which knows what it must get
"""
