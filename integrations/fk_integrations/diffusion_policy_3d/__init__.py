"""Models of diffusion_policy_3d: the UNets of DP3."""
