"""Parts of diffusion pipelines: schedules, text encoders, the image decoder, and their interface."""
