"""What docs/extending.md tells how to add, each as small as it can be; their tests add it and take
it away again."""
