// The host's halves of the core's two policies: flags as atomics in shared memory, bytes by CPU.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/team.hpp"
#include "core/transfer/layout.hpp"
#include "core/transfer/protocol.hpp"
#include "core/transfer/ring.hpp"
#include "host/copy.hpp"
#include "host/doorbell.hpp"

namespace uec::host {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free,
              "flags are shared between processes and cannot hide a lock");

class HostMemory {
 public:
  using Team = SingleThread;

  // `gone` [G] is set by the thread that notices that a peer's process ended.
  HostMemory(uint8_t* const* bases, int32_t rank, int64_t doorbell, const std::atomic<bool>* gone)
      : bases_(bases), rank_(rank), doorbell_(doorbell), gone_(gone) {}

  uint64_t observe(int64_t offset) const {
    return word(bases_[rank_] + offset).load(std::memory_order_acquire);
  }

  void publish(Delivered, int32_t rank, int64_t offset, uint64_t value) const {
    word(bases_[rank] + offset).store(value, std::memory_order_release);
    if (rank != rank_) Doorbell(bases_[rank] + doorbell_).ring();
  }

  // Later stores of this thread, also to main weights, stay behind its flags.
  bool flags_delivered() const {
#if !defined(__SANITIZE_THREAD__)  // which does not know fences, and needs none here
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
    return true;
  }

  bool peer_gone(int32_t rank) const { return gone_[rank].load(std::memory_order_acquire); }

  static int32_t arrive(Delivered, int32_t* counter, int32_t n) {
    return std::atomic_ref(*counter).fetch_add(n, std::memory_order_acq_rel) + n;
  }

 private:
  static std::atomic_ref<uint64_t> word(uint8_t* at) {
    return std::atomic_ref(*reinterpret_cast<uint64_t*>(at));
  }

  uint8_t* const* bases_;
  int32_t rank_;
  int64_t doorbell_;
  const std::atomic<bool>* gone_;
};

// A load is only recorded, and happens with the first store: the caches serve as the stage, and a
// tile that goes to several replicas is read from memory once.
class HostMover : public DeliveryPolicy, public LocalRing<4> {
 public:
  void fetch(uint32_t k, const Stage& stage, const uint8_t* source) {
    describe(k, stage);
    source_[k % kStages] = source;
  }
  bool loaded(uint32_t k) const { return described(k); }
  void store(uint32_t k, uint8_t* destination, int64_t bytes) {
    stream_copy(destination, source_[k % kStages], bytes);
    bytes_stored_ += bytes;
  }
  bool reusable(uint32_t) const { return true; }
  uint32_t commit_and_wait_source(uint32_t) { return ++commits_; }

  // Non-temporal stores are not ordered by the publish's release store, so the copying thread
  // fences them first.
  template <class F>
  bool wait_delivered(uint32_t, bool, F&& then) {
    store_fence();
    then(delivered());
    return true;
  }

  // Loads finished with the copies that used them; only weakly ordered processors could still
  // move them past the check of the abort flags that follows.
  void loads_complete() const {
#if !defined(__x86_64__)
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
  }

  int64_t bytes_stored() const { return bytes_stored_; }

 private:
  const uint8_t* source_[kStages] = {};
  uint32_t commits_ = 0;
  int64_t bytes_stored_ = 0;
};

}  // namespace uec::host
