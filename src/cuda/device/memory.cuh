// The device's half of the flag protocol.
#pragma once

#include "core/transfer/protocol.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/far.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

UEC_DEVICE uint8_t* own_memory(const RankState& state) { return state.memory; }
UEC_DEVICE int32_t pe_of(const RankState& state, int32_t rank) { return state.pes[rank]; }

// The gradients that slots hold, with the offsets of a bank's.
UEC_DEVICE Gradients grads_of(const RankState& state, const int64_t* offset) {
  return {state.capacity.num_grad_segments, state.grad_bytes, state.grad_type, offset};
}

// What all calls of a rank have in common: enough to publish that there will be none.
UEC_DEVICE Call begin_call(const RankState& state) {
  Call call;
  call.rank = state.rank;
  call.num_ranks = state.num_ranks;
  call.epoch.number = state.epoch + 1;
  call.layout = state.layout;
  call.addresses.bases = state.bases;
  call.addresses.far = state.far;
  return call;
}

// A Mover for code that publishes flags and moves no bytes. One fence releases all of a call's
// words, where a release store for each would wait for the arrival of the one before. By the memory
// model a relaxed store after such a fence is a release pattern: a peer that acquires any of these
// words sees what came before the fence, as it would of a release store. They have no order among
// themselves, and need none.
class FlagPublisher : public DeliveryPolicy {
 public:
  template <class F>
  UEC_DEVICE bool wait_delivered(uint32_t, bool, F&& then) const {
    ptx::sync_warp();
    ptx::fence_release_system();
    then(released());
    return true;
  }
};

// kFarPeers: some peers are reached by puts and signals only.
template <bool kFarPeers>
class DeviceMemory {
 public:
  using Team = Warp;
  static constexpr bool kFar = kFarPeers;

  UEC_DEVICE explicit DeviceMemory(const BlockCall& block) : block_(block) {}

  // Acquire at system scope, on the flag itself.
  UEC_DEVICE uint64_t observe(int64_t offset) const {
    return ptx::load_acquire_system(flag(offset));
  }
  // A network card's writes are ordered by NVSHMEM's own wait, not by an acquire. That may ask its
  // proxy on the host, so it is for what far peers have written, and not for each look.
  UEC_DEVICE void acquire_from(int32_t rank, int64_t offset, uint64_t seen) const {
    if constexpr (kFar)
      if (is_far(rank)) far::acquire(flag(offset), seen);
  }

  // Release at system scope, on the flag itself. The token says that a thread of this warp, or one
  // that it synchronised with, has waited for the delivery.
  UEC_DEVICE void publish(Delivered, int32_t rank, int64_t offset, uint64_t value) const {
    if (!signals(rank, offset, value)) ptx::store_release_system(flag(rank, offset), value);
  }
  // Relaxed, behind FlagPublisher's fence by this thread.
  UEC_DEVICE void publish(Released, int32_t rank, int64_t offset, uint64_t value) const {
    if (!signals(rank, offset, value)) ptx::store_relaxed_system(flag(rank, offset), value);
  }

  UEC_DEVICE bool flags_delivered() const {
    ptx::fence_system();
    if constexpr (kFar) far::quiet();
    return true;
  }

  // A device cannot know; the clock ends such waits.
  UEC_DEVICE static bool peer_gone(int32_t) { return false; }
  // A second look takes as long as the first, and is rarely of use.
  UEC_DEVICE bool should_diagnose() { return ++looks_ % 8 == 0; }

  // Acquire-release: the last block of a task vouches for the stores of all.
  UEC_DEVICE static int32_t arrive(Delivered, int32_t* counter, int32_t n) {
    return ptx::fetch_add_acq_rel(counter, n) + n;
  }

 private:
  // Looked up where they are needed: a warp has few registers.
  UEC_DEVICE uint64_t* flag(int64_t offset) const {
    return reinterpret_cast<uint64_t*>(block_.own + offset);
  }
  UEC_DEVICE uint64_t* flag(int32_t rank, int64_t offset) const {
    return reinterpret_cast<uint64_t*>(block_.call.addresses.bases[rank] + offset);
  }
  UEC_DEVICE bool is_far(int32_t rank) const {
    return kFar && block_.call.addresses.bases[rank] == nullptr;
  }
  UEC_DEVICE bool signals(int32_t rank, int64_t offset, uint64_t value) const {
    if (!is_far(rank)) return false;
    far::signal(flag(offset), value, pe_of(*block_.state, rank));
    return true;
  }

  const BlockCall& block_;
  uint32_t looks_ = 0;
};

}  // namespace uec::cuda
