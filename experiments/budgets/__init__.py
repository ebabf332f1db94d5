"""ResNet-50, U-Net and VGG in given memory: the nets, published figures, rows, picture."""
