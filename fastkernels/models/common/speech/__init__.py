"""Speech tokens to sound, as in CosyVoice3 (arXiv 2505.17589): flow matching to a spectrogram, and a vocoder.

models/audio/cosyvoice3.py has the language model that writes the tokens.
"""
