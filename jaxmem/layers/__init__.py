"""Layers that keep less for the backward pass than their plain forms.

Functions, and modules of Flax with the fields, names and shapes of those that they replace.
`jaxmem.low_memory` puts them into a model as it stands.  The approximate ones say so.
"""

import lazy_loader

# Late: what plans is in need of one file here, and not of Flax.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
