// The replicate kernel: one launch moves all that a rank, or all ranks of a loopback group, owe.
//
// A block has two warps. One claims groups of tiles and loads them into the ring of stages; the
// other stores each tile to all its destinations and publishes what has been delivered. The first
// block of a rank to begin announces the call; the last to leave waits for what peers owe, and
// advances the epoch.
#pragma once

#include <new>

#include "core/call.hpp"
#include "core/digest.hpp"
#include "core/failure.hpp"
#include "core/fetcher.hpp"
#include "core/storer.hpp"
#include "cuda/block.hpp"
#include "cuda/memory.cuh"
#include "cuda/mover.cuh"
#include "cuda/nearby.cuh"
#include "cuda/prepare.cuh"
#include "cuda/wait.cuh"

namespace uec::cuda {

// The call of the block that the host, or a kernel before this one, has filled.
UEC_DEVICE Call make_call(const RankState& state, std::byte* block) {
  const auto& header = *reinterpret_cast<const CallHeader*>(block);
  Call call = begin_call(state);
  call.epoch.record =
      CallRecord::make(call.epoch.number, mix(state.digest, header.digest), RecordKind::kCall);
  CallArrays arrays;
  CallArrays::cut(block + kHeaderBytes, state.capacity, &arrays);
  arrays.lend_to(&call);
  call.work.num_tasks = header.num_tasks;
  call.work.num_pieces = header.num_pieces;
  call.work.num_destinations = header.num_destinations;
  call.work.num_expected = header.num_expected;
  call.tiles.num_segments = header.num_segments;
  call.tiles.tile_bytes = header.tile_bytes;
  call.addresses.segment_bytes = reinterpret_cast<const int64_t*>(state.segment_bytes);
  call.addresses.slot_offset = reinterpret_cast<const int64_t*>(state.slot_offset);
  call.addresses.region_offset = reinterpret_cast<const int64_t*>(state.region_offset);
  call.addresses.regions = reinterpret_cast<const uint8_t* const*>(header.regions);
  call.addresses.num_mains = state.capacity.num_mains;
  return call;
}

// The roles of a block's warps. Each has the registers to itself: none is inlined into the kernel.

template <class Mover>
UEC_DEVICE Mover make_mover(BlockShared& shared) {
  auto* const tiles =
      reinterpret_cast<uint8_t*>(&shared) + tiles_offset(shared.block.state->capacity);
  return Mover(shared.ring, tiles, shared.block);
}

// Publishes the call. The stream has finished with the slots, and the main weights are final.
template <class Memory, class Mover>
UEC_ROLE bool announce(BlockShared& shared) {
  BlockCall& block = shared.block;
  Memory memory(block);
  Mover mover = make_mover<Mover>(shared);
  const Report early = check_peers(memory, block.call.layout, block.call.epoch,
                                   CallRecord{block.state->last_record});
  if (early.fault != Fault::kNone) {
    fail(block, memory, mover, early.fault, early.aborter, early.wait);
    return false;
  }
  announce_call(block.call, memory, mover);
  announce_open(block.call, memory, mover);
  // A call that never has to wait ends by this look. Behind the announcements, because the host's
  // memory is far away.
  if (!is_cancelled(block)) return true;
  fail(block, memory, mover, Fault::kCancelled, -1, Wait{});
  return false;
}

template <class Memory, class Mover>
UEC_ROLE void fetch_all(BlockShared& shared, bool announced) {
  BlockCall& block = shared.block;
  Memory memory(block);
  Mover mover = make_mover<Mover>(shared);
  auto* const scratch = reinterpret_cast<uint8_t*>(&shared + 1);
  Fetcher<Memory, Mover> fetcher(block.call, memory, mover, scratch, scratch + block.call.num_ranks,
                                 ptx::block_x());
  if (announced && drive(fetcher, block, memory, mover)) return;
  while (fetcher.drain_step() != Step::kFinished) ptx::pause();
}

// Needs no clock: what it waits for is this block's own fetch side, or the hardware.
template <class Memory, class Mover>
UEC_ROLE void store_all(BlockShared& shared) {
  BlockCall& block = shared.block;
  Memory memory(block);
  Mover mover = make_mover<Mover>(shared);
  Storer<Memory, Mover> storer(block.call, memory, mover, shared.held);
  for (;;) {
    const Step step = storer.step();
    if (step == Step::kFinished) return;
    if (step == Step::kFailed) {
      const Wait wait = storer.wait();
      fail(block, memory, mover, storer.fault(), wait.peer, wait);
      break;
    }
    if (Warp::share(ptx::load_shared_relaxed(&block.stop)) != 0) break;
    if (step != Step::kProgress) ptx::pause();
  }
  while (storer.drain_step() != Step::kFinished) ptx::pause();
}

// By a warp of the last block to leave: what all its rank's blocks have done comes before this.
template <class Memory, class Mover>
UEC_ROLE void finish(BlockShared& shared, const CallHeader& header, bool counted) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  Memory memory(block);
  if (!has_failed(block)) {
    Mover mover = make_mover<Mover>(shared);
    Finish<Memory> finish(block.call, memory);
    if (drive(finish, block, memory, mover)) {
      block.call.reset_counters(Warp{});
      ptx::sync_warp();
      if (Warp::leader()) {
        state.digest = mix(state.digest, header.digest);
        state.last_record = block.call.epoch.record.word;
        state.epoch = block.call.epoch.number;
        state.last_call += counted;
      }
    }
  }
  ptx::sync_warp();
  if (has_failed(block) && !Warp::share(state.settled)) settle(block, memory);
  if (!Warp::leader()) return;
  state.entered = 0;
  state.left = 0;
}

template <int64_t kTileBytes, bool kFar>
UEC_DEVICE void replicate(const LaunchArgs& args, std::byte* shared_memory) {
  using Memory = DeviceMemory<kFar>;
  using Mover = DeviceMover<kTileBytes, kFar>;
  auto& shared = *reinterpret_cast<BlockShared*>(shared_memory);
  RankState& state = reinterpret_cast<RankState*>(args.states)[ptx::block_y()];
  auto* const call_block =
      reinterpret_cast<std::byte*>(args.calls) + ptx::block_y() * args.call_bytes;
  const DeviceCall& device = args.on_device[ptx::block_y()];
  if (ptx::thread_idx() == 0) {
    new (&shared.block) BlockCall{begin_call(state), &state, own_memory(state), 0, {}};
    shared.enters = ptx::load_relaxed(&state.failed) == 0;
    shared.first = ptx::fetch_add_acq_rel(&state.entered, 1) == 0 && shared.enters;
    init_ring(shared.ring);
  }
  ptx::sync_block();
  if (device.slot_expert != 0 && shared.enters)
    prepare<Memory, Mover>(shared, device, args.tag, shared_memory + tiles_offset(state.capacity),
                           call_block);
  else if (ptx::thread_idx() == 0)
    shared.prepared = shared.enters;
  if (ptx::thread_idx() == 0) {
    shared.nearby.num_tables = 0;
    if (shared.prepared) {
      shared.block.call = make_call(state, call_block);
      NearbyTables(shared.nearby, shared_memory + nearby_offset(state.capacity))
          .replace(shared.block.call, state.capacity);
    }
    shared.active = shared.prepared && shared.block.call.work.num_pieces > 0;
  }
  ptx::sync_block();
  fill_nearby(shared.nearby);
  ptx::sync_block();

  const bool fetches = ptx::thread_idx() < ptx::kWarpSize;
  if (fetches) {
    const bool announced = !shared.first || (shared.prepared && announce<Memory, Mover>(shared));
    if (shared.active) fetch_all<Memory, Mover>(shared, announced);
  } else if (shared.active) {
    store_all<Memory, Mover>(shared);
    if (Warp::leader()) ptx::add_relaxed(&state.bytes_stored, shared.ring.bytes_stored);
  }
  // The record of the next call is ordered after this call's flags: signals have no order of their
  // own, so that a far peer could otherwise see the record first.
  if constexpr (kFar) far::quiet();

  ptx::sync_block();
  if (ptx::thread_idx() == 0)
    shared.last = ptx::fetch_add_acq_rel(&state.left, 1) == ptx::num_blocks_x() - 1;
  ptx::sync_block();
  if (shared.last && fetches)
    finish<Memory, Mover>(shared, *reinterpret_cast<const CallHeader*>(call_block),
                          args.counted != 0);
}

}  // namespace uec::cuda
