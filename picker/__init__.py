"""An endpoint picker: tells a gateway which pod gets a request, by deadline and predicted finish.

It is a separate process (``tidegate picker``) next to the gateway and serves Envoy's external
processing by the endpoint picker protocol of the Kubernetes Gateway API Inference Extension
(https://github.com/kubernetes-sigs/gateway-api-inference-extension, proposal 004). No token passes
through it but those that the gateway shows it.

- ``asked``       what a request's head and body say
- ``choice``      which pod: pure
- ``pod``         what is known of one pod: load, pace
- ``vllm_page``   reads vLLM's metrics
- ``pods``       the pods, polled; what has been routed to them
- ``picker``      these together
- ``answer``      what an answer shows on its way to the client
- ``ext_proc``    the protocol's messages, and those that are sent
- ``stream``      one request's exchange with the gateway
- ``server``      gRPC
"""
