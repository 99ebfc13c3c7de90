// Making a call's block on the device, from a plan in its memory: what engine.cc does for a plan on
// the host. The first block of a rank to begin makes it; the others wait for it.
#pragma once

#include <new>

#include "core/call.hpp"
#include "core/failure.hpp"
#include "core/prepare.hpp"
#include "core/validate.hpp"
#include "cuda/block.hpp"
#include "cuda/memory.cuh"
#include "cuda/wait.cuh"

namespace uec::cuda {

UEC_DEVICE GroupTables group_tables(const RankState& state) {
  GroupTables tables;
  tables.topology = {state.num_ranks,
                     state.capacity.num_experts,
                     state.capacity.slots_per_rank,
                     reinterpret_cast<const int32_t*>(state.home),
                     reinterpret_cast<const int32_t*>(state.domain),
                     state.allow_cross_domain != 0};
  tables.rank = state.rank;
  tables.segment_bytes = reinterpret_cast<const int64_t*>(state.segment_bytes);
  tables.main_idx = reinterpret_cast<const int32_t*>(state.main_idx);
  tables.tile_bytes = state.tile_bytes;
  tables.cost = state.cost;
  return tables;
}

UEC_DEVICE uint64_t plan_digest(const Topology& t, const DeviceCall& device) {
  uint64_t digest = 0;
  if (device.slot_quota != 0)
    digest = digest_ints(digest, reinterpret_cast<const int32_t*>(device.slot_quota),
                         int64_t{t.num_ranks} * t.slots_per_rank);
  if (device.home_quota != 0)
    digest =
        digest_ints(digest, reinterpret_cast<const int32_t*>(device.home_quota), t.num_experts);
  return digest;
}

// Why this rank refuses the plan, in the words of a Wait; `seen` is 0 if it does not. By a warp.
UEC_DEVICE Wait find_refusal(const DeviceCall& device, const GroupTables& tables) {
  const auto* const slot_expert = reinterpret_cast<const int32_t*>(device.slot_expert);
  const Topology& t = tables.topology;
  Wait wait;
  wait.peer = tables.rank;
  if (const auto* const home = reinterpret_cast<const int32_t*>(device.home)) {
    uint32_t differs = ~0u;
    for (int32_t e = Warp::index(); e < t.num_experts && differs == ~0u; e += Warp::size())
      if (home[e] != t.home[e]) differs = static_cast<uint32_t>(e);
    differs = Warp::lowest(differs);
    if (differs != ~0u) {
      wait.seen = static_cast<uint64_t>(Refusal::kHome);
      wait.expert = static_cast<int32_t>(differs);
      return wait;
    }
  }
  const PlanCheck check = check_plan(t, slot_expert);
  wait.seen = static_cast<uint64_t>(check.fault);
  wait.expert = check.expert;
  wait.piece = check.rank * t.slots_per_rank + check.slot;
  return wait;
}

// The same for main weights whose address is missing, once it is known what this rank sends.
UEC_DEVICE Wait find_missing(const PrepareShared& made, const Capacity& capacity, int32_t rank) {
  const int32_t num_segments = made.call.tiles.num_segments;
  const int32_t count = made.call.work.num_pieces * num_segments;
  const auto segment_of = [&](int32_t i) { return made.arrays.segment[i % num_segments]; };
  uint32_t missing = ~0u;
  for (int32_t i = Warp::index(); i < count && missing == ~0u; i += Warp::size()) {
    const Piece& piece = made.call.work.pieces[i / num_segments];
    if (piece.source == Source::kMain &&
        made.arrays.mains[segment_of(i) * capacity.num_mains + piece.source_idx] == nullptr)
      missing = static_cast<uint32_t>(i);
  }
  missing = Warp::lowest(missing);
  Wait wait;
  wait.peer = rank;
  if (missing == ~0u) return wait;
  const auto at = static_cast<int32_t>(missing);
  wait.seen = static_cast<uint64_t>(Refusal::kWeights);
  wait.expert = made.call.work.tasks[made.call.work.pieces[at / num_segments].task].expert;
  wait.piece = segment_of(at);
  return wait;
}

// By a warp: makes the block's image in shared memory, where `made` is. Returns why not, in `seen`.
UEC_APART inline Wait prepare_call(const RankState& state, const DeviceCall& device, PrepareShared& made) {
  const GroupTables tables = group_tables(state);
  const Capacity& capacity = state.capacity;
  const Wait refusal = find_refusal(device, tables);
  if (refusal.seen != 0) return refusal;
  if (Warp::leader()) {
    new (&made) PrepareShared;
    made.cut(reinterpret_cast<std::byte*>(&made + 1), capacity);
    ReplicateArgs& args = made.args;
    for (int32_t i = 0; i < capacity.num_segments; ++i)
      if ((device.segments >> i & 1) != 0) made.segments[args.num_segments++] = i;
    args.slot_expert = reinterpret_cast<const int32_t*>(device.slot_expert);
    args.segments = made.segments;
    args.mode = device.mode;
    args.region = device.regions == 0 ? -1 : device.region;
    args.plan_digest = plan_digest(tables.topology, device);
    const uint64_t digest =
        prepare_replicate(tables, args, made.arrays, made.schedule, &made.shape, &made.call);
    const bool pull = made.schedule.schedule.mode == Mode::kPull;
    new (made.image) CallHeader(make_header(made.call, digest, pull ? device.regions : 0));
  }
  Warp::sync();
  const auto* const mains = reinterpret_cast<const uint64_t*>(device.mains);
  for (int32_t i = Warp::index(); i < capacity.num_segments * capacity.num_mains; i += Warp::size())
    made.arrays.mains[i] = reinterpret_cast<const uint8_t*>(mains[i]);
  made.call.reset_counters(Warp{});
  Warp::sync();
  return find_missing(made, capacity, state.rank);
}

// By the whole of the first block: makes the call's block, or fails the call and tells the peers.
// `tiles` is their memory.
template <class Memory, class Mover>
UEC_DEVICE void make_block(BlockShared& shared, const DeviceCall& device, std::byte* tiles,
                           std::byte* call_block) {
  RankState& state = *shared.block.state;
  auto& made = *reinterpret_cast<PrepareShared*>(tiles);
  if (ptx::thread_idx() < ptx::kWarpSize) {
    const Wait refusal = prepare_call(state, device, made);
    if (refusal.seen != 0) {
      Memory memory(shared.block);
      Mover mover(shared.ring, nullptr, shared.block);
      reject(shared.block, memory, mover, refusal);
    }
    if (Warp::leader()) shared.prepared = refusal.seen == 0;
  }
  ptx::sync_block();
  if (!shared.prepared) return;
  const auto* const image = reinterpret_cast<const uint64_t*>(made.image);
  auto* const to = reinterpret_cast<uint64_t*>(call_block);
  for (int64_t i = ptx::thread_idx(); i < call_block_bytes(state.capacity) / 8;
       i += ptx::num_threads())
    to[i] = image[i];
  // Bulk loads, in the async proxy, will put tiles where the image was.
  ptx::fence_proxy_async_shared();
  ptx::sync_block();
  // Release: pairs with await_block() of the rank's other blocks, which read the call's block then.
  if (ptx::thread_idx() == 0) ptx::store_release_device(&state.prepared, state.epoch + 1);
}

// By one thread of another block; false: the rank has failed. Needs no clock: what it waits for is
// a block that runs.
UEC_DEVICE bool await_block(const RankState& state) {
  const uint64_t epoch = state.epoch + 1;
  while (ptx::load_acquire_device(&state.prepared) != epoch) {
    if (ptx::load_relaxed(&state.failed) != 0) return false;
    ptx::pause();
  }
  return true;
}

// By all threads. Sets shared.prepared, for the thread that goes on.
template <class Memory, class Mover>
UEC_DEVICE void prepare(BlockShared& shared, const DeviceCall& device, std::byte* tiles,
                        std::byte* call_block) {
  if (shared.first)
    make_block<Memory, Mover>(shared, device, tiles, call_block);
  else if (ptx::thread_idx() == 0)
    shared.prepared = await_block(*shared.block.state);
}

}  // namespace uec::cuda
