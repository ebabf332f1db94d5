"""What `frontier_mesh.py` is made of: models over meshes, plans by names, the picture."""
