"""How reports look: in a terminal, in a pipe, in a notebook, and as pictures.

`content` says what is shown, in `blocks` that know no medium; `text` and `html`
put them before a reader; `plot`, `scatter` and `heatmap` draw with matplotlib.
"""
