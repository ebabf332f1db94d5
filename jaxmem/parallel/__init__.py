"""Several devices: how arrays are split over a mesh, and what that makes of a plan."""
