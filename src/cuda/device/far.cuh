// Peers without load/store access: NVSHMEM's puts and signals.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace uec::cuda::far {

// Called by a whole warp. `source` stays as it is until quiet().
UEC_DEVICE void put(void* symmetric, const void* source, int64_t bytes, int32_t pe) {
  nvshmemx_putmem_nbi_warp(symmetric, source, bytes, pe);
}
// Puts as put() does; `flag` gets `value` there after these bytes and, after fence(), after earlier
// ones.
UEC_DEVICE void put_signal(void* symmetric, const void* source, int64_t bytes, uint64_t* flag,
                           uint64_t value, int32_t pe) {
  nvshmemx_putmem_signal_nbi_warp(symmetric, source, bytes, flag, value, NVSHMEM_SIGNAL_SET, pe);
}
// Puts of this thread to one peer that come after it arrive after those before it.
UEC_DEVICE void fence() { nvshmem_fence(); }
// Returns once all puts and signals of this thread have arrived.
UEC_DEVICE void quiet() { nvshmem_quiet(); }

UEC_DEVICE void signal(uint64_t* flag, uint64_t value, int32_t pe) {
  nvshmemx_signal_op(flag, value, NVSHMEM_SIGNAL_SET, pe);
}
// After this, what a network card wrote before it wrote `seen` into the flag may be read. Flags
// only grow, so that it returns at once.
UEC_DEVICE void acquire(uint64_t* flag, uint64_t seen) {
  nvshmem_signal_wait_until(flag, NVSHMEM_CMP_GE, seen);
}

}  // namespace uec::cuda::far
