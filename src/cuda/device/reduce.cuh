// The reduce kernel: one launch sums all replicas' gradients that concern a rank, or all ranks of a
// loopback group.
//
// Every warp of a block is a worker of its rank: it takes its groups of tiles, adds them, and
// publishes what it has added. Peers are read by loads, so all ranks that a plan concerns have
// load/store access, and there is no kernel for others.
#pragma once

#include "core/transfer/reducer.hpp"
#include "cuda/device/adder.cuh"
#include "cuda/device/call.cuh"

namespace uec::cuda {

// A warp's worker. step() is not inlined into the waits around it, so that its long-lived state
// does not take their registers.
class ReduceWorker {
 public:
  UEC_DEVICE ReduceWorker(ReduceShared& shared, WarpShared& own, const Stripe& stripe)
      : memory_(shared.block),
        adder_(own),
        reducer_(shared.block.call, memory_, adder_, own.scratch(shared.block.state->capacity),
                 stripe) {}

  UEC_APART Step step() { return reducer_.step(); }
  UEC_DEVICE Step drain_step() { return reducer_.drain_step(); }
  UEC_DEVICE Fault fault() const { return reducer_.fault(); }
  UEC_DEVICE Wait wait() { return reducer_.wait(); }

 private:
  DeviceMemory<false> memory_;
  DeviceAdder adder_;
  Reducer<DeviceMemory<false>, DeviceAdder> reducer_;
};

struct Reduce {
  using Shared = ReduceShared;
  using Memory = DeviceMemory<false>;
  static constexpr Operation kOperation = Operation::kReduce;

  UEC_DEVICE static void begin(ReduceShared&) {}
  UEC_DEVICE static int64_t nearby(const Capacity&) { return kReduceNearby; }
  UEC_DEVICE static int64_t spare(const Capacity&) { return kReduceScratch; }
  UEC_DEVICE static void take(NearbyTables& tables, Call& call, const Capacity& capacity) {
    tables.replace_reduction(call, capacity);
  }
  UEC_DEVICE static bool has_work(const Call& call) { return call.work.num_reductions > 0; }

  // Clears the mark of its saved plan, which the rank's blocks have read by now.
  UEC_DEVICE static void leave(const DeviceCall& device) {
    if (device.in_use != 0) *reinterpret_cast<uint64_t*>(device.in_use) = 0;
  }

  UEC_APART static void work(ReduceShared& shared, bool announced) {
    BlockCall& block = shared.block;
    const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
    const int32_t num_warps = ptx::num_threads() / ptx::kWarpSize;
    WarpShared& own = warp_shared(shared, warp);
    if (Warp::leader()) own.bytes_stored = 0;
    Memory memory(block);
    ReduceWorker worker(shared, own,
                        {ptx::block_x() * num_warps + warp, ptx::num_blocks_x() * num_warps});
    const bool begins = shared.first && warp == 0 ? announced : may_begin(block, memory);
    if (!begins || !drive(worker, block, own.clock, memory))
      while (worker.drain_step() != Step::kFinished) ptx::pause();
    if (Warp::leader()) ptx::add_relaxed(&block.state->bytes_stored, own.bytes_stored);
  }

 private:
  UEC_DEVICE static WarpShared& warp_shared(ReduceShared& shared, int32_t warp) {
    auto* const first = reinterpret_cast<std::byte*>(&shared) + kReduceScratch;
    return *reinterpret_cast<WarpShared*>(first +
                                          warp * WarpShared::bytes(shared.block.state->capacity));
  }
};

UEC_DEVICE void reduce(const LaunchArgs& args, std::byte* shared_memory) {
  run_call<Reduce>(args, shared_memory);
}

}  // namespace uec::cuda
