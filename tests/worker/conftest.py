import torch

# More threads than that only wait for each other on small models and shared machines.
torch.set_num_threads(1)
