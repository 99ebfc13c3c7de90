// What a rank tells its peers between calls: one warp a rank, which waits for nobody.
#pragma once

#include <new>

#include "core/call.hpp"
#include "core/failure.hpp"
#include "cuda/block.hpp"
#include "cuda/memory.cuh"
#include "cuda/mover.cuh"
#include "cuda/wait.cuh"

namespace uec::cuda {

// `shared` is a BlockCall, and a Ring that is not used.
template <bool kFar>
UEC_DEVICE void notify(RankState& state, Notice notice, BlockCall& block, Ring& ring) {
  using Memory = DeviceMemory<kFar>;
  using Mover = DeviceMover<0, kFar>;
  if (Warp::leader()) {
    new (&block) BlockCall{begin_call(state), &state, own_memory(state), 0, {}};
  }
  ptx::sync_warp();
  if (has_failed(block)) return;  // the peers have heard of that
  Memory memory(block);
  Mover mover(ring, nullptr, block);
  auto* const status = reinterpret_cast<Status*>(state.status);
  const CallRecord last{state.last_record};
  if (notice == Notice::kClosed) {
    const int32_t peer = find_disagreement(memory, state.layout, last);
    if (Warp::leader()) status->disagreement = peer;
    announce_absence(block.call, memory, mover, CallRecord::farewell(state.epoch, last).word);
    while (!memory.flags_delivered()) {
    }
    return;
  }
  Wait wait;
  wait.peer = state.rank;
  if (notice == Notice::kRejected)
    reject(block, memory, mover, wait);
  else
    fail(block, memory, mover, Fault::kCancelled, -1, wait);
  ptx::sync_warp();
  settle(block, memory);
}

}  // namespace uec::cuda
