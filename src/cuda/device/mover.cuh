// The device's half of moving bytes: a ring of shared-memory stages between two warps.
//
// Each stage has two barriers. `full` completes when what the fetch side put there may be read,
// and hands over with it all that the fetch side has observed; `empty` completes when the store
// side has released it. No barrier joins the block's threads while tiles move.
#pragma once

#include "core/base/bounds.hpp"
#include "core/transfer/protocol.hpp"
#include "core/transfer/ring.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/far.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/vector_copy.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

// Which of its block's workers this thread is of, and which of its rank's: few groups are shared
// out over all blocks first.
UEC_DEVICE int32_t worker_idx() { return ptx::thread_idx() / (2 * ptx::kWarpSize); }
UEC_DEVICE int32_t rank_worker() { return worker_idx() * ptx::num_blocks_x() + ptx::block_x(); }

// By one thread, before a block-wide barrier.
UEC_DEVICE void init_ring(Ring& ring) {
  for (uint32_t i = 0; i < kNumStages; ++i) {
    ptx::mbarrier_init(&ring.full[i], 1);
    ptx::mbarrier_init(&ring.empty[i], 1);
  }
  ring.bytes_stored = 0;
  ring.far_stages = ring.far_staged = 0;
  ptx::fence_mbarrier_init();
}

// One of a worker's two sides. Each has its own.
template <bool kFarPeers>
class DeviceMover : public DeliveryPolicy {
 public:
  static constexpr uint32_t kStages = kNumStages;
  static constexpr bool kFar = kFarPeers;

  UEC_DEVICE DeviceMover(Ring& ring, uint8_t* tiles, const BlockCall& block)
      : ring_(ring), tiles_(tiles), block_(block) {}

  // ---- fetch side

  UEC_DEVICE bool vacant(uint32_t k) const {
    return k < kStages || is_complete(ring_.empty[k % kStages], k / kStages - 1);
  }

  UEC_DEVICE void fetch(uint32_t k, const Stage& stage, const uint8_t* source) {
    uint64_t* const full = &ring_.full[k % kStages];
    uint8_t* const to = tile(k);
    const int64_t bytes = stage.span.bytes;
    const bool bulk = source != nullptr && is_aligned(source);
    const int64_t in_bulk = bulk ? bytes / 16 * 16 : 0;
    if (source != nullptr && in_bulk < bytes) {
      copy_from_global(to + in_bulk, source + in_bulk, bytes - in_bulk);
      // Ordinary stores into shared memory, which a bulk store may read.
      ptx::fence_proxy_async_shared();
    }
    if (Warp::leader()) ring_.stages[k % kStages] = stage;
    ptx::sync_warp();
    if (!Warp::leader()) return;
    if (in_bulk > 0) {
      // What was observed came through ordinary loads: without this fence the bulk load of what a
      // peer wrote need not be ordered after them. Done by the thread that issues the load.
      ptx::fence_proxy_async_global();
      ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(in_bulk));
      ptx::bulk_load(to, source, static_cast<uint32_t>(in_bulk), full, reads_main(source));
    } else {
      ptx::mbarrier_arrive(full);
    }
  }

  // ---- store side

  UEC_DEVICE bool loaded(uint32_t k) const {
    if (!is_complete(ring_.full[k % kStages], k / kStages)) return false;
    // That the destinations are open was observed through ordinary loads, by the fetch side. By
    // every lane: each issues bulk stores.
    ptx::fence_proxy_async_global();
    return true;
  }

  UEC_DEVICE const Stage& stage(uint32_t k) const { return ring_.stages[k % kStages]; }

  // Each lane has its destination's bulk store under way at once: found one after the other, their
  // addresses would take longer than the store.
  UEC_DEVICE void store(uint32_t k, uint8_t* destination, int64_t bytes) {
    const bool any = destination != nullptr;
    const int64_t in_bulk = any && is_aligned(destination) ? bytes / 16 * 16 : 0;
    if (in_bulk > 0) ptx::bulk_store(destination, tile(k), static_cast<uint32_t>(in_bulk));
    count(bytes * ptx::num_set(ptx::ballot(any)));
    // What bulk stores cannot take: by all lanes together, one destination after another.
    for (uint32_t rest = ptx::ballot(any && in_bulk < bytes); rest != 0; rest &= rest - 1) {
      const int32_t lane = ptx::lowest_set(rest);
      const int64_t done = Warp::read_from(lane, in_bulk);
      copy_from_shared(Warp::read_from(lane, destination) + done, tile(k) + done, bytes - done);
    }
  }

  // Stores to a peer without load/store access. With a signal, `flag` gets `value` after all that
  // this thread has put there before.
  UEC_DEVICE void store_far(uint32_t k, int32_t rank, int64_t offset, int64_t bytes, int64_t flag,
                            uint64_t value) {
    if constexpr (kFar) {
      if (ring_.far_staged != k + 1) {  // the first such destination of this stage
        if (ring_.far_stages % kNumFarStages == 0) far::quiet();  // all of them are free again
        copy_from_shared(far_tile(ring_.far_stages), tile(k), bytes);
        ptx::fence_system();  // a network card reads what all lanes have stored
        ptx::sync_warp();
        if (Warp::leader()) {
          ring_.far_staged = k + 1;
          ++ring_.far_stages;
        }
        ptx::sync_warp();
      }
      const uint8_t* const source = far_tile(ring_.far_stages - 1);
      if (flag < 0) {
        far::put(block_.own + offset, source, bytes, pe_of(*block_.state, rank));
      } else {
        far::fence();
        far::put_signal(block_.own + offset, source, bytes,
                        reinterpret_cast<uint64_t*>(block_.own + flag), value,
                        pe_of(*block_.state, rank));
      }
      count(bytes);
    }
  }

  UEC_DEVICE uint32_t commit_and_wait_source(uint32_t) {
    ++commits_;
    idle_polls_ = 0;
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    read_ = commits_ - 1;
    ptx::sync_warp();  // all lanes have read the stage, or stored from it
    return commits_;
  }

  // Commit k + 1 closed the stores of stage k; a stage that was thrown away has none.
  UEC_DEVICE bool reusable(uint32_t k) const { return k < read_ || k >= commits_; }

  // For when there is nothing to store: the fetch side may wait for the last stage, which no commit
  // follows yet.
  UEC_DEVICE void wait_source_reusable() {
    ptx::bulk_wait_read<0>();
    read_ = commits_;
  }

  UEC_DEVICE void release(uint32_t k) {
    // The next bulk load into the stage comes after these lanes' ordinary reads of it.
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (Warp::leader()) ptx::mbarrier_arrive(&ring_.empty[k % kStages]);
  }

  // Delivered is not source-reusable: only wait_group without `.read` says that bulk stores have
  // arrived, and only to the thread that issued them. Every lane waits for its own; all come after
  // all of that by sync_warp().
  template <class F>
  UEC_DEVICE bool wait_delivered(uint32_t ticket, bool may_block, F&& then) {
    if (ticket > delivered_) {
      const uint32_t behind = commits_ - ticket;
      if (behind < kCommitsInFlight && (!may_block || ++idle_polls_ <= kIdlePolls)) return false;
      wait_for_all_but(behind < kCommitsInFlight ? behind : kCommitsInFlight);
      // Bulk stores and the release that will publish them are of different proxies.
      ptx::fence_proxy_async_global();
      if constexpr (kFar) far::quiet();
      delivered_ = commits_ - (behind < kCommitsInFlight ? behind : kCommitsInFlight);
      read_ = delivered_ > read_ ? delivered_ : read_;
    }
    ptx::sync_warp();
    then(delivered());
    return true;
  }

  // A stage was seen full before any of its bytes were stored, and this thread is ordered after
  // that. The fence pairs with that of DeviceMemory::flags_delivered(): who loads what a peer has
  // stored behind it, as bytes and not as a flag, acquires nothing by that.
  UEC_DEVICE void loads_complete() const {
    ptx::sync_warp();
    ptx::fence_system();
  }

 private:
  // What is in a slot, or in memory with slots, will be read again by who computes with it. By its
  // address: to look up what a piece reads takes longer than issuing its load.
  UEC_DEVICE bool reads_main(const uint8_t* source) const {
    return static_cast<uint64_t>(source - block_.own) >=
           static_cast<uint64_t>(block_.call.layout.total);
  }
  UEC_DEVICE static bool is_aligned(const void* at) {
    return reinterpret_cast<uint64_t>(at) % 16 == 0;
  }
  UEC_DEVICE static void wait_for_all_but(uint32_t commits) {
    static_assert(kCommitsInFlight == 3);
    switch (commits) {
      case 0:
        return ptx::bulk_wait<0>();
      case 1:
        return ptx::bulk_wait<1>();
      case 2:
        return ptx::bulk_wait<2>();
      default:
        return ptx::bulk_wait<3>();
    }
  }
  UEC_DEVICE void count(int64_t bytes) {
    if (Warp::leader()) ring_.bytes_stored += bytes;
  }
  // Looked up where it is needed: a warp has few registers.
  UEC_DEVICE int32_t tile_bytes() const {
    return static_cast<int32_t>(block_.call.tiles.tile_bytes);
  }
  UEC_DEVICE uint8_t* tile(uint32_t k) const {
    return tiles_ + int32_t(k % kStages) * tile_bytes();
  }
  UEC_DEVICE uint8_t* far_tile(uint32_t n) const {
    return block_.state->staging +
           (int64_t{rank_worker()} * kNumFarStages + n % kNumFarStages) * tile_bytes();
  }

  Ring& ring_;
  uint8_t* tiles_;
  const BlockCall& block_;
  uint32_t commits_ = 0, read_ = 0, delivered_ = 0, idle_polls_ = 0;
};

}  // namespace uec::cuda
