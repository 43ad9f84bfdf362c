"""Optional faster kernels. Packing is exact without them."""
