"""Optional speed: packing is exact without it."""
