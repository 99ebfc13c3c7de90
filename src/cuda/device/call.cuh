// What the kernels of calls have in common: how a rank's blocks enter a call, announce it, and
// leave.
//
// The first block of a rank to begin announces the call; the last to leave waits for what peers
// owe, and advances the epoch.
#pragma once

#include <new>

#include "core/base/digest.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/failure.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/nearby.cuh"
#include "cuda/device/prepare.cuh"
#include "cuda/device/wait.cuh"

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
  call.work.num_reductions = header.num_reductions;
  call.tiles.num_segments = header.num_segments;
  call.tiles.tile_bytes = header.tile_bytes;
  call.addresses.segment_bytes = reinterpret_cast<const int64_t*>(state.segment_bytes);
  call.addresses.slot_offset = reinterpret_cast<const int64_t*>(state.slot_offset);
  call.addresses.region_offset = reinterpret_cast<const int64_t*>(state.region_offset);
  call.addresses.regions = reinterpret_cast<const uint8_t* const*>(header.regions);
  call.addresses.num_mains = state.capacity.num_mains;
  call.grads = grads_of(state);
  return call;
}

// By one warp: publishes the call. Earlier work on the stream is done with the slots and their
// gradients, and the main weights are final.
template <class Memory>
UEC_ROLE bool announce(CallShared& shared) {
  BlockCall& block = shared.block;
  Memory memory(block);
  const Report early = check_peers(memory, block.call.layout, block.call.epoch,
                                   CallRecord{block.state->last_record});
  if (early.fault != Fault::kNone) {
    fail(block, memory, early.fault, early.aborter, early.wait);
    return false;
  }
  DeviceHerald herald;
  announce_call(block.call, memory, herald);
  announce_open(block.call, memory, herald);
  // A call that never has to wait learns of its cancellation here. After the announcements, because
  // host memory is far away.
  if (!is_cancelled(block)) return true;
  fail(block, memory, Fault::kCancelled, -1, Wait{});
  return false;
}

// By a warp of the last block to leave: it is ordered after what all its rank's blocks have done.
template <class Memory>
UEC_ROLE void finish(CallShared& shared, const CallHeader& header, bool counted) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  Memory memory(block);
  if (!has_failed(block)) {
    Finish<Memory> finish(block.call, memory);
    if (drive(finish, block, block.clock, memory)) {
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

// A kernel of calls, by all threads of its grid. `Kernel` has
//   Shared, Memory, kOperation    a CallShared, a DeviceMemory, an Operation
//   begin(shared)                 by one thread, before the others
//   nearby(capacity)              where copies of tables lie in shared memory
//   spare(capacity)               where the call's block can be made, before there is work
//   take(tables, call, capacity)  puts copies in the place of what the call points to
//   has_work(call)
//   work(shared, announced)       all of a block's work, by all its threads. `announced`: in the
//   first
//                                 warp of a rank's first block, whether its call has not failed
//   leave(device)                 by one thread, after all that the rank's blocks have done, also
//                                 where the call has failed
template <class Kernel>
UEC_DEVICE void run_call(const LaunchArgs& args, std::byte* shared_memory) {
  using Memory = typename Kernel::Memory;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory);
  RankState& state = reinterpret_cast<RankState*>(args.states)[ptx::block_y()];
  auto* const call_block =
      reinterpret_cast<std::byte*>(args.calls) + ptx::block_y() * args.call_bytes;
  const DeviceCall& device = args.on_device[ptx::block_y()];
  if (ptx::thread_idx() == 0) {
    new (&shared.block) BlockCall{begin_call(state), &state, own_memory(state), 0, {}};
    shared.enters = ptx::load_relaxed(&state.failed) == 0;
    shared.first = ptx::fetch_add_acq_rel(&state.entered, 1) == 0 && shared.enters;
    Kernel::begin(shared);
  }
  ptx::sync_block();
  if (device.slot_expert != 0 && shared.enters)
    prepare<Memory, Kernel::kOperation>(shared, device, args.tag,
                                        shared_memory + Kernel::spare(state.capacity), call_block);
  else if (ptx::thread_idx() == 0)
    shared.prepared = shared.enters;
  if (ptx::thread_idx() == 0) {
    shared.nearby.num_tables = 0;
    if (shared.prepared) {
      Call& call = shared.block.call;
      call = make_call(state, call_block);
      NearbyTables tables(shared.nearby, shared_memory + Kernel::nearby(state.capacity));
      Kernel::take(tables, call, state.capacity);
    }
    shared.active = shared.prepared && Kernel::has_work(shared.block.call);
  }
  ptx::sync_block();
  fill_nearby(shared.nearby);
  ptx::sync_block();

  const bool leads = ptx::thread_idx() < ptx::kWarpSize;
  const bool announced = !leads || !shared.first || (shared.prepared && announce<Memory>(shared));
  if (shared.active) Kernel::work(shared, announced);
  // The record of the next call is ordered after this call's flags: signals have no order of their
  // own, so that a far peer could otherwise see the record first.
  if constexpr (Memory::kFar) far::quiet();

  ptx::sync_block();
  if (ptx::thread_idx() == 0)
    shared.last = ptx::fetch_add_acq_rel(&state.left, 1) == ptx::num_blocks_x() - 1;
  ptx::sync_block();
  if (shared.last && leads)
    finish<Memory>(shared, *reinterpret_cast<const CallHeader*>(call_block), args.counted != 0);
  if (shared.last && ptx::thread_idx() == 0) Kernel::leave(device);
}

}  // namespace uec::cuda
