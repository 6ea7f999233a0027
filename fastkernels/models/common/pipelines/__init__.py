"""Parts of diffusion pipelines: the folder layout of diffusers, schedules, text encoders and the image decoder."""
