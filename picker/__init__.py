"""An endpoint picker: tells a gateway which pod gets a request, by deadline and predicted finish.

It is a separate process (``tidegate picker``) next to the gateway. It serves Envoy's external
processing with the endpoint picker protocol of the Kubernetes Gateway API Inference Extension
(https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004). It sees only the
tokens that the gateway sends to it.

- ``asked``       reads a request's headers and body
- ``choice``      chooses a pod: pure functions
- ``pod``         state of one pod: load, pace
- ``vllm_page``   reads vLLM's metrics
- ``pods``        polls the pods, and tracks the requests routed to them
- ``picker``      combines these modules
- ``answer``      reads an answer on its way to the client
- ``ext_proc``    the protocol's messages, and functions that build replies
- ``stream``      one request's exchange with the gateway
- ``server``      gRPC
"""
