from .activations import regelu2 as regelu2
from .activations import resilu2 as resilu2
from .masks import dropout as dropout
from .masks import relu as relu
from .norms import ms_layer_norm as ms_layer_norm
from .norms import ms_rms_norm as ms_rms_norm
from .norms import norm_linear as norm_linear
