// The kernels of one cubin, and one of a user's that waits for its slots.
#include "../../examples/slot_by_slot/slot_gemm.cu"
#include "cuda/device/kernels.cu"
