"""Speech tokens to sound, as in CosyVoice3 (arXiv 2505.17589): flow matching to a spectrogram, and a vocoder.

No engine serves these yet: the language model that writes the tokens is missing.
"""
