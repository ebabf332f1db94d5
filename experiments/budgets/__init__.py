"""ResNet-50, U-Net and VGG in given memory: the nets, what was published of them, rows, picture."""
