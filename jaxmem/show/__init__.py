"""How reports are displayed: in a terminal, in a pipe, in a notebook, and as pictures.

`content` chooses what is shown, as `blocks` independent of the medium; `text` and
`html` render them; `plot`, `scatter`, `heatmap` and `frontier` draw with matplotlib.
"""
