// Making a call's block on the device, from a plan in its memory: what engine.cc does for a plan on
// the host. The first block of a rank to begin makes it; the others wait for it.
#pragma once

#include <new>

#include "core/plan/check.hpp"
#include "core/transfer/announce.hpp"
#include "core/transfer/failure.hpp"
#include "core/transfer/prepare.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/memory.cuh"
#include "cuda/device/wait.cuh"

namespace uec::cuda {

// By a warp: copies the tables that are read repeatedly, in chains of dependent loads, to shared
// memory.
UEC_DEVICE void copy_ints(int32_t* to, uint64_t from, int32_t count) {
  const auto* const values = reinterpret_cast<const int32_t*>(from);
  for (int32_t i = Warp::index(); i < count; i += Warp::size()) to[i] = values[i];
}

// By a warp: the arguments of prepare_replicate() and prepare_reduce(), from what the group and the
// call give.
UEC_APART void gather_tables(const RankState& state, const DeviceCall& device, uint64_t tag,
                             PrepareShared& made) {
  const Capacity& c = state.capacity;
  if (Warp::leader()) {
    new (&made) PrepareShared;
    made.cut(reinterpret_cast<std::byte*>(&made + 1), c);
    GroupTables& tables = made.tables;
    tables.topology = {c.num_ranks, c.num_experts, c.slots_per_rank,
                       made.home,   made.domain,   state.allow_cross_domain != 0};
    tables.rank = state.rank;
    tables.segment_bytes = reinterpret_cast<const int64_t*>(state.segment_bytes);
    tables.main_idx = made.main_idx;
    tables.tile_bytes = state.tile_bytes;
    tables.cost = state.cost;
    tables.grads = grads_of(state);
    ReplicateArgs& args = made.args;
    for (int32_t i = 0; i < c.num_segments; ++i)
      if ((device.segments >> i & 1) != 0) made.segments[args.num_segments++] = i;
    args.slot_expert = made.slot_expert;
    args.tag = tag;
    args.segments = made.segments;
    args.mode = device.mode;
    args.region = device.regions == 0 ? -1 : device.region;
    ReduceArgs& reduce = made.reduce;
    for (int32_t i = 0; i < c.num_grad_segments; ++i)
      made.main_type[i] = static_cast<GradType>(device.segments >> i & 1);
    reduce.slot_expert = made.slot_expert;
    reduce.tag = tag;
    reduce.main_type = made.main_type;
    reduce.mode = device.mode;
    reduce.zero = device.zero != 0;
  }
  Warp::sync();
  copy_ints(made.home, state.home, c.num_experts);
  copy_ints(made.domain, state.domain, c.num_ranks);
  copy_ints(made.main_idx, state.main_idx, c.num_experts);
  copy_ints(made.slot_expert, device.slot_expert, static_cast<int32_t>(c.replicas()));
  Warp::sync();
}

// Why this rank refuses the plan, in the words of a Wait; `seen` is 0 if it does not. By a warp.
UEC_APART Wait find_refusal(const DeviceCall& device, const PrepareShared& made) {
  const Topology& t = made.tables.topology;
  Wait wait;
  wait.peer = made.tables.rank;
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
  const PlanCheck check = check_plan(Warp{}, t, made.slot_expert);
  wait.seen = static_cast<uint64_t>(check.fault);
  wait.expert = check.expert;
  wait.piece = check.rank * t.slots_per_rank + check.slot;
  return wait;
}

// The same for main weights whose address is missing, once it is known what this rank sends.
UEC_APART Wait find_missing(const PrepareShared& made, const Capacity& capacity, int32_t rank) {
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

// By a warp: makes the block's image in shared memory, where `made` is. A refusal has its reason in
// `seen`.
template <Operation kOperation>
UEC_APART Wait prepare_call(const RankState& state, const DeviceCall& device, uint64_t tag,
                            PrepareShared& made) {
  gather_tables(state, device, tag, made);
  const Wait refusal = find_refusal(device, made);
  if (refusal.seen != 0) return refusal;
  const uint64_t quotas = digest_quotas(Warp{}, made.tables.topology,
                                        reinterpret_cast<const int32_t*>(device.slot_quota),
                                        reinterpret_cast<const int32_t*>(device.home_quota));
  if (Warp::leader()) made.args.plan_digest = made.reduce.plan_digest = quotas;
  Warp::sync();
  const Capacity& capacity = state.capacity;
  constexpr bool kReduces = kOperation == Operation::kReduce;
  uint64_t digest;
  if constexpr (kReduces)
    digest = prepare_reduce(Warp{}, made.tables, made.reduce, made.arrays, made.schedule,
                            &made.shape, &made.call);
  else
    digest = prepare_replicate(Warp{}, made.tables, made.args, made.arrays, made.schedule,
                               &made.shape, &made.call);
  if (Warp::leader()) {
    const bool pull = !kReduces && made.schedule.schedule.mode == Mode::kPull;
    new (made.image) CallHeader(make_header(made.call, digest, pull ? device.regions : 0));
  }
  const auto* const mains = reinterpret_cast<const uint64_t*>(device.mains);
  const int32_t segments = kReduces ? capacity.num_grad_segments : capacity.num_segments;
  for (int32_t i = Warp::index(); i < segments * capacity.num_mains; i += Warp::size())
    made.arrays.mains[i] = reinterpret_cast<const uint8_t*>(mains[i]);
  made.call.reset_counters(Warp{});
  Warp::sync();
  return find_missing(made, capacity, state.rank);
}

// By the whole of the first block: makes the call's block, or fails the call and tells the peers.
// `spare` is shared memory that is free.
template <class Memory, Operation kOperation>
UEC_DEVICE void make_block(CallShared& shared, const DeviceCall& device, uint64_t tag,
                           std::byte* spare, std::byte* call_block) {
  RankState& state = *shared.block.state;
  auto& made = *reinterpret_cast<PrepareShared*>(spare);
  if (ptx::thread_idx() < ptx::kWarpSize) {
    const Wait refusal = prepare_call<kOperation>(state, device, tag, made);
    if (refusal.seen != 0) {
      Memory memory(shared.block);
      reject(shared.block, memory, refusal);
    }
    if (Warp::leader()) shared.prepared = refusal.seen == 0;
  }
  ptx::sync_block();
  if (!shared.prepared) return;
  const auto* const image = reinterpret_cast<const uint64_t*>(made.image);
  auto* const to = reinterpret_cast<uint64_t*>(call_block);
  const auto words = static_cast<int32_t>(call_block_bytes(state.capacity) / 8);
  for (int32_t i = ptx::thread_idx(); i < words; i += ptx::num_threads()) to[i] = image[i];
  // Bulk loads, in the async proxy, may put tiles where the image was.
  ptx::fence_proxy_async_shared();
  ptx::sync_block();
  // Release: pairs with await_block() of the rank's other blocks, which read the call's block then.
  if (ptx::thread_idx() == 0) ptx::store_release_device(&state.prepared, state.epoch + 1);
}

// By one thread of another block; false: the rank has failed. Needs no clock: the block that it
// waits for is running.
UEC_DEVICE bool await_block(const RankState& state) {
  const uint64_t epoch = state.epoch + 1;
  while (ptx::load_acquire_device(&state.prepared) != epoch) {
    if (ptx::load_relaxed(&state.failed) != 0) return false;
    ptx::pause();
  }
  return true;
}

// By all threads. Sets shared.prepared and, if so, the header.
template <class Memory, Operation kOperation>
UEC_DEVICE void prepare(CallShared& shared, const DeviceCall& device, uint64_t tag,
                        std::byte* spare, std::byte* call_block) {
  ptx::sync_block();
  if (shared.first)
    make_block<Memory, kOperation>(shared, device, tag, spare, call_block);
  else if (ptx::thread_idx() == 0)
    shared.prepared = await_block(*shared.block.state);
  ptx::sync_block();
  if (!shared.prepared) return;
  constexpr int32_t kWords = sizeof(CallHeader) / sizeof(uint64_t);
  for (int32_t i = ptx::thread_idx(); i < kWords; i += ptx::num_threads())
    reinterpret_cast<uint64_t*>(&shared.header)[i] =
        reinterpret_cast<const uint64_t*>(call_block)[i];
  ptx::sync_block();
}

}  // namespace uec::cuda
