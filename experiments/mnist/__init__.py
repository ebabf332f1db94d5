"""A hundred convolutions for handwritten digits: the net, the digits, its training, the table."""
