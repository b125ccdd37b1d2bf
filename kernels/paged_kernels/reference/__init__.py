"""What each kernel is to compute, in plain torch and float64: one file an operation."""
