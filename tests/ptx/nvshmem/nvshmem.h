/* What the kernels use of NVSHMEM, without bodies: the PTX machine has them (network.cc). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define NVSHMEM_VENDOR_MAJOR_VERSION 3
#define NVSHMEM_VENDOR_MINOR_VERSION 4
#define NVSHMEM_SIGNAL_SET 9
#define NVSHMEM_CMP_GE 3

extern "C" {
__device__ void nvshmemx_putmem_nbi_warp(void* to, const void* from, size_t bytes, int pe);
__device__ void nvshmemx_putmem_signal_nbi_warp(void* to, const void* from, size_t bytes,
                                                uint64_t* flag, uint64_t value, int op, int pe);
__device__ void nvshmemx_signal_op(uint64_t* flag, uint64_t value, int op, int pe);
__device__ void nvshmem_fence();
__device__ void nvshmem_quiet();
__device__ uint64_t nvshmem_signal_wait_until(uint64_t* flag, int comparison, uint64_t value);
}
