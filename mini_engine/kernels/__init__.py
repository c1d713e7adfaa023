"""The engine's Triton kernels, one a file: layout, torch reference, kernel, launcher.

    reshape_and_cache   K and V of new tokens into their slots        copy_blocks   copy-on-write
    paged_attention     decode, chunk and draft verification          merge         states over disjoint keys into one
    paged_mla           the same over the latents of an MLA model
    rms_norm, rope, swiglu                                            the small steps between the matrix products

Import each from its own file; this one imports nothing, so that the torch path never needs triton.

Prefixes: p_ a pointer, o_ offsets within a tile, i_ which program or which item; CAPITALS are known when compiling.
"""
