// For your own kernels: waiting for one slot, while replicate_experts() still fills others.
//
// `ready` is group.banks[i].ready, a word for each of the bank's slots on this rank: more than the
// number of each call by which the slot was complete, 0 before the first. A call sets the words of
// the slots that its plan has an expert in: at once where a bank's slot holds that expert already,
// else when its last sender has reported and this rank has sent what it owes. After a failed call
// all words are kGroupFailed, so that no kernel waits indefinitely: what slots hold then is
// undefined, and the next call on the group says why.
//
// Wait for `work.epoch`. In a CUDA graph, whose replays have no number of their own, clear the
// words on the stream before the call (group.banks[i].ready.zero_()), and wait for 0.
//
// A call's blocks begin together, so a kernel that waits must not keep them from the device: leave
// room for the call's blocks (24, or num_sms), or have its stream wait for one slot,
// work.wait(slots=[s]): then the call has begun.
//
// Compile with -I<ultraep_comm.get_include()>, for sm_90 or later.
#pragma once

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace uec::cuda {

inline constexpr uint64_t kGroupFailed = uint64_t{1} << 62;

// Whether it may be read now, as after wait_slot().
UEC_DEVICE bool is_ready(const uint64_t* ready, int32_t slot, uint64_t number) {
  return ptx::load_acquire_device(ready + slot) > number;
}

// By one thread, or by each of a block's that reads the slot. True: the slot may be read by
// ordinary loads; before bulk copies (TMA) of it comes fence.proxy.async. False: after `timeout_ns`
// nanoseconds it was not there; 0: no limit.
//
// Acquire: pairs with the release of the kernel that fills the slot, behind the delivery of all its
// bytes. One thread may wait for its block: __syncthreads() then hands on what it has seen.
UEC_DEVICE bool wait_slot(const uint64_t* ready, int32_t slot, uint64_t number,
                          uint64_t timeout_ns = 0) {
  const uint64_t start = timeout_ns == 0 ? 0 : ptx::nanoseconds();
  while (!is_ready(ready, slot, number)) {
    const uint64_t now = timeout_ns == 0 ? 0 : ptx::nanoseconds();
    if (now > start && now - start > timeout_ns) return false;  // the clock may be set back
    ptx::pause();
  }
  return true;
}

}  // namespace uec::cuda
