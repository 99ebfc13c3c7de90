// What a rank publishes to its peers between calls: one warp per rank, which waits for no peer.
#pragma once

#include <new>

#include "core/transfer/announce.hpp"
#include "core/transfer/failure.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

template <bool kFar>
UEC_DEVICE void notify(RankState& state, Notice notice, BlockCall& block) {
  using Memory = DeviceMemory<kFar>;
  if (Warp::leader()) {
    new (&block) BlockCall{begin_call(state), &state, own_memory(state), 0, {}};
  }
  ptx::sync_warp();
  if (has_failed(block)) return;  // the peers know of that failure
  Memory memory(block);
  Status* const status = state.status;
  const CallRecord last{state.last_record};
  if (notice == Notice::kClosed) {
    const int32_t peer = find_disagreement(memory, state.layout, last);
    if (Warp::leader()) status->disagreement = peer;
    FlagPublisher publisher;
    announce_absence(block.call, memory, publisher, CallRecord::farewell(state.epoch, last).word);
    while (!memory.flags_delivered()) {
    }
    ptx::sync_warp();
    // Replays of graphs that outlive the group do nothing, and report nothing.
    if (Warp::leader()) state.failed = state.failure_published = 1;
    return;
  }
  Wait wait;
  wait.peer = state.rank;
  if (notice == Notice::kRejected)
    reject(block, memory, wait);
  else
    fail(block, memory, Fault::kCancelled, -1, wait);
  ptx::sync_warp();
  if (Warp::leader()) publish_failure(state);
}

}  // namespace uec::cuda
