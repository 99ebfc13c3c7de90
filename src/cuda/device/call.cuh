// What the kernels of calls have in common: how a rank's blocks enter a call, announce it, and
// leave.
//
// The first block of a rank to begin announces the call; the last to leave waits for what peers
// owe, and advances the epoch.
#pragma once

#include <cstddef>
#include <new>

#include "core/base/digest.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/failure.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/prepare.cuh"
#include "cuda/device/slot_words.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

inline constexpr int32_t kKnownQuads = offsetof(RankState, prepared) / sizeof(uint4);
static_assert(kHeaderWords <= kKnownQuads);

// By all threads of a block: draws a ticket and copies what it has to know of its rank and, unless
// it is made here, the call's header. All loads are under way at once: one trip to memory.
UEC_DEVICE void enter(CallShared& shared, RankState& state, const std::byte* call_block,
                      bool has_block) {
  int32_t failed = 0, ticket = 0;
  if (ptx::thread_idx() == 0) {
    failed = ptx::load_relaxed(&state.failed);
    // Relaxed: no block reads what others do between their tickets and their leaving.
    ticket = ptx::fetch_add_relaxed(&state.entered, 1);
  }
  const auto* const from = reinterpret_cast<const uint4*>(&state);
  const auto* const of_header = reinterpret_cast<const uint64_t*>(call_block);
  for (int32_t i = ptx::thread_idx(); i < kKnownQuads; i += ptx::num_threads()) {
    const bool has_both = has_block && i < kHeaderWords;
    const uint4 known = ptx::load_global(from + i);
    const uint64_t header = has_both ? ptx::load_global(of_header + i) : 0;
    reinterpret_cast<uint4*>(&shared.known)[i] = known;
    if (has_both) put_header(shared, i, header);
  }
  if (ptx::thread_idx() == 0) {
    shared.healthy = shared.prepared = failed == 0;
    shared.first = ticket == 0 && failed == 0;
    shared.polls_cancel = ticket + 1 == ptx::num_blocks_x() && failed == 0;
  }
  ptx::sync_block();
}

// By all threads: fills enough to publish that there is no call. Field by field, because a
// compiler copies a large struct byte by byte.
UEC_DEVICE void begin_block(BlockCall& block, const RankState& known, RankState& state,
                            bool has_header) {
  const auto* const from = reinterpret_cast<const uint64_t*>(&known.layout);
  auto* const layout = reinterpret_cast<uint64_t*>(&block.call.layout);
  for (int32_t i = ptx::thread_idx(); i < static_cast<int32_t>(sizeof(SymmetricLayout) / 8);
       i += ptx::num_threads())
    layout[i] = from[i];
  if (ptx::thread_idx() != 0) return;
  block.call.rank = known.rank;
  block.call.num_ranks = known.num_ranks;
  block.call.epoch.number = known.epoch + 1;
  if (!has_header) {
    block.call.addresses.bases = known.bases;
    block.call.addresses.far = known.far;
  }
  block.state = &state;
  block.own = own_memory(known);
  block.stop = 0;
}

// By all threads: copies the arrays of the block that the host, or this kernel, has filled, to
// `copy`, if there is room.
UEC_DEVICE void take_call(CallShared& shared, std::byte* block, std::byte* copy) {
  constexpr int32_t kAtOnce = 4;
  const RankState& known = shared.known;
  Call& call = shared.block.call;
  const bool has_room = shared.header.bytes <= kNearbyBytes;
  const int32_t quads = has_room ? shared.header.bytes / 16 : 0;
  const auto* const from = reinterpret_cast<const uint4*>(block + kHeaderBytes);
  if (ptx::thread_idx() == ptx::kWarpSize)
    call.epoch.record = CallRecord::make(call.epoch.number, mix(known.digest, shared.header.digest),
                                         RecordKind::kCall);
  if (ptx::thread_idx() < ptx::kWarpSize)
    place_arrays(Warp{}, call, shared.header.pointers, has_room ? copy - kHeaderBytes : block,
                 block);
#pragma unroll 1
  for (int32_t i = ptx::thread_idx(); i < quads; i += kAtOnce * ptx::num_threads()) {
    uint4 own[kAtOnce];
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k)
      if (i + k * ptx::num_threads() < quads)
        own[k] = ptx::load_global(from + i + k * ptx::num_threads());
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k)
      if (i + k * ptx::num_threads() < quads)
        reinterpret_cast<uint4*>(copy)[i + k * ptx::num_threads()] = own[k];
  }
}

// By one warp: publishes the call. Earlier work on the stream is done with the slots and their
// gradients, and the main weights are final.
template <class Memory>
UEC_ROLE void announce(CallShared& shared) {
  BlockCall& block = shared.block;
  Memory memory(block);
  const Report early = check_peers(memory, block.call.layout, block.call.epoch,
                                   CallRecord{shared.known.last_record});
  if (early.fault != Fault::kNone)
    return fail(block, memory, early.fault, early.aborter, early.wait);
  FlagPublisher publisher;
  announce_call_and_open(block.call, memory, publisher);
}

// By a warp of the last block to leave: it is ordered after what all its rank's blocks have done.
template <class Memory, bool kFillsSlots>
UEC_ROLE void finish(CallShared& shared, int32_t bank, bool has_call_number) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  Memory memory(block);
  const auto finishes = [&] {
    if constexpr (kFillsSlots) {
      FinishSlots<Memory> finish(block, memory, shared.known, bank, has_call_number);
      return drive(finish, block, block.clock, memory);
    } else {
      Finish<Memory> finish(block.call, memory);
      return drive(finish, block, block.clock, memory);
    }
  };
  if (!has_failed(block) && finishes()) {
    if (Warp::leader()) {
      state.digest = mix(shared.known.digest, shared.header.digest);
      state.last_record = block.call.epoch.record.word;
      state.epoch = block.call.epoch.number;
      state.last_call = shared.known.last_call + has_call_number;
    }
  } else if (Warp::leader()) {
    if (!state.failure_published)
      publish_failure(state);
    else
      release_slots(state);  // a replay's stream may have cleared the words
  }
  if (!Warp::leader()) return;
  state.entered = 0;
  state.left = 0;
}

// A kernel of calls, by all threads of its grid. `Kernel` has
//   Shared, Memory, kOperation    a CallShared, a DeviceMemory, an Operation
//   begin(shared)                 by one thread, before the others
//   scratch_offset(known)         where the call's block can be made, before there is work
//   has_work(call)
//   work(shared)                  all of a block's work, by all its threads
//   kFinishingWarp                the warp that finishes the call: one that publishes nothing in
//                                 work() does not wait for stores
//   leave(known, args, device)    by one thread, after all that the rank's blocks have done, also
//                                 where the call has failed
template <class Kernel>
UEC_DEVICE void run_call(const LaunchArgs& args, std::byte* shared_memory) {
  using Memory = typename Kernel::Memory;
  auto& shared = *reinterpret_cast<typename Kernel::Shared*>(shared_memory);
  RankState& state = args.states[ptx::block_y()];
  auto* const call_block = args.calls + ptx::block_y() * args.call_bytes;
  const DeviceCall& device = args.on_device[ptx::block_y()];
  const bool on_host = device.slot_expert == 0;
  enter(shared, state, call_block, on_host);
  const RankState& known = shared.known;
  begin_block(shared.block, known, state, on_host);
  if (ptx::thread_idx() == ptx::kWarpSize) Kernel::begin(shared);
  if (!on_host && shared.healthy)
    prepare<Memory, Kernel::kOperation>(shared, device, args,
                                        shared_memory + Kernel::scratch_offset(known), call_block);
  else
    ptx::sync_block();
  if (shared.prepared) take_call(shared, call_block, shared_memory + sizeof(shared));
  ptx::sync_block();

  // The last warp of the first block announces the call: it has nothing to store yet. That of
  // another one, if there is one, asks the host: a call that never has to wait learns of its
  // cancellation here, and host memory is far away.
  const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
  if (shared.prepared && warp == ptx::num_threads() / ptx::kWarpSize - 1) {
    if (shared.first) announce<Memory>(shared);
    if (shared.polls_cancel && is_cancelled(known.status)) {
      Memory memory(shared.block);
      fail(shared.block, memory, Fault::kCancelled, -1, Wait{});
    }
  }
  if (shared.prepared && Kernel::has_work(shared.block.call)) Kernel::work(shared);
  // The record of the next call is ordered after this call's flags: signals have no order of their
  // own, so that a far peer could otherwise see the record first.
  if constexpr (Memory::kFar) far::quiet();

  ptx::sync_block();
  if (warp != Kernel::kFinishingWarp) return;
  bool last = false;
  if (Warp::leader()) last = ptx::fetch_add_acq_rel(&state.left, 1) == ptx::num_blocks_x() - 1;
  if (!Warp::broadcast(last)) return;
  finish<Memory, Kernel::kOperation == Operation::kReplicate>(shared, args.bank,
                                                              args.has_call_number != 0);
  if (Warp::leader()) Kernel::leave(known, args, device);
}

}  // namespace uec::cuda
