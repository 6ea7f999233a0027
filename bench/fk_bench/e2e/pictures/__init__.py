"""`fk-bench e2e` of models in the caller's process: encoders of timm and transformers, pipelines of diffusers."""
