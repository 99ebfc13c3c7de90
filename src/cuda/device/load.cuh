// The load kernel: from the ids of a rank, or of all ranks of a loopback group, to the table of
// loads on every rank, in one launch.
//
// All blocks of a rank count; the last of them to arrive announces the call, exchanges rows with
// the peers, and leaves the rank as the next call needs it. Only one block of each rank waits for
// peers: loopback needs no more blocks to be resident at the same time.
#pragma once

#include <new>

#include "core/base/digest.hpp"
#include "core/transfer/gather.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/load_block.hpp"
#include "cuda/device/load_count.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/mover.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

// The row is stored from one buffer of any size.
template <bool kFar>
using LoadMover = DeviceMover<0, kFar>;

UEC_DEVICE Call make_load_call(const RankState& state, const LoadBlock& part) {
  Call call;
  call.rank = state.rank;
  call.num_ranks = state.num_ranks;
  const uint64_t epoch = state.epoch + 1;
  const uint64_t digest = mix(state.digest, static_cast<uint64_t>(Operation::kGather));
  call.epoch = {epoch, CallRecord::make(epoch, digest, RecordKind::kCall)};
  call.layout = state.layout;
  call.addresses.bases = reinterpret_cast<uint8_t* const*>(part.bases);
  call.addresses.far = reinterpret_cast<const uint8_t*>(state.far);
  call.work.involved = part.involved;
  return call;
}

// By all threads of the last block: takes the rank's row, leaves zeros for the next call, and
// makes ready what the exchange needs. A block-wide barrier follows.
UEC_DEVICE void take_row(LoadShared& shared, const LoadBlock& part, RankState& state) {
  auto* const counts = reinterpret_cast<uint32_t*>(state.counts);
  for (int32_t e = ptx::thread_idx(); e < state.capacity.num_experts; e += ptx::num_threads()) {
    part.row[e] = static_cast<int32_t>(ptx::load_global(counts + e));
    counts[e] = 0;
  }
  // Ordinary stores into shared memory, which bulk stores will read.
  ptx::fence_proxy_async_shared();
  const auto* const bases = reinterpret_cast<const uint64_t*>(state.bases);
  for (int32_t r = ptx::thread_idx(); r < state.num_ranks; r += ptx::num_threads()) {
    part.bases[r] = bases[r];
    part.involved[r] = 1;
  }
  if (ptx::thread_idx() != 0) return;
  new (&shared.block) BlockCall{make_load_call(state, part), &state, own_memory(state), 0, {}};
  init_ring(shared.ring);
}

UEC_DEVICE int64_t id_at(const LoadCall& call, uint64_t position) {
  if (call.id_bytes == 4) return reinterpret_cast<const int32_t*>(call.ids)[position];
  return reinterpret_cast<const int64_t*>(call.ids)[position];
}

// This rank's own ids are bad: nothing of them goes to any table, and the peers hear of it at once.
template <class Memory>
UEC_ROLE void reject_ids(BlockCall& block, Memory& memory, const LoadCall& ids) {
  const RankState& state = *block.state;
  if (Warp::leader()) {  // before the report, which settle() publishes
    auto* const status = reinterpret_cast<Status*>(state.status);
    const uint64_t position = bad_id_word(state.bad_id);
    status->bad_position = static_cast<int64_t>(position);
    status->bad_id = id_at(ids, position);
  }
  Wait wait;
  wait.peer = state.rank;
  reject(block, memory, wait);
}

// By one warp. True: the table has every rank's row, for all threads that synchronise with this
// warp.
template <bool kFar>
UEC_ROLE bool exchange_rows(LoadShared& shared, const LoadBlock& part, const LoadCall& ids) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  DeviceMemory<kFar> memory(block);
  LoadMover<kFar> mover(shared.ring, reinterpret_cast<uint8_t*>(part.row), block);
  if (has_failed(block)) return false;  // in an earlier call: the peers have heard of that
  if (state.bad_id != 0) {
    reject_ids(block, memory, ids);
    return false;
  }
  const Report early =
      check_peers(memory, block.call.layout, block.call.epoch, CallRecord{state.last_record});
  if (early.fault != Fault::kNone) {
    fail(block, memory, early.fault, early.aborter, early.wait);
    return false;
  }
  announce_call(block.call, memory, mover);
  Gather gather(block.call, memory, mover, nullptr, state.capacity.num_experts, part.sent);
  if (drive(gather, block, block.clock, memory)) return true;
  while (gather.drain_step() != Step::kFinished) ptx::pause();
  return false;
}

// By all threads. Coherent loads: peers wrote this.
template <class T>
UEC_DEVICE void copy_words(T* to, const T* from, int64_t count) {
  const int64_t step = ptx::num_threads();
#pragma unroll 1
  for (int64_t at = ptx::thread_idx(); at < count; at += kQuadsAtOnce * step) {
    T words[kQuadsAtOnce];
#pragma unroll
    for (int32_t i = 0; i < kQuadsAtOnce; ++i)
      words[i] = at + i * step < count ? ptx::load_global(from + at + i * step) : T{};
#pragma unroll
    for (int32_t i = 0; i < kQuadsAtOnce; ++i)
      if (at + i * step < count) to[at + i * step] = words[i];
  }
}

UEC_DEVICE void copy_table(const RankState& state, uint64_t load) {
  const int32_t num_experts = state.capacity.num_experts;
  const int64_t entries = int64_t{state.num_ranks} * num_experts;
  const uint8_t* const from = own_memory(state) + state.layout.load(0, num_experts);
  const int64_t num_quads = load % 16 == 0 ? entries / 4 : 0;
  copy_words(reinterpret_cast<uint4*>(load), reinterpret_cast<const uint4*>(from), num_quads);
  copy_words(reinterpret_cast<uint32_t*>(load) + 4 * num_quads,
             reinterpret_cast<const uint32_t*>(from) + 4 * num_quads, entries - 4 * num_quads);
}

UEC_DEVICE void clear_table(const RankState& state, uint64_t load) {
  auto* const table = reinterpret_cast<int32_t*>(load);
  const int64_t count = int64_t{state.num_ranks} * state.capacity.num_experts;
  for (int64_t i = ptx::thread_idx(); i < count; i += ptx::num_threads()) table[i] = 0;
}

// By one warp. The next launch finds everything as this one did, except for the epoch.
template <bool kFar>
UEC_ROLE void finish_load(LoadShared& shared, bool done, bool counted) {
  BlockCall& block = shared.block;
  RankState& state = *block.state;
  if (!done) {
    DeviceMemory<kFar> memory(block);
    if (!has_failed(block)) fail(block, memory, Fault::kCancelled, -1, Wait{});
    ptx::sync_warp();
    if (!Warp::share(state.settled)) settle(block, memory);
  }
  if (!Warp::leader()) return;
  if (done) {
    state.digest = mix(state.digest, static_cast<uint64_t>(Operation::kGather));
    state.last_record = block.call.epoch.record.word;
    state.epoch = block.call.epoch.number;
    state.last_call += counted;
  }
  state.bad_id = 0;
  state.left = 0;
}

// The outcome, for the threads of a block.
enum class LoadEnd { kElsewhere, kGathered, kFailed };  // kElsewhere: another block goes on

template <bool kFar>
UEC_DEVICE LoadEnd load(const LoadArgs& args, std::byte* shared_memory) {
  auto& shared = *reinterpret_cast<LoadShared*>(shared_memory);
  RankState& state = reinterpret_cast<RankState*>(args.states)[ptx::block_y()];
  const LoadCall& own = args.calls[ptx::block_y()];
  LoadBlock part;
  LoadBlock::cut(shared_memory + kLoadHeadBytes, state.num_ranks, state.capacity.num_experts,
                 &part);
  count_ids(own,
            {reinterpret_cast<int32_t*>(state.counts), &state.bad_id, state.capacity.num_experts},
            part.row);
  // Acquire-release: what all blocks have counted comes before what the last one does.
  ptx::sync_block();
  if (ptx::thread_idx() == 0)
    shared.last = ptx::fetch_add_acq_rel(&state.left, 1) == ptx::num_blocks_x() - 1;
  ptx::sync_block();
  if (!shared.last) return LoadEnd::kElsewhere;
  take_row(shared, part, state);
  ptx::sync_block();

  const int32_t warp = ptx::thread_idx() / ptx::kWarpSize;
  if (warp == 0) {
    const bool gathered = exchange_rows<kFar>(shared, part, own);
    if (Warp::leader()) shared.gathered = gathered;
  }
  // A call that never has to wait learns of its cancellation here. By another warp where there is
  // one, because host memory is far away.
  if (warp == ptx::num_threads() / ptx::kWarpSize - 1) {
    const bool cancelled = is_cancelled(shared.block);
    if (Warp::leader()) shared.cancelled = cancelled;
  }
  ptx::sync_block();
  const bool done = shared.gathered && !shared.cancelled;
  // Before this launch ends: peers write the table again once the next call has been announced.
  if (done)
    copy_table(state, own.load);
  else  // a planner of it does nothing
    clear_table(state, own.load);
  if (warp == 0) finish_load<kFar>(shared, done, args.counted != 0);
  return done ? LoadEnd::kGathered : LoadEnd::kFailed;
}

}  // namespace uec::cuda
