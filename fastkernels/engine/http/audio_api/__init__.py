"""OpenAI's transcriptions and translations of audio files."""
