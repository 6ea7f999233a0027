"""Text, images, videos and audio, from files to a model's inputs."""
