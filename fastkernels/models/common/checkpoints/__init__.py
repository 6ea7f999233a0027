"""Files of weights: finding, reading and loading them, quantized ones too."""
