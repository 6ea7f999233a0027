"""Models of torch_geometric: the layers of LightGCN."""
