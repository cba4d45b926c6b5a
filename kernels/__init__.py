"""GPU kernels of megafp8 (Triton and Gluon), imported as `megafp8.kernels`."""
