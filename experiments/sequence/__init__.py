"""An LSTM along a long sequence: the loops that can run it, what they evaluate, their picture."""
