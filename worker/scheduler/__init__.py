"""Plans the requests and tokens of the next step: no tensors, no devices, no clock."""
