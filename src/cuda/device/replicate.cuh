// The replicate kernel: one launch moves all that a rank, or all ranks of a loopback group, owe.
//
// A call, from top to bottom. What a flag promises: core/transfer/protocol.hpp. Every number, and
// what it trades: core/base/bounds.hpp.
//
//   1. Every block copies the call into shared memory: enter, take_call (call.cuh).
//   2. The last warp of the first block announces it (call.cuh). It looks once for a record by
//      which a peer ends the call early.
//      Publishes: `call` to all ranks, `open` to those that write to this one or read from it.
//   3. Each worker moves its groups. A block has up to kMaxBlockWorkers, of two warps each, which
//      share nothing but the call.
//      The fetching warp:
//      a. takes a group, and skips those that cannot be moved yet (stripe.hpp).
//         Waits for: `open` of all the group's ranks; at a hub also `ready` of the group. It looks
//         every kGroupsPerPoll groups, or when nothing else is left.
//      b. loads each tile of it into a stage (fetcher.hpp, DeviceMover::fetch).
//         Waits for: one of kNumStages stages to be empty.
//         Hands on: the bytes, and all that this warp has observed, by the barrier `full`.
//      The storing warp:
//      c. stores each tile to all its destinations, a lane each (storer.hpp, DeviceMover::store).
//         Waits for: `full`; and, behind the commit, for the tile before to have been read.
//         Hands on: that tile's stage, by the barrier `empty`.
//      d. publishes each group, at most kMaxUnpublished behind its stores (storer.hpp).
//         Waits for: the group's stores to arrive, once kCommitsInFlight are behind them or
//         nothing else is left to do (DeviceMover::wait_delivered).
//         Publishes: `ready` to the group's hub.
//      e. finishes each expert, if its rank's other workers have (storer.hpp, finish_task).
//         Publishes: `done` to each slot, `pulled` to the rank that weights were read from.
//   4. A warp of the last block to leave finishes the call (call.cuh, announce.hpp).
//      Waits for: `done` of each of its slots, `pulled` of its main weights.
//      Hands on: the epoch to the next call, slot words to the stream.
//
// drive() in wait.cuh bounds all waits for peers: every kStepsPerPoll steps it looks for an abort
// and for a cancellation, and at the warp's clock. The storing warp has no clock: it waits for its
// own fetching warp and for the hardware, and looks every kIdleStepsPerStop idle steps whether its
// block has stopped. After a failure both warps drain what is in flight, and publish nothing more.
#pragma once

#include "core/transfer/fetcher.hpp"
#include "core/transfer/storer.hpp"
#include "cuda/device/call.cuh"
#include "cuda/device/mover.cuh"

namespace uec::cuda {

// The roles of a worker's warps: loops of their own, both inlined into the kernel.

UEC_DEVICE int32_t num_workers() { return ptx::num_threads() / (2 * ptx::kWarpSize); }
UEC_DEVICE bool fetches() { return ptx::thread_idx() / ptx::kWarpSize % 2 == 0; }

template <class Mover>
UEC_DEVICE Mover make_mover(BlockShared& shared, int32_t worker) {
  const int64_t tiles = worker * kNumStages * shared.block.call.tiles.tile_bytes;
  return Mover(shared.workers[worker].ring,
               reinterpret_cast<uint8_t*>(&shared) + shared.known.tiles_at + tiles, shared.block);
}

template <class Memory, class Mover>
UEC_ROLE void fetch_all(BlockShared& shared, int32_t worker) {
  BlockCall& block = shared.block;
  Memory memory(block);
  Mover mover = make_mover<Mover>(shared, worker);
  const Capacity& capacity = shared.known.capacity;
  StripeScratch scratch;
  const int64_t bytes =
      StripeScratch::cut(nullptr, capacity.num_ranks, capacity.pieces(), &scratch);
  StripeScratch::cut(reinterpret_cast<std::byte*>(&shared) + kScratchAt + worker * bytes,
                     capacity.num_ranks, capacity.pieces(), &scratch);
  Fetcher<Memory, Mover> fetcher(block.call, memory, mover, scratch,
                                 {rank_worker(), ptx::num_blocks_x() * num_workers()});
  if (may_begin(block, memory) && drive(fetcher, block, shared.workers[worker].clock, memory))
    return;
  while (fetcher.drain_step() != Step::kFinished) ptx::pause();
}

// Needs no clock: what it waits for is this worker's own fetch side, or the hardware.
template <class Memory, class Mover>
UEC_ROLE void store_all(BlockShared& shared, int32_t worker) {
  BlockCall& block = shared.block;
  Memory memory(block);
  Mover mover = make_mover<Mover>(shared, worker);
  Storer<Memory, Mover> storer(block.call, memory, mover, shared.workers[worker].unpublished);
  const auto stops = [&] { return Warp::broadcast(ptx::load_shared_relaxed(&block.stop)) != 0; };
  bool running = !stops();
  for (uint32_t idle = 0; running;) {
    const Step step = storer.step();
    if (step == Step::kFinished) return;
    if (step == Step::kFailed) {
      const Wait wait = storer.wait();
      fail(block, memory, storer.fault(), wait.peer, wait);
      break;
    }
    if (step != Step::kProgress) mover.wait_source_reusable();
    if (step != Step::kProgress && ++idle % kIdleStepsPerStop != 0) continue;
    running = !stops();
    if (step != Step::kProgress) ptx::pause();
  }
  while (storer.drain_step() != Step::kFinished) ptx::pause();
}

template <bool kFar>
struct Replicate {
  using Shared = BlockShared;
  using Memory = DeviceMemory<kFar>;
  using Mover = DeviceMover<kFar>;
  static constexpr Operation kOperation = Operation::kReplicate;
  static constexpr int32_t kFinishingWarp = 0;

  UEC_DEVICE static void begin(BlockShared& shared) {
    for (int32_t i = 0; i < num_workers(); ++i) init_ring(shared.workers[i].ring);
  }
  UEC_DEVICE static int64_t scratch_offset(const RankState& known) { return known.tiles_at; }
  UEC_DEVICE static bool has_work(const Call& call) { return call.work.num_pieces > 0; }

  // Without a bank a call writes to the slots of bank 0, of which nothing is known from then on.
  UEC_DEVICE static void leave(const RankState& known, const LaunchArgs& args, const DeviceCall&) {
    if (args.bank < 0) bank_of(known, 0).segments = 0;
  }

  UEC_DEVICE static void work(BlockShared& shared) {
    const int32_t worker = worker_idx();
    if (fetches()) return fetch_all<Memory, Mover>(shared, worker);
    store_all<Memory, Mover>(shared, worker);
    if (Warp::leader())
      ptx::add_relaxed(&shared.block.state->bytes_stored, shared.workers[worker].ring.bytes_stored);
  }
};

template <bool kFar>
UEC_DEVICE void replicate(const LaunchArgs& args, std::byte* shared_memory) {
  run_call<Replicate<kFar>>(args, shared_memory);
}

}  // namespace uec::cuda
