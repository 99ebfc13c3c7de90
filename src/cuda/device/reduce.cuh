// The reduce kernel: one launch sums all replicas' gradients that concern a rank, or all ranks of a
// loopback group.
//
// A block is a worker of its rank: its first warp takes groups of tiles and publishes what has been
// added, the others add. Peers are read by loads, so all ranks that a plan concerns have
// load/store access, and there is no kernel for others.
#pragma once

#include "core/transfer/reducer.hpp"
#include "cuda/device/adder.cuh"
#include "cuda/device/call.cuh"

namespace uec::cuda {

// A block's worker. step() is not inlined into the waits around it, so that its long-lived state
// does not take their registers.
class ReduceWorker {
 public:
  UEC_DEVICE explicit ReduceWorker(ReduceShared& shared)
      : memory_(shared.block),
        adder_(shared.ring, scratch(shared).sources, shared.known.capacity.num_ranks),
        reducer_(shared.block.call, memory_, adder_, scratch(shared).stripe, shared.unpublished,
                 {ptx::block_x(), ptx::num_blocks_x()}) {}

  UEC_DEVICE_NOINLINE Step step() { return reducer_.step(); }
  UEC_DEVICE Fault fault() const { return reducer_.fault(); }
  UEC_DEVICE Wait wait() { return reducer_.wait(); }

  // Drains after a failure, and ends the adding warps' loop.
  UEC_DEVICE void end() {
    while (reducer_.drain_step() != Step::kFinished) ptx::pause();
    adder_.end();
  }

 private:
  UEC_DEVICE static ReduceScratch scratch(ReduceShared& shared) {
    ReduceScratch scratch;
    scratch.cut(reinterpret_cast<std::byte*>(&shared) + kReduceScratch, shared.known.capacity);
    return scratch;
  }

  DeviceMemory<false> memory_;
  DeviceAdder adder_;
  Reducer<DeviceMemory<false>, DeviceAdder> reducer_;
};

struct Reduce {
  using Shared = ReduceShared;
  using Memory = DeviceMemory<false>;
  static constexpr Operation kOperation = Operation::kReduce;
  static constexpr int32_t kFinishingWarp = 1;

  UEC_DEVICE static void begin(ReduceShared& shared) { init_additions(shared.ring); }
  UEC_DEVICE static int64_t scratch_offset(const RankState&) { return kReduceScratch; }
  UEC_DEVICE static bool has_work(const Call& call) { return call.work.num_reductions > 0; }

  // Clears the mark of its saved plan, which the rank's blocks have read by now.
  UEC_DEVICE static void leave(const RankState&, const LaunchArgs&, const DeviceCall& device) {
    if (device.in_use != 0) *device.in_use = 0;
  }

  UEC_DEVICE_NOINLINE static void work(ReduceShared& shared) {
    BlockCall& block = shared.block;
    if (ptx::thread_idx() >= ptx::kWarpSize) return add_all(shared.ring);
    Memory memory(block);
    ReduceWorker worker(shared);
    if (may_begin(block, memory)) drive(worker, block, block.clock, memory);
    worker.end();
    if (Warp::leader()) ptx::add_relaxed(&block.state->bytes_stored, shared.ring.bytes_stored);
  }
};

UEC_DEVICE void reduce(const LaunchArgs& args, std::byte* shared_memory) {
  run_call<Reduce>(args, shared_memory);
}

}  // namespace uec::cuda
