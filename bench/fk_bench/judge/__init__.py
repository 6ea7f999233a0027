"""The judge of candidate kernels. Nothing is imported here: a runner's interpreter may have torch and little else."""
