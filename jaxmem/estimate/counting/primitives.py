"""jax's primitives by what they are to a count of operations and bytes.

Names that only some releases of jax know are listed too.  A primitive that stands
nowhere here and has no rule in `flops` is reported as not counted.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One operation for each element, of floating-point numbers.
ELEMENTWISE = _names(
    """
    abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt
    ceil clamp cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    ne neg nextafter pmax pmin polygamma pow psum psum_invariant reciprocal reduce_scatter
    regularized_incomplete_beta rem round rsqrt sign sin sinh sqrt square sub tan tanh
    unreduced_psum unreduced_reduce_scatter zeta
    """
)

# Nothing but integers, copies and conversions: no operation.
FREE = _names(
    """
    after_all all_gather all_gather_invariant all_gather_reduced all_to_all and axis_index
    bitcast_convert_type broadcast_in_dim broadcast_to clz complex concatenate conj
    convert_element_type copy copy_p create_token debug_callback debug_print device_put
    dim_as_value dynamic_slice dynamic_update_slice empty empty2 empty_ref free_ref freeze
    from_edtype gather get imag iota iota_2x32_shape jaxmem_read jaxmem_rows
    layout_constraint lu_pivots_to_permutation
    mesh_cast mulhi name new_ref not optimization_barrier or pad pbroadcast pcast philox2x32
    philox4x32 pin platform_index population_count ppermute preduced pvary ragged_all_to_all
    random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap
    real reduce_and reduce_or reduce_precision reduce_xor reduced_vary_cast reduced_vary_cast_p
    relayout reshape reshard rev rng_bit_generator rng_uniform roll scatter select_n
    shape_assertion sharding_constraint shift_left shift_right_arithmetic shift_right_logical
    slice split squeeze stack stop_gradient swap threefry2x32 threefry4x32 tile to_edtype
    transpose unpin unstack vary_unreduced_cast vary_unreduced_cast_p
    with_memory_space_constraint xla_metadata_value xor zeros_like
    """
)

# Another look at the same bytes.
VIEWS = _names(
    """
    bitcast_convert_type copy_p dynamic_slice empty empty2 expand_dims freeze from_edtype get
    jaxmem_rows layout_constraint mesh_cast name optimization_barrier pcast pin preduced pvary
    reduced_vary_cast reduced_vary_cast_p relayout reshape reshard sharding_constraint slice
    split squeeze stop_gradient to_edtype transpose unpin unstack vary_unreduced_cast
    vary_unreduced_cast_p
    """
)

REDUCTIONS = _names(
    """
    argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    reduce_xor
    """
)

# Among `ELEMENTWISE` and `FREE`: what is not fused with its neighbours.
APART = _names(
    """
    all_gather all_gather_invariant all_gather_reduced all_to_all debug_callback
    debug_print device_put gather lu_pivots_to_permutation pbroadcast pmax pmin ppermute psum
    psum_invariant ragged_all_to_all reduce_scatter scatter swap unreduced_psum
    unreduced_reduce_scatter with_memory_space_constraint
    """
)
