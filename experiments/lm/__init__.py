"""A small language model, trained byte by byte, that the experiments share.

The way of the data: `config` says what to do, `data` gives the text, `model`
turns tokens into a loss (in linen or NNX), `program` compiles the train step,
`training` runs it and can be interrupted, `comparison` compiles and times it
under every policy, `picture` draws what came out.

Shapes: B sequences, T tokens, D the width, H heads, K = D / H.
"""
